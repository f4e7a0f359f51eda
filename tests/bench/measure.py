"""Times whole processes for the benchmarks."""
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from project import SCRIPT, save_gpt2_encoding

HERE = Path(__file__).resolve().parent
# Prompts: one letter; a quarter of the 10.6M model's window, which its tokens then fill; or enough
# to fill it at once.
SHORT = "a"
QUARTER = "a" * 64
FULL = "a" * 256


class Case:
    """One line of a table. command(length) starts a process that generates length tokens per
    sample.

    The process is timed for two lengths. The rate is the difference in tokens divided by the
    difference in time, so start-up and loading cancel out. Both runs of sample.py must be long
    enough for its kernels (MIN_KERNEL_STEPS in backends/backend_choice.py) and, with one sample of
    a large model, for the draft (MIN_DRAFT_TOKENS in backends/cpu.py).
    """

    def __init__(self, row, name, command, lengths, samples, busy=0, threads=None,
                 batch_size=None):
        self.row = row
        self.name = name
        self.command = command
        self.lengths = lengths
        self.samples = samples
        self.busy = busy # the number of other programs, each of which uses one core
        self.threads = threads # None: one for each core
        self.batch_size = batch_size # of cases with threads
        self.times = {length: [] for length in lengths}
        self.memory = []

    def of(self, script):
        def command(length):
            return [script if part == SCRIPT else part for part in self.command(length)]
        name = f"{self.name}, other"
        return Case(self.row, name, command, self.lengths, self.samples, self.busy, self.threads,
                    self.batch_size)

    def run(self):
        """Time both lengths once, after a run that reads the files into memory: the system may have
        dropped them.
        """
        timed(self.command(self.lengths[0]), self.threads)
        busy = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(busy) for _ in range(self.busy)]
        try:
            for length in self.lengths:
                seconds, memory = timed(self.command(length), self.threads)
                self.times[length].append(seconds)
            self.memory.append(memory)
        finally:
            for other in others:
                other.kill()
                other.wait()

    def rates(self):
        """Tokens per second in each round."""
        short, long = self.lengths
        rounds = zip(self.times[short], self.times[long], strict=True)
        return [self.samples * (long - short) / (slow - quick) for quick, slow in rounds]

    def rate(self):
        return statistics.median(self.rates())

    def step(self):
        """The time of a decode step of a batch, in milliseconds."""
        return 1000 * self.batch_size / self.rate()

    def over(self, other):
        """How many times as fast as another case: the median of the rounds."""
        rounds = zip(self.rates(), other.rates(), strict=True)
        return statistics.median(ours / theirs for ours, theirs in rounds)


def timed(command, threads=None):
    """Run a process. Returns its time in seconds and its peak memory in MB."""
    env = dict(os.environ)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    start = time.perf_counter()
    process = subprocess.Popen([*map(str, command)], env=env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    messages = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command} failed:\n{messages.decode()}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def sample_py(source, samples, batch_size=None, dtype="float32", start=SHORT, more=()):
    """A function length -> command, which runs sample.py."""
    def command(length):
        return [sys.executable, SCRIPT, source, f"--num_samples={samples}",
                f"--max_new_tokens={length}", f"--batch_size={batch_size or samples}",
                f"--dtype={dtype}", f"--start={start}", "--device=cpu", *more]
    return command


def score_py(source, folder):
    """A function length -> command, which runs sample.py to score a text of length + 1 tokens."""
    def command(length):
        text = folder / f"text of {length}"
        token = " a" if "init_from" in source else "a" # GPT-2 has tokens such as aaaa
        text.write_text(token * (length + 1))
        return [sys.executable, SCRIPT, source, f"--start=FILE:{text}", "--score", "--device=cpu"]
    return command


def contender(name, folder, *arguments):
    """The command that runs contenders.py. It is a new process, because a fork starts with its
    parent's peak memory.
    """
    return [sys.executable, HERE / "contenders.py", name, folder, *arguments]


def other(name, folder, samples, start=SHORT):
    """A function length -> command, which runs another program."""
    return lambda length: contender(name, folder, samples, length, len(start))


def make_models(folder, names):
    """Make random models of the named shapes, and GPT-2's encoding where tiktoken looks for it."""
    subprocess.run(contender("models", folder, *names), check=True, stderr=subprocess.DEVNULL)
    (folder / "vocabulary").mkdir()
    vocabulary = save_gpt2_encoding(folder / "vocabulary")
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(vocabulary))


def count(samples):
    """Such as "1 sample" or "10 samples"."""
    return f"{samples} sample{'s' * (samples > 1)}"
