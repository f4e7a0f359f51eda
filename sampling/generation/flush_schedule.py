"""Decides how often tokens are copied from a GPU to the host. Each copy synchronises the GPU, which then runs idle."""
import time

MAX_STEPS_BETWEEN_COPIES = 16
MAX_SECONDS = 0.03 # between copies while streaming: text that comes sooner does not look smoother


class FlushSchedule:
    """How many steps to run before the next copy: at most max_steps.

    While streaming, the first copy comes after one step, and each later one after as many as MAX_SECONDS allow.
    The steps themselves cannot be timed: the host only launches them, and a copy waits for all of them.
    """

    def __init__(self, max_steps: int, stream: bool):
        self.max_steps, self.stream = max_steps, stream
        self.num_steps = 1 if stream else max_steps
        self.last_copy = time.perf_counter()

    def record_copy(self, num_steps: int) -> None:
        """Plan the next copy, after one that brought the tokens of this many steps."""
        if self.stream:
            now = time.perf_counter()
            seconds_per_step = max((now - self.last_copy) / num_steps, 1e-9)
            self.num_steps = max(1, min(self.max_steps, int(MAX_SECONDS / seconds_per_step)))
            self.last_copy = now
