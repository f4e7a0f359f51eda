"""The sizes, models and engines of gpu.py."""
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from contenders import SHAPES, TEMPERATURE, TOP_K

# contenders.py has added the project's folder to the path.
from model import GPT, GPTConfig
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import cast_linears, choose_backend
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.generation.assembly import LoadedModel
from sampling.generation.engine import Engine
from sampling.messages import Log
from sampling.params import ModelOptions, Prompt, SampleRequest, SamplingParams

SEED = 1337


@dataclass(frozen=True)
class Scale:
    """What to measure, and how much of it."""
    device: torch.device
    shapes: dict[str, dict]
    samples: tuple[int, ...] = (1, 10, 64) # of the rates
    rows: tuple[int, ...] = (1, 3, 10) # of the steps that are compared with the plain model
    new_tokens: int = 256 # of each sample of the rates
    checked_tokens: int = 60 # of each sample that is compared with nanoGPT's
    matrix: int = 8192 # rows of the matrices of the machine's rates
    read: int = 2**32 # bytes, to measure how fast memory is read


def make_scale(smoke: bool) -> Scale:
    """The full size, or a small one that a CPU finishes within a minute."""
    if not smoke:
        return Scale(torch.device("cuda"), {name: SHAPES[name] for name in ("124M", "XL")})
    tiny = dict(n_layer=2, n_head=2, n_embd=32, block_size=272, vocab_size=97, bias=True) # three buckets of positions
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Scale(device, {"tiny": tiny}, (1, 3), (1, 3), new_tokens=8, checked_tokens=8, matrix=64, read=2**20)


def make_model(scale: Scale, shape: dict, logits_around: float = 0.0) -> GPT:
    """A random model on the device, always the same one. Its weights and logits are about as large as GPT-2's.

    logits_around: the number that they lie around. In GPT-2 it is about -100, because all rows of the head share a
    component, along which the bias of the last LayerNorm lies.
    """
    torch.manual_seed(SEED)
    with scale.device, torch.no_grad():
        model = GPT(GPTConfig(**shape)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
        if logits_around:
            shared = torch.randn(shape["n_embd"]) / shape["n_embd"]**0.5
            model.lm_head.weight.add_(shared)
            model.transformer.ln_f.bias.add_(logits_around * shared)
    return model


def make_engine(scale: Scale, shape: dict, dtype: torch.dtype, log: Log, batch_size: int = 1,
                logits_around: float = 0.0, **options) -> Engine:
    """The engine that sample.py would use on a GPU, also without one. options: see ModelOptions."""
    gpt, is_exact = cast_linears(make_model(scale, shape, logits_around), dtype), options.get("exact", False)
    if scale.device.type == "cuda" or is_exact:
        backend = choose_backend(scale.device, ModelOptions(**options), log)(gpt)
    else:
        backend = CUDABackend(gpt, log=log)
    no_texts = SimpleNamespace(incremental_decoder=lambda prompt_ids=(): lambda token, last=False: "") # a Tokenizer
    model = LoadedModel(backend, no_texts, Checkpoint("", {}, {}, 0, Path()), dtype, 0, is_exact)
    return Engine(model, SamplingParams(scale.new_tokens, TEMPERATURE, TOP_K, seed=SEED), batch_size, log=log)


@torch.no_grad()
def run_engine(engine: Engine, num_samples: int, prompt: list[int]) -> list[list[int]]:
    """The token ids of samples that continue the prompt."""
    requests = [SampleRequest(i, Prompt(""), prompt) for i in range(num_samples)]
    with engine.model.autocast():
        return [sample.token_ids for sample in engine.generate(requests) if sample.finish_reason]
