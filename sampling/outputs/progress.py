"""Shows the progress of a run: a bar or some lines while it runs, and one line at its end."""
import sys
import time

from sampling.outputs.console import is_tty, log, plural, set_progress_bar, shows_progress_bar
from sampling.params import Sample

LOG_INTERVAL = 30 # seconds between two lines of progress


class Progress:
    """Counts samples and tokens. Shows a bar, or if standard error is no terminal, as with nohup, a line now and then.

    total_samples: how many samples the run will generate; None if unknown.
    """

    def __init__(self, total_samples: int | None, max_new_tokens: int):
        self.total_samples, self.max_new_tokens = total_samples, max_new_tokens
        self.start_time = self.last_line_time = time.perf_counter()
        self.num_samples = 0 # finished ones
        self.num_tokens = 0 # of all samples
        self.bar = None
        if shows_progress_bar():
            from tqdm import tqdm
            total = total_samples and total_samples * max_new_tokens
            self.bar = tqdm(total=total, unit=" tokens", unit_scale=True, delay=1, postfix="0 samples", leave=False)
            set_progress_bar(self.bar)

    def add_tokens(self, num_tokens: int) -> None:
        """Advance the bar by num_tokens. A negative number takes back the tokens of a batch that ran out of memory."""
        self.num_tokens += num_tokens
        now = time.perf_counter()
        if self.bar is not None:
            self.bar.update(num_tokens)
        elif now - self.last_line_time >= LOG_INTERVAL and not is_tty(sys.stderr):
            self.last_line_time = now
            samples = (f"{self.num_samples} of {plural(self.total_samples, 'sample')}" if self.total_samples
                       else plural(self.num_samples, "sample"))
            log(f"{samples}, {plural(self.num_tokens, 'token')} so far: "
                f"{self.num_tokens / (now - self.start_time):.1f} tokens/s")

    def add_sample(self, sample: Sample) -> None:
        self.num_samples += 1
        if self.bar is not None:
            if self.bar.total:
                self.bar.total -= self.max_new_tokens - sample.num_tokens # it stopped early
            self.bar.set_postfix_str(plural(self.num_samples, "sample"), refresh=False)

    def close(self, peak_memory: int | None) -> None:
        """Remove the bar, and log a summary of the run if it generated samples. peak_memory is in bytes."""
        if self.bar is not None:
            self.bar.close()
            set_progress_bar(None)
        if not self.num_samples: # out_file was already complete
            return
        seconds = time.perf_counter() - self.start_time
        peak = f", peak memory {peak_memory / 2**20:.0f} MB" if peak_memory else ""
        log(f"{plural(self.num_samples, 'sample')}, {plural(self.num_tokens, 'token')} in {seconds:.1f} s: "
            f"{self.num_tokens / seconds:.1f} tokens/s{peak}")
