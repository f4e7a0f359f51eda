"""What the parts of gpu.py share: the size of the measurements, models, engines, and time limits."""
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from contenders import SHAPES, TEMPERATURE, TOP_K
from measure import PROJECT

sys.path.insert(0, str(PROJECT / "tests")) # contenders has added PROJECT

from model import GPT, GPTConfig
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.devices import autocast
from sampling.backends.prepare import cast_linears, prepare_model
from sampling.generation.engine import Engine
from sampling.params import ModelOptions, Prompt, SampleRequest, SamplingParams

SEED = 1337
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# ---- the size of the measurements

@dataclass(frozen=True)
class Scale:
    """What to measure, and how much of it."""
    device: torch.device
    shapes: dict[str, dict]
    samples: tuple[int, ...] = (1, 10, 100)
    new_tokens: int = 256
    checked_tokens: int = 60 # of the samples that are compared
    matrix: int = 8192 # rows of the matrices of the machine's rates
    read: int = 2**32 # bytes, to measure how fast memory is read
    compiles: bool = True


def make_scale(smoke: bool) -> Scale:
    """The full size, or a small one that a CPU finishes within a minute."""
    if not smoke:
        return Scale(torch.device("cuda"), {name: SHAPES[name] for name in ("124M", "XL")})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=97, bias=True)
    return Scale(device, {"tiny": tiny}, (1, 3), new_tokens=8, checked_tokens=8, matrix=64, read=2**20, compiles=False)


# ---- models and engines

def make_model(scale: Scale, shape: dict) -> GPT:
    """A random model, made on the device. Its weights are always the same, and its logits vary as much as GPT-2's."""
    torch.manual_seed(SEED)
    with scale.device:
        model = GPT(GPTConfig(**shape)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    return model


class IdTokenizer:
    """A Tokenizer that writes each id as a number."""
    size, source = 2**31, "the benchmark"

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return "".join(f"{int(token)} " for token in ids)

    def incremental_decoder(self, prompt_ids=()):
        return lambda token, last=False: f"{token} "


def make_engine(scale: Scale, shape: dict, dtype: torch.dtype, batch_size: int, new_tokens: int, stream: bool = False,
                **how) -> Engine:
    """An engine with the backend that sample.py would choose. how: exact, compile."""
    backend = prepare_model(make_model(scale, shape), scale.device, dtype, ModelOptions(**how))
    params = SamplingParams(new_tokens, TEMPERATURE, min(TOP_K, shape["vocab_size"]), seed=SEED)
    return Engine(backend, IdTokenizer(), params, batch_size=batch_size, stream=stream)


def make_gpu_backend(scale: Scale, shape: dict, dtype: torch.dtype, log: Callable[[str], None]) -> CUDAGraphGPT:
    """The backend that sample.py would choose on a GPU, also without one."""
    backend = prepare_model(make_model(scale, shape), scale.device, dtype, log=log)
    if isinstance(backend, CUDAGraphGPT):
        return backend
    return CUDAGraphGPT(cast_linears(make_model(scale, shape), dtype), log=log)


def run_engine(engine: Engine, dtype: torch.dtype, num_samples: int, prompt: list[int],
               first: int = 0) -> list[list[int]]:
    """The token ids of samples that continue the same prompt.

    first: the index of the first one. A later run of the same engine needs higher indices.
    """
    requests = [SampleRequest(first + i, Prompt(""), prompt) for i in range(num_samples)]
    with autocast(engine.backend.device, dtype):
        return [sample.token_ids for sample in engine.generate(requests) if sample.finish_reason]


def set_nanogpt_flags() -> None:
    """Use TF32 as nanoGPT does, and cuDNN's attention, which prepare_model switches off."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(True)


# ---- time

def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """How long one call takes."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


class TimeIsUp(BaseException):
    """A cell has used its time. torch.compile catches every Exception, so this is none."""


@contextmanager
def time_limit(limit: float):
    """Raise TimeIsUp if the block takes longer, and again every 5 seconds: Python ignores errors in some callbacks."""
    def stop(*_):
        raise TimeIsUp
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass
class Report:
    """Runs cells, and prints each result at once as a line of JSON. No cell stops the others."""
    total: float # seconds
    start: float = field(default_factory=time.perf_counter)
    section: str = ""
    section_end: float = 0.0

    def begin(self, section: str, end: float) -> None:
        """Begin a section, which ends at this share of the total time."""
        self.section, self.section_end = section, end * self.total

    def cell(self, name: str, function: Callable[[], dict], limit: float = 60) -> None:
        """Print what the function returns, or why there is no result."""
        begin = time.perf_counter()
        left = self.section_end - (begin - self.start)
        if left < 1:
            self.write(name, skipped="no time is left", took=0.0)
            return
        try:
            with time_limit(min(left, limit)):
                result = function()
        except TimeIsUp:
            result = {"skipped": f"stopped after {min(left, limit):.0f} s"}
        except Exception as error: # of any kind: later cells must run
            result = {"error": f"{type(error).__name__}: {error!s:.300}"}
        self.write(name, **result, took=round(time.perf_counter() - begin, 2))
        if torch.cuda.is_available():
            with suppress(RuntimeError): # if the GPU is lost for this process, the runs of the script can still work
                torch.cuda.empty_cache()

    def write(self, name: str, **result) -> None:
        """Print one line."""
        print(json.dumps({"section": self.section, "cell": name, **result}), flush=True)
