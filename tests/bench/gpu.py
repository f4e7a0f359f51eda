"""Measures a GPU for sample.py: the machine, whether its text is nanoGPT's, and the rates.

    python tests/bench/gpu.py [--only=TEXT] > results.jsonl
    python tests/bench/gpu.py --smoke    # small sizes, also without a GPU: shows only that the command works

The models are random, so nothing is downloaded. Each line is the result of one cell, printed at once. A cell that
fails does not stop the others.
"""
import argparse
import json
import platform
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from contenders import SHAPES, TEMPERATURE, TOP_K, nanogpt_loop, random_transformers_gpt2, transformers_generate
from measure import count

# measure.py and contenders.py have added the folders of the tests and of the project to the path.
import sampling
from models import save_checkpoint, save_meta
from oracles import nanogpt_generate
from sampling.model import GPT, GPTConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=272, vocab_size=97, bias=True)
SEED = 1337


class Bench:
    """Models, and what to measure. smoke: a tiny model and few tokens."""

    def __init__(self, folder, smoke):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.shapes = {"tiny": TINY} if smoke else {name: SHAPES[name] for name in ("124M", "XL")}
        self.num_samples, self.new_tokens = ((1, 3), 8) if smoke else ((1, 10, 64), 256)
        self.params = sampling.SamplingParams(self.new_tokens, TEMPERATURE, TOP_K, seed=SEED)
        self.folder, self.models = folder, {}
        for name, shape in self.shapes.items():
            torch.manual_seed(SEED)
            with torch.no_grad():
                self.models[name] = GPT(GPTConfig(**shape)).eval()
                for parameter in self.models[name].parameters():
                    parameter.mul_(5 if parameter.dim() > 1 else 1) # logits about as large as GPT-2's
            save_checkpoint(folder / name, self.models[name], meta=False, optimizer=None)
            save_meta(folder / name / "meta.pkl", "".join(chr(ord("a") + i) for i in range(shape["vocab_size"])))

    def cells(self):
        """Yield (name, function) for each cell."""
        small, *_ = self.shapes
        yield "machine", self.describe
        for dtype in DTYPES:
            for where, length in ("inside", 3), ("past", self.shapes[small]["block_size"] - self.new_tokens // 2):
                yield f"text, {dtype}, {where} the window", partial(self.check_text, small, dtype, length)
        for model in self.shapes:
            for dtype in DTYPES:
                yield f"rate, {model}, {dtype}, 1 sample, nanoGPT's loop", partial(self.time_loop, model, dtype)
                for samples in self.num_samples:
                    name = f"rate, {model}, {dtype}, {count(samples)}"
                    yield f"{name}, ours", partial(self.time_ours, model, dtype, samples)
                    yield f"{name}, transformers", partial(self.time_transformers, model, dtype, samples)
        for options in {"cuda_graphs": False}, {"compile": True}:
            name = f"rate, {small}, bfloat16, 1 sample, {options}"
            yield name, partial(self.time_ours, small, "bfloat16", 1, **options)

    def describe(self):
        gpu = str(torch.cuda.get_device_properties(self.device)) if self.device.type == "cuda" else None
        return {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu}

    def check_text(self, name, dtype, length):
        """Four samples beside nanoGPT's operations. They must be equal in float32."""
        generator = sampling.load(self.folder / name, str(self.device), dtype)
        prompt = ("abcdefghijklmnopqrstuvwxyz" * 40)[:length]
        found = [sample.token_ids for sample in generator.generate(prompt, self.params, num_samples=4)]
        idx = torch.tensor([generator.tokenizer.encode(prompt)], device=self.device)
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(**self.shapes[name])) # nanoGPT initialises a model before it samples
        model.load_state_dict(self.models[name].state_dict())
        with torch.no_grad(), self.autocast(dtype):
            expected = [nanogpt_generate(model.eval().to(self.device), idx, self.new_tokens, TEMPERATURE, TOP_K)
                        for _ in range(4)]
        pairs = [(ids, one[0, length:].tolist()) for ids, one in zip(found, expected, strict=True)]
        return {"equal": f"{sum(a == b for a, b in pairs)} of 4"}

    def autocast(self, dtype):
        return torch.autocast(self.device.type, DTYPES[dtype], enabled=dtype != "float32")

    def time_ours(self, name, dtype, samples, **options):
        """All samples in one batch. The first run captures the graphs."""
        generator = sampling.load(self.folder / name, str(self.device), dtype, **options)
        return self.time(samples, lambda: generator.generate("a", self.params, samples, batch_size=samples))

    def time_loop(self, name, dtype):
        model, idx = self.models[name].to(self.device), torch.tensor([[1]], device=self.device)
        with self.autocast(dtype):
            return self.time(1, lambda: nanogpt_loop(model, idx, self.new_tokens))

    def time_transformers(self, name, dtype, samples):
        """Hugging Face's generate with its KV cache, all samples in one batch."""
        model = random_transformers_gpt2(self.shapes[name]).to(self.device, DTYPES[dtype]).eval()
        idx = torch.tensor([[1]], device=self.device)
        return self.time(samples, lambda: transformers_generate(model, idx, self.new_tokens, samples))

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
        return {"tokens_per_s": round(samples * self.new_tokens / took, 1), "first_run_s": round(first, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cells with this text in their name")
    parser.add_argument("--smoke", action="store_true", help="small sizes; always so without a GPU")
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
