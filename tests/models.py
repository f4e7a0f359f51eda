"""Small random models, and the files that contain them."""
import pickle
from pathlib import Path

import torch

from sampling.checkpoints.checkpoint import Checkpoint, build_gpt
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.model import GPT, GPTConfig

CHARS = "\n !',-.:?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHAPE = dict(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=len(CHARS), dropout=0.0,
             bias=True)


def make_gpt(seed=1, **changes):
    """A small random model in eval mode.

    Its weights are so large that its samples depend on the prompt.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SHAPE | changes)).eval()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
        else: # biases and norms, which start at 0 and 1
            parameter.data.add_(torch.empty_like(parameter).normal_(std=0.1))
    return model


def save_repeating(folder, ids, vocab_size):
    """Write the checkpoint of a model that says these tokens again and again."""
    model = make_gpt(n_layer=1, n_head=1, n_embd=8, vocab_size=vocab_size,
                     tie_word_embeddings=False)
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    weights["transformer.ln_f.weight"] += 1
    for k, token_id in enumerate(ids):
        weights["transformer.wte.weight"][token_id, k] = 1
        weights["lm_head.weight"][ids[(k + 1) % len(ids)], k] = 6
    save_checkpoint(folder, model, meta=False, model=weights)


def as_checkpoint(model):
    """The model as a Checkpoint that holds its weights, not copies.

    A tied head is one tensor under two names.
    """
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        weights["transformer.wte.weight"] = weights["lm_head.weight"]
    return Checkpoint("out/ckpt.pt", model.config, weights, Path("out"))


def nanogpt_args(config):
    """The model_args that nanoGPT's train.py would save; in nanoGPT, each head is tied."""
    is_tied = getattr(config, "tie_word_embeddings", True)
    names = [*SHAPE] if is_tied else [*SHAPE, "tie_word_embeddings"]
    return {name: getattr(config, name) for name in names}


def save_checkpoint(folder, model, /, meta=True, config=None, **changes):
    """Write folder/ckpt.pt as train.py does, and meta.pkl beside it. Returns the path of ckpt.pt.

    Changes replace entries; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {}
    for name, parameter in model.named_parameters():
        zeros = torch.zeros_like(parameter)
        state[name] = {"step": torch.tensor(9.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": {"state": state},
        "model_args": nanogpt_args(model.config),
        "iter_num": 100,
        "best_val_loss": torch.tensor(1.5),
        "config": config or {"dataset": "letters"},
        **changes,
    }
    for key in [key for key in checkpoint if checkpoint[key] is None]:
        del checkpoint[key]
    torch.save(checkpoint, folder / "ckpt.pt")
    if meta:
        save_meta(folder / "meta.pkl")
    return folder / "ckpt.pt"


def same_model(path, model):
    """Whether the checkpoint at path loads in float32, and gives the same logits as the model."""
    loaded = build_gpt(load_nanogpt(path))
    idx = torch.arange(16)[None]
    is_float32 = {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    return is_float32 and torch.equal(loaded(idx, idx)[0], model(idx, idx)[0])


def save_meta(path, chars=CHARS):
    """Write a vocabulary as the prepare.py of a character-level data set does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    itos = dict(enumerate(chars))
    stoi = {char: i for i, char in itos.items()}
    path.write_bytes(pickle.dumps({"vocab_size": len(chars), "itos": itos, "stoi": stoi}))


def cached_snapshot(hub, name):
    """A new folder for the files of this model in a cache of Hugging Face's hub."""
    folder = hub / f"models--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1234")
    snapshot = folder / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    return snapshot


def make_transformers_gpt2(**changes):
    """A small random GPT-2 of transformers, with GPT-2's vocabulary size."""
    import transformers
    torch.manual_seed(7)
    # The initial weights are large enough for the logits to differ visibly.
    shape = dict(n_layer=2, n_head=2, n_embd=32, n_positions=48, initializer_range=0.2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | changes)).eval()


def normal(*shape, seed=0):
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def random_prompt(length, rows=1, seed=0):
    """Token ids (rows, length) of the model that make_gpt makes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=generator)
