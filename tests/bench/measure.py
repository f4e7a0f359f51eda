"""How the benchmarks time things: whole processes, seen from outside."""
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent

# Prompts of the small models: one letter, or as many as fill the window of the 10.6M model.
SHORT, FULL = "a", "a" * 256


class Case:
    """One line of a table: what it generates, and the command of a process that generates so many tokens a sample.

    The process is timed for two lengths. The rate is the difference of the tokens over the difference of the times, so
    start-up and loading cancel.
    """

    def __init__(self, row, name, command, lengths, samples, batch_size=None, prompt=1, busy=0):
        self.row, self.name, self.command, self.lengths, self.samples = row, name, command, lengths, samples
        self.batch_size, self.prompt, self.busy = batch_size or samples, prompt, busy
        self.times = {length: [] for length in lengths}

    def run(self):
        """Time both lengths once."""
        with busy_cores(self.busy):
            for length in self.lengths:
                self.times[length].append(timed(self.command(length))[0])

    def rates(self):
        """Tokens a second, in each round."""
        short, long = self.lengths
        return [self.samples * (long - short) / (slow - quick)
                for quick, slow in zip(self.times[short], self.times[long], strict=True)]

    def rate(self):
        """Tokens a second: the median of the rounds."""
        return statistics.median(self.rates())


def timed(command):
    """Run a process; its seconds and its peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    messages = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command} failed:\n{messages.decode()}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


@contextmanager
def busy_cores(count):
    """Run so many other programs meanwhile, each of which takes a core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def sample_py(source, samples, batch_size=None, dtype="float32", start=SHORT, device="cpu", more=(),
              script=(PROJECT / "sample.py",)):
    """The command of sample.py, as users run it, by number of tokens."""
    def command(length):
        return [sys.executable, *script, source, f"--num_samples={samples}", f"--max_new_tokens={length}",
                f"--batch_size={batch_size or samples}", f"--dtype={dtype}", f"--start={start}", f"--device={device}", *more]
    return command


def contender(name, folder, *arguments):
    """The command of contenders.py. A process of its own, because a fork starts with its parent's peak memory."""
    return [sys.executable, HERE / "contenders.py", name, folder, *arguments]


def other(name, folder, samples, start=SHORT, device="cpu"):
    """The command of another program, by number of tokens."""
    return lambda length: contender(name, folder, samples, length, len(start), device)


def make_models(folder, names):
    """Make random models of the named shapes."""
    subprocess.run(contender("models", folder, *names), check=True, stderr=subprocess.DEVNULL)


def machine(device):
    """The name of the GPU, or of the processor as the system gives it."""
    if device == "cuda":
        import torch
        return torch.cuda.get_device_name()
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores"
