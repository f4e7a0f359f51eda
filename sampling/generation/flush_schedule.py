"""Decides how often tokens are flushed: copied from a GPU to the host, which synchronises the GPU."""
import time

MAX_FLUSH_INTERVAL = 16 # in steps
MAX_SECONDS = 0.03 # between flushes while streaming: text that comes sooner does not look smoother


class FlushSchedule:
    """How many steps to run before the next flush: at most max_steps.

    While streaming, the first flush comes after one step, and each later one after as many as MAX_SECONDS allow.
    The steps themselves cannot be timed: the host only launches them, and a flush waits for all of them.
    """

    def __init__(self, max_steps: int, stream: bool):
        self.max_steps, self.stream = max_steps, stream
        self.num_steps = 1 if stream else max_steps
        self.last_flush = time.perf_counter()

    def record_flush(self, num_steps: int) -> None:
        """The tokens of num_steps steps have just been flushed: plan the next flush."""
        if self.stream:
            now = time.perf_counter()
            seconds_per_step = max((now - self.last_flush) / num_steps, 1e-9)
            self.num_steps = max(1, min(self.max_steps, int(MAX_SECONDS / seconds_per_step)))
            self.last_flush = now
