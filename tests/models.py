"""Small random models, and the files that contain them."""
import pickle
from pathlib import Path

import torch

from sampling.checkpoints.build import Checkpoint, build_gpt
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.model import GPT, GPTConfig

CHARS = "\n !',-.:?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHAPE = dict(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=len(CHARS), dropout=0.0, bias=True)


def make_gpt(seed=1, **changes):
    """A small random model in eval mode. Its weights are so large that its samples depend on the prompt."""
    torch.manual_seed(seed)
    model, generator = GPT(GPTConfig(**{**SHAPE, **changes})).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else: # biases and norms, which start at 0 and 1
                parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    return model


def save_repeating(folder, ids, vocab_size):
    """Write the checkpoint of a model that says these tokens again and again. Its head is not tied."""
    model = GPT(GPTConfig(**SHAPE | {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": vocab_size}))
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    weights["transformer.ln_f.weight"] += 1
    for k, (token_id, next_id) in enumerate(zip(ids, ids[1:] + ids[:1], strict=True)):
        weights["transformer.wte.weight"][token_id, k] = 1
        weights["lm_head.weight"][next_id, k] = 6
    return save_checkpoint(folder, model, meta=False, model=weights)


def as_checkpoint(model):
    """The model as a Checkpoint that holds its weights, not copies; a tied head is one tensor under two names."""
    weights, config = dict(model.state_dict()), model.config
    if config.tie_word_embeddings:
        weights["transformer.wte.weight"] = weights["lm_head.weight"]
    return Checkpoint("out/ckpt.pt", config, weights, Path("out"))


def nanogpt_args(config):
    """The model_args that nanoGPT's train.py would save."""
    return {name: getattr(config, name) for name in SHAPE}


def save_checkpoint(folder, model, /, meta=True, config=None, **changes):
    """Write folder/ckpt.pt as train.py does, and meta.pkl beside it. Changes replace entries; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = {name: {"step": torch.tensor(9.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                 for name, p in model.named_parameters()}
    checkpoint = {"model": model.state_dict(), "optimizer": {"state": optimizer},
                  "model_args": nanogpt_args(model.config), "iter_num": 100, "best_val_loss": torch.tensor(1.5),
                  "config": config or {"dataset": "letters"}, **changes}
    torch.save({key: value for key, value in checkpoint.items() if value is not None}, folder / "ckpt.pt")
    if meta:
        save_meta(folder / "meta.pkl")
    return folder / "ckpt.pt"


def same_model(path, model):
    """Whether the checkpoint at path loads in float32, and gives the same logits as the model."""
    loaded, idx = build_gpt(load_nanogpt(path)), torch.arange(16)[None]
    with torch.no_grad():
        return (all(parameter.dtype == torch.float32 for parameter in loaded.parameters())
                and torch.equal(loaded(idx, idx)[0], model(idx, idx)[0]))


def save_meta(path, chars=CHARS):
    """Write a vocabulary as the prepare.py of a character-level data set does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {char: i for i, char in enumerate(chars)}}
    path.write_bytes(pickle.dumps(meta))


def make_transformers_gpt2(**changes):
    """A small random GPT-2 of transformers, with GPT-2's vocabulary size."""
    import transformers
    torch.manual_seed(7)
    shape = dict(n_layer=2, n_head=2, n_embd=32, n_positions=48, vocab_size=50257)
    # The initial weights are large enough for the logits to differ visibly.
    config = transformers.GPT2Config(**{**shape, "initializer_range": 0.2, **changes})
    return transformers.GPT2LMHeadModel(config).eval()


def normal(*shape, seed=0):
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def random_prompt(length, rows=1, seed=0):
    """Token ids (rows, length) of the model that make_gpt makes."""
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
