"""The checks of gpu.py: whether the fast paths give the right text on this GPU, with the values that show it."""
import os
import signal
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
    make_engine,
    make_gpu_backend,
    make_model,
    run_engine,
    set_nanogpt_flags,
)

from oracles import nanogpt_generate
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.backends.cuda.graphed_steps import GraphedSteps
from sampling.backends.cuda.self_check import (
    TOLERANCE_FLOAT32,
    TOLERANCE_HALF,
    draws_like_multinomial,
    logits_error,
)
from sampling.backends.devices import autocast
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_token import TokenSampler


def check_cells(scale: Scale):
    """Yield (name, function, limit in seconds) for each check."""
    shape = next(iter(scale.shapes.values()))
    yield "stream", partial(check_random_numbers, scale, shape), 10
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

def check_random_numbers(scale: Scale, shape: dict) -> dict:
    """Whether PerRowRNG draws the numbers of torch.multinomial, and skips as many as it draws."""
    sizes = 65, 50304, shape["vocab_size"]
    return {"vocab_sizes": sizes, "equal": all(draws_like_multinomial(scale.device, size) for size in sizes)}


def check_arithmetic(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """SelfCheck's errors: the logits of a step against a forward pass without a cache, for each number of keys."""
    errors, messages = {}, []
    gpt = make_gpu_backend(scale, shape, dtype, messages.append)
    check_logits = gpt.checks.check_logits

    def record(step, found, expected, dtype):
        errors[f"{step[1]}"] = f"{logits_error(found, expected):.2e}"
        return check_logits(step, found, expected, dtype)
    sampler = TokenSampler(temperature=0, allow_sync=False)
    with patch.object(gpt.checks, "check_logits", record), autocast(scale.device, dtype):
        for length in 3, shape["block_size"] - scale.checked_tokens // 2: # inside the window, and past it
            idx = torch.tensor([make_prompt(shape, length)] * 4, device=scale.device)
            list(gpt.generate_stream(idx, scale.checked_tokens, sampler))
    return {"errors": errors, "limit": TOLERANCE_FLOAT32 if dtype == torch.float32 else TOLERANCE_HALF,
            "messages": messages}


def check_graphs(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """Whether steps that are replayed as CUDA graphs give the tokens of steps that are launched one by one."""
    def sample():
        engine = make_engine(scale, shape, dtype, 4, scale.checked_tokens)
        if not isinstance(engine.backend, CUDAGraphGPT): # without a GPU
            return run_engine(engine, dtype, 8, [1, 2]), 0
        return run_engine(engine, dtype, 8, [1, 2]), sum(map(bool, engine.backend.state.graphs.values()))
    found, num_graphs = sample()
    with patch.object(GraphedSteps, "can_capture", False):
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


def check_default(scale: Scale, shape: dict, dtype: torch.dtype) -> dict:
    """The first token at which the default path leaves nanoGPT's loop, with each kind of division."""
    new_tokens, messages, found = scale.checked_tokens, [], {}
    expected = loop_samples(scale, shape, dtype, [1, 2, 3], 4, new_tokens)
    for name in dict.fromkeys(["float32", str(dtype).removeprefix("torch.")]):
        gpt = make_gpu_backend(scale, shape, dtype, messages.append)
        rng = PerRowRNG(SEED, scale.device, draws_per_sample=new_tokens, vocab_size=shape["vocab_size"])
        rng.set_rows([rng.state_for_sample(index) for index in range(4)])
        idx = torch.tensor([[1, 2, 3]] * 4, device=scale.device)
        sampler = TokenSampler(TEMPERATURE, TOP_K, noise=rng, allow_sync=False, in_logits_dtype=name != "float32")
        with autocast(scale.device, dtype):
            tokens = torch.cat(list(gpt.generate_stream(idx, new_tokens, sampler)), dim=1)
        pairs = zip(tokens.tolist(), expected, strict=True)
        found[f"first_differences_{name}_division"] = [first_difference([a], [b]) for a, b in pairs]
    return {**found, "messages": messages}


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
    ragged = ["--start=LINES:prompts.txt", "--dtype=float32"]
    runs = { # name: the flags of runs that should print the same
        "default, twice": [[], []],
        "ragged prompts in batches of 8 and 1, float32": [[*ragged, "--batch_size=8"], [*ragged, "--batch_size=1"]],
        "stop, twice": [["--stop=e"], ["--stop=e"]],
        "exact, with CUDA graphs and without": [["--exact"], ["--exact", "--cuda_graphs=False"]],
    }
    for name, flags in runs.items():
        yield f"script: {name}", partial(compare_runs, scale, flags), 30
    yield "script: two processes on one GPU", partial(check_torchrun, scale), 40
    yield "script: out_file and html_file, resumed", partial(check_resumed, scale), 40
    if scale.compiles:
        yield "script: compile", partial(compare_runs, scale, [["--compile"]]), 100


def script(scale: Scale, *flags: str, launcher: tuple = ()) -> list[str]:
    """The command that runs sample.py with the demo."""
    return [sys.executable, *launcher, str(PROJECT / "sample.py"), f"--out_dir={PROJECT / 'out-shakespeare-char'}",
            f"--device={scale.device.type}", "--num_samples=4", f"--max_new_tokens={scale.checked_tokens}", *flags]


def run_together(folder: Path, *commands: list[str]) -> list[tuple[str, str]]:
    """Run commands at the same time. Returns the standard output and error of each. Raises RuntimeError if one fails.

    At the end none of their processes is left, also if the time is up.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo"}
    processes, printed = [], []
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                              text=True, env=env, start_new_session=True))
        for process in processes:
            printed.append(process.communicate())
            if process.returncode:
                raise RuntimeError(f"{' '.join(process.args[-3:])}: {printed[-1][1][-200:]}")
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            with process: # closes its pipes
                pass
    return printed


def compare_runs(scale: Scale, runs: list[list[str]]) -> dict:
    """Whether runs with these flags print the same, and what they say about the fast path."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.txt").write_text("A\nROMEO:\nWhat is it that you say to me, my lord?\nThe ")
        printed = run_together(Path(folder), *(script(scale, *flags) for flags in runs))
    equal = {"equal": all(a[0] == b[0] for a, b in pairwise(printed))} if len(printed) > 1 else {}
    return {"characters": len(printed[0][0]), **equal, "messages": notices(printed)}


def notices(printed: list[tuple[str, str]]) -> list[str]:
    """The lines on standard error that say that something does not work here."""
    return [line[:200] for _, messages in printed for line in messages.splitlines() if "continuing" in line or "not those of" in line]


def check_resumed(scale: Scale) -> dict:
    """Whether a run that lost its last samples writes the same files again."""
    with tempfile.TemporaryDirectory() as folder:
        jsonl, page = Path(folder) / "a.jsonl", Path(folder) / "a.html"
        command = script(scale, f"--out_file={jsonl}", f"--html_file={page}", "--batch_size=4")
        run_together(Path(folder), command)
        whole = jsonl.read_bytes(), page.read_bytes()
        jsonl.write_bytes(b"".join(whole[0].splitlines(keepends=True)[:2]))
        run_together(Path(folder), command)
        return {"jsonl_equal": jsonl.read_bytes() == whole[0], "html_equal": page.read_bytes() == whole[1]}


def check_torchrun(scale: Scale) -> dict:
    """Whether two processes, which share the device, print what one process prints in batches of the same size."""
    flags = ["--batch_size=2", "--dtype=float32"]
    # The address: a machine without a network may not know its own name.
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2")
    with tempfile.TemporaryDirectory() as folder:
        alone, shared = run_together(Path(folder), script(scale, *flags), script(scale, *flags, launcher=launcher))
    return {"equal": alone[0] == shared[0], "characters": len(shared[0]), "messages": notices([alone, shared])}
