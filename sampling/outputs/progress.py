"""Shows the progress of a run: a bar while it runs, and one line at its end."""
import time

from sampling.outputs.console import log, set_progress_bar, shows_progress_bar
from sampling.params import Sample


class Progress:
    """Counts samples and tokens, and shows a bar on standard error if shows_progress_bar().

    total_samples: how many samples the run will generate; None if unknown.
    """

    def __init__(self, total_samples: int | None, max_new_tokens: int):
        self.max_new_tokens = max_new_tokens
        self.start_time = time.perf_counter()
        self.num_samples = self.num_tokens = 0
        self.bar = None
        if shows_progress_bar():
            from tqdm import tqdm
            total = total_samples and total_samples * max_new_tokens
            self.bar = tqdm(total=total, unit=" tokens", unit_scale=True, delay=1, postfix="0 samples", leave=False)
            set_progress_bar(self.bar)

    def add_tokens(self, num_tokens: int) -> None:
        """Advance the bar by num_tokens. A negative number takes back the tokens of a batch that ran out of memory."""
        if self.bar is not None:
            self.bar.update(num_tokens)

    def add_sample(self, sample: Sample) -> None:
        """Count a finished sample."""
        self.num_samples, self.num_tokens = self.num_samples + 1, self.num_tokens + sample.num_tokens
        if self.bar is not None:
            if self.bar.total:
                self.bar.total -= self.max_new_tokens - sample.num_tokens # it stopped early
            self.bar.set_postfix_str(f"{self.num_samples} samples", refresh=False)

    def close(self, peak_memory: int | None) -> None:
        """Remove the bar and log what the run did, if anything; peak_memory in bytes."""
        if self.bar is not None:
            self.bar.close()
            set_progress_bar(None)
        if not self.num_samples: # out_file was complete
            return
        seconds = time.perf_counter() - self.start_time
        peak = f", peak memory {peak_memory / 2**20:.0f} MB" if peak_memory else ""
        samples = "1 sample" if self.num_samples == 1 else f"{self.num_samples} samples"
        log(f"{samples}, {self.num_tokens} tokens in {seconds:.1f} s: {self.num_tokens / seconds:.0f} tokens/s{peak}")
