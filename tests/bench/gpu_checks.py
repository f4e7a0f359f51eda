"""The checks of gpu.py: whether the fast paths give the right text on this GPU, with the values that show it."""
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_setup import (
    DTYPES,
    PROJECT,
    SEED,
    TEMPERATURE,
    TOP_K,
    Scale,
    autocast,
    make_engine,
    make_model,
    run_engine,
    set_nanogpt_flags,
)
from torch import Tensor

from model import linear_dtype
from oracles import nanogpt_generate
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.cuda.decode_state import DecodeState
from sampling.backends.cuda.static_forward import StaticForward
from sampling.backends.prepare import cast_linears
from sampling.sampler.logits import apply_top_k
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_token import Logits


def check_cells(scale: Scale):
    """Yield (name, function, limit in seconds) for each check."""
    shape = next(iter(scale.shapes.values()))
    yield "stream", partial(check_stream, scale, shape), 10
    for name, dtype in DTYPES.items():
        yield f"arithmetic, {name}", partial(check_arithmetic, scale, shape, dtype), 10
        yield f"graphs, {name}", partial(check_graphs, scale, shape, dtype), 15
        for where in "inside", "past":
            yield f"exact {where} the window, {name}", partial(check_exact, scale, shape, dtype, where), 20
        yield f"default path against the loop, {name}", partial(check_default, scale, shape, dtype), 20
    for precision in "high", "highest":
        yield f"float32 batches of 1 and 10, {precision}", partial(check_batches, scale, shape, precision), 20
    yield "out of memory", partial(check_out_of_memory, scale, shape), 20
    yield from script_cells(scale)


# ---- within this process

def check_stream(scale: Scale, shape: dict) -> dict:
    """Whether two calls of torch.multinomial give what PerRowRNG's numbers give, and end where a skip ends."""
    size = shape["vocab_size"]
    probs = torch.randn(1, size, device=scale.device).softmax(-1)
    rng = PerRowRNG(SEED, scale.device, draws_per_sample=1, vocab_size=size)
    states = [rng.state_for_sample(index) for index in range(3)]
    generator = torch.Generator(rng.run_generator.device).manual_seed(SEED)
    expected = [torch.multinomial(probs, 1, generator=generator).item() for _ in range(2)]
    rng.set_rows(states[:2])
    found = (probs / rng((2, size), None, scale.device)).argmax(dim=-1).tolist()
    return {"tokens_equal": found == expected, "skip_equals_draws": torch.equal(generator.get_state(), states[2])}


@torch.no_grad()
def check_arithmetic(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """The first decode step against a forward pass without a cache: their difference in standard deviations."""
    model = cast_linears(make_model(scale, shape), dtype)
    idx = torch.randint(shape["vocab_size"], (1, shape["block_size"] // 2), device=scale.device)
    with autocast(scale.device, dtype):
        cache = model.new_cache(1, idx.size(1))
        assert cache.layers[0].dtype == linear_dtype(model) == dtype
        model(idx[:, :-1], cache=cache)
        position = torch.tensor([idx.size(1) - 1], device=scale.device)
        step = StaticForward(model).decode_step(idx[:, -1:], position, cache.layers, idx.size(1)).float()
        whole = model(idx)[0].float()
    return {"difference": f"{((step - whole).std() / whole.std()).item():.2e}",
            "limit": 0.005 if dtype == torch.float32 else 0.05}


def check_graphs(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """Whether steps that are replayed as CUDA graphs give the tokens of steps that are launched one by one."""
    def sample():
        engine = make_engine(scale, shape, dtype, 4, scale.checked_tokens)
        if not isinstance(engine.backend, CUDAGraphGPT): # without a GPU
            return run_engine(engine, dtype, 8, [1, 2]), 0
        return run_engine(engine, dtype, 8, [1, 2]), sum(map(bool, engine.backend.state.graphs.values()))
    found, num_graphs = sample()
    with patch.object(DecodeState, "uses_graphs", False):
        expected, _ = sample()
    return {"samples_equal": f"{count_equal(found, expected)} of 8", "graphs": num_graphs}


def check_exact(scale: Scale, shape: dict, dtype: torch.dtype, where: str) -> dict:
    """exact=True against nanoGPT's operations: four samples, of which the last two come from graphs."""
    new_tokens = scale.checked_tokens
    prompt = make_prompt(shape, 3 if where == "inside" else shape["block_size"] - new_tokens // 2)
    engine = make_engine(scale, shape, dtype, 1, new_tokens, exact=True)
    found, expected = run_engine(engine, dtype, 4, prompt), loop_samples(scale, shape, dtype, prompt, 4, new_tokens)
    graphs = list(engine.backend.graphs.values())
    return {"samples_equal": f"{count_equal(found, expected)} of 4",
            "first_difference": first_difference(found, expected),
            "graphs_used": sum(map(bool, graphs)), "graphs_refused": graphs.count(None)}


class Divided:
    """A SampleFn that divides by the temperature in a dtype."""
    num_logits_needed = None

    def __init__(self, dtype: torch.dtype, rng: PerRowRNG):
        self.dtype, self.rng, self.prefetch, self.repeat_noise = dtype, rng, rng.prefetch, rng.repeat

    def __call__(self, logits: Logits, ids: Tensor) -> Tensor:
        values = logits.values.to(self.dtype) / TEMPERATURE
        values = apply_top_k(values, min(TOP_K, values.size(-1)))
        probs = values.float().softmax(dim=-1)
        return (probs / self.rng(probs.shape, None, probs.device)).argmax(dim=-1, keepdim=True)


def check_default(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """The first token at which the default path leaves nanoGPT's loop, with each kind of division."""
    new_tokens, found = scale.checked_tokens, {}
    expected = loop_samples(scale, shape, dtype, [1, 2, 3], 4, new_tokens)
    for name in dict.fromkeys(["float32", str(dtype).removeprefix("torch.")]):
        torch.backends.cuda.enable_cudnn_sdp(False) # as prepare_model does
        gpt = CUDAGraphGPT(cast_linears(make_model(scale, shape), dtype))
        rng = PerRowRNG(SEED, scale.device, draws_per_sample=new_tokens, vocab_size=shape["vocab_size"])
        rng.set_rows([rng.state_for_sample(index) for index in range(4)])
        idx = torch.tensor([[1, 2, 3]] * 4, device=scale.device)
        with autocast(scale.device, dtype):
            tokens = torch.cat(list(gpt.generate_stream(idx, new_tokens, Divided(DTYPES[name], rng))), dim=1)
        pairs = zip(tokens.tolist(), expected, strict=True)
        found[f"first_differences_{name}_division"] = [first_difference([a], [b]) for a, b in pairs]
    return found


def check_batches(scale: Scale, shape: dict, precision: str) -> dict:
    """Whether the batch size changes the text in float32, with TF32 ("high") and without it ("highest")."""
    prompt, before = make_prompt(shape, shape["block_size"] // 4), torch.get_float32_matmul_precision()

    def sample(batch_size):
        engine = make_engine(scale, shape, torch.float32, batch_size, scale.checked_tokens)
        torch.set_float32_matmul_precision(precision) # prepare_model sets it too
        return run_engine(engine, torch.float32, 10, prompt)
    try:
        alone, together = sample(1), sample(10)
    finally:
        torch.set_float32_matmul_precision(before)
    return {"samples_equal": f"{count_equal(alone, together)} of 10",
            "first_difference": first_difference(alone, together)}


def check_out_of_memory(scale: Scale, shape: dict) -> dict:
    """Whether a run goes on with smaller batches, and gives the same number of samples, if memory runs out."""
    if scale.device.type != "cuda":
        return {"skipped": "needs a GPU"}
    engine, messages = make_engine(scale, shape, torch.bfloat16, 64, shape["block_size"] - 1), []
    engine = replace(engine, params=replace(engine.params, max_new_tokens=300, stop=None), log=messages.append)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(scale.device).total_memory
    room = torch.cuda.memory_reserved() + 64 * engine.backend.bytes_per_sample(301) // 3
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    try:
        samples = run_engine(engine, torch.bfloat16, 64, [1])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"samples": len(samples), "batch_size_at_the_end": engine.batch_size, "messages": messages}


def loop_samples(scale: Scale, shape: dict, dtype: torch.dtype, prompt: list[int], num_samples: int,
                 new_tokens: int) -> list[list[int]]:
    """The token ids of nanoGPT's loop, from the random stream of the seed."""
    set_nanogpt_flags()
    model, idx = make_model(scale, shape), torch.tensor([prompt], device=scale.device)
    torch.manual_seed(SEED)
    with autocast(scale.device, dtype):
        return [nanogpt_generate(model, idx, new_tokens, TEMPERATURE, TOP_K)[0, len(prompt):].tolist()
                for _ in range(num_samples)]


def make_prompt(shape: dict, length: int) -> list[int]:
    """Token ids."""
    return [7 * i % shape["vocab_size"] for i in range(length)]


def count_equal(found: list, expected: list) -> int:
    """How many samples are equal."""
    return sum(a == b for a, b in zip(found, expected, strict=True))


def first_difference(found: list[list[int]], expected: list[list[int]]) -> int | None:
    """The first token that differs in any sample, counted from 0; None: there is none."""
    return min((i for a, b in zip(found, expected, strict=True)
                for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), default=None)


# ---- the script itself

def script_cells(scale: Scale) -> Iterator:
    """Yield the checks of sample.py, with the demo. Each value is the standard output or a file of a run."""
    prompts = "\n".join(["A", "ROMEO:", "What is it that you say to me, my lord?", "The "])
    ragged = ["--start=LINES:prompts.txt", "--dtype=float32"]
    runs = { # name: the flags of runs that should print the same
        "default, twice": [[], []],
        "exact, twice": [["--exact"], ["--exact"]],
        "stop, twice": [["--stop=e"], ["--stop=e"]],
        "ragged prompts in batches of 8 and 1, float32": [[*ragged, "--batch_size=8"], [*ragged, "--batch_size=1"]],
    }
    for name, flags in runs.items():
        yield f"script: {name}", partial(compare_runs, scale, flags, prompts), 40
    yield "script: out_file and html_file, resumed", partial(check_resumed, scale), 40
    yield "script: two processes on one GPU", partial(check_torchrun, scale), 40
    if scale.compiles:
        yield "script: compile", partial(compare_runs, scale, [["--compile"]], prompts), 100


def run_script(scale: Scale, folder: Path, flags: list[str], launcher: tuple = ()) -> str:
    """Run sample.py with the demo. Returns its standard output. Raises RuntimeError if it fails."""
    command = [sys.executable, *launcher, str(PROJECT / "sample.py"), f"--out_dir={PROJECT / 'out-shakespeare-char'}",
               f"--device={scale.device.type}", "--num_samples=4", f"--max_new_tokens={scale.checked_tokens}", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(flags)}: {done.stderr[-200:]}")
    return done.stdout


def compare_runs(scale: Scale, runs: list[list[str]], prompts: str) -> dict:
    """Whether runs with these flags print the same."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.txt").write_text(prompts)
        printed = [run_script(scale, Path(folder), flags) for flags in runs]
    equal = {"equal": all(a == b for a, b in pairwise(printed))} if len(printed) > 1 else {}
    return {"characters": len(printed[0]), **equal}


def check_resumed(scale: Scale) -> dict:
    """Whether a run that lost its last samples writes the same files again."""
    with tempfile.TemporaryDirectory() as folder:
        jsonl, page = Path(folder) / "a.jsonl", Path(folder) / "a.html"
        flags = [f"--out_file={jsonl}", f"--html_file={page}", "--batch_size=4"]
        run_script(scale, Path(folder), flags)
        whole = jsonl.read_bytes(), page.read_bytes()
        jsonl.write_bytes(b"".join(whole[0].splitlines(keepends=True)[:2]))
        run_script(scale, Path(folder), flags)
        return {"jsonl_equal": jsonl.read_bytes() == whole[0], "html_equal": page.read_bytes() == whole[1]}


def check_torchrun(scale: Scale) -> dict:
    """Whether two processes, which share the device, print what one process prints in batches of the same size."""
    flags = ["--batch_size=2", "--dtype=float32"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    with tempfile.TemporaryDirectory() as folder:
        alone, shared = run_script(scale, Path(folder), flags), run_script(scale, Path(folder), flags, launcher)
    return {"equal": alone == shared, "characters": len(shared)}
