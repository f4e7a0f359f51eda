"""Measures a GPU for sample.py: the machine, whether its text is nanoGPT's, and the rates.

    python tests/bench/gpu.py [--only=TEXT] > results.jsonl
    python tests/bench/gpu.py --smoke    # small sizes, also without a GPU, to see that it works

The models are random, so nothing is downloaded. Each line is the result of one cell, printed at
once. A cell that fails does not stop the others.
"""
import argparse
import json
import platform
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from contenders import (
    SHAPES,
    TEMPERATURE,
    TOP_K,
    nanogpt_loop,
    random_transformers_gpt2,
    transformers_generate,
)
from measure import count

# measure.py and contenders.py have added the folders of the tests and of the project to the path.
import sampling
from models import save_checkpoint, save_meta
from oracles import nanogpt_generate
from sampling.model import GPT, GPTConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY = dict(n_layer=1, n_head=2, n_embd=32, block_size=272, vocab_size=97, bias=True)
SEED = 1337


class Bench:
    """Models, and what to measure. smoke: a tiny model and few tokens."""

    def __init__(self, folder, smoke):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.shapes = {"124M": SHAPES["124M"], "XL": SHAPES["XL"]}
        self.num_samples = 1, 10, 64
        self.new_tokens = 256
        if smoke:
            self.shapes = {"tiny": TINY}
            self.num_samples = 1, 3
            self.new_tokens = 8
        self.params = sampling.SamplingParams(self.new_tokens, TEMPERATURE, TOP_K, seed=SEED)
        self.folder = folder
        self.models = {}
        for name, shape in self.shapes.items():
            torch.manual_seed(SEED)
            with torch.no_grad():
                model = GPT(GPTConfig(**shape)).eval()
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(5) # logits about as large as GPT-2's
            self.models[name] = model
            save_checkpoint(folder / name, model, meta=False, optimizer=None)
            chars = "".join(chr(ord("a") + i) for i in range(shape["vocab_size"]))
            save_meta(folder / name / "meta.pkl", chars)

    def cells(self):
        """Yield (name, function) for each cell."""
        small, *_ = self.shapes
        past = self.shapes[small]["block_size"] - self.new_tokens // 2
        yield "machine", self.describe
        for dtype in DTYPES:
            for where, length in ("inside", 3), ("past", past):
                check = partial(self.check_text, small, dtype, length)
                yield f"text, {dtype}, {where} the window", check
        for model in self.shapes:
            for dtype in DTYPES:
                name = f"rate, {model}, {dtype}, 1 sample, nanoGPT's loop"
                yield name, partial(self.time_loop, model, dtype)
                for samples in self.num_samples:
                    name = f"rate, {model}, {dtype}, {count(samples)}"
                    yield f"{name}, ours", partial(self.time_ours, model, dtype, samples)
                    theirs = partial(self.time_transformers, model, dtype, samples)
                    yield f"{name}, transformers", theirs
        for options in {"cuda_graphs": False}, {"compile": True}:
            name = f"rate, {small}, bfloat16, 1 sample, {options}"
            yield name, partial(self.time_ours, small, "bfloat16", 1, **options)

    def describe(self):
        gpu = None
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device))
        return {"python": platform.python_version(), "torch": torch.__version__,
                "cuda": torch.version.cuda, "gpu": gpu}

    def check_text(self, name, dtype, length):
        """Four samples beside nanoGPT's operations. They must be equal in float32."""
        generator = sampling.load(self.folder / name, str(self.device), dtype)
        prompt = ("abcdefghijklmnopqrstuvwxyz" * 40)[:length]
        samples = generator.generate(prompt, self.params, num_samples=4)
        idx = torch.tensor([generator.tokenizer.encode(prompt)], device=self.device)
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(**self.shapes[name])) # nanoGPT initialises a model before it samples
        model.load_state_dict(self.models[name].state_dict())
        with torch.no_grad(), self.autocast(dtype):
            model.eval().to(self.device)
            num_equal = 0
            for sample in samples:
                ids = nanogpt_generate(model, idx, self.new_tokens, TEMPERATURE, TOP_K)
                num_equal += sample.token_ids == ids[0, length:].tolist()
        return {"equal": f"{num_equal} of 4"}

    def autocast(self, dtype):
        return torch.autocast(self.device.type, DTYPES[dtype], enabled=dtype != "float32")

    def time_ours(self, name, dtype, samples, **options):
        """All samples in one batch. The first run captures the graphs."""
        generator = sampling.load(self.folder / name, str(self.device), dtype, **options)
        run = partial(generator.generate, "a", self.params, samples, batch_size=samples)
        return self.time(samples, run)

    def time_loop(self, name, dtype):
        model = self.models[name].to(self.device)
        idx = torch.tensor([[1]], device=self.device)
        with self.autocast(dtype):
            return self.time(1, lambda: nanogpt_loop(model, idx, self.new_tokens))

    def time_transformers(self, name, dtype, samples):
        """Hugging Face's generate with its KV cache, all samples in one batch."""
        model = random_transformers_gpt2(self.shapes[name]).to(self.device, DTYPES[dtype]).eval()
        idx = torch.tensor([[1]], device=self.device)
        run = partial(transformers_generate, model, idx, self.new_tokens, samples)
        return self.time(samples, run)

    def time(self, samples, run):
        """The rate at which run generates these samples, after a run that warms up."""
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        first, took = seconds
        rate = samples * self.new_tokens / took
        return {"tokens_per_s": round(rate, 1), "first_run_s": round(first, 2)}


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--only", default="", help="only cells with this text in their name")
    parser.add_argument("--smoke", action="store_true",
                        help="small sizes; always so without a GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.smoke or not torch.cuda.is_available())
        for name, function in bench.cells():
            if options.only in name:
                try:
                    result = function()
                except Exception as error: # of any kind: later cells must run
                    result = {"error": f"{type(error).__name__}: {error!s:.300}"}
                print(json.dumps({"cell": name, **result}), flush=True)


if __name__ == "__main__":
    main()
