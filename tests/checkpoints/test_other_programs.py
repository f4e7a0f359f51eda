"""Checkpoints that are not of nanoGPT or build-nanogpt: the error says what each is, and what to do with it."""
import json
import pickle
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from attacks import write_settled
from models import SHAPE, make_gpt, make_transformers_gpt2, nanogpt_args, same_model
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt


def error_of(path, load=load_nanogpt):
    """The one line that loading ends in; it names the path."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(str(path))
    message = str(error.value)
    assert str(path) in message and "\n" not in message and len(message) < 700
    assert "damaged" not in message
    return message


def save(folder, content, name="weights.pt"):
    torch.save(content, folder / name)
    return folder / name


def run_advice(message, tmp_path, state_dict, entry="model_args"):
    """Run the command that the message gives for tensors without sizes. It writes tmp_path/ckpt.pt."""
    command = message.split("sizes: ")[1].split(', with "config"')[0]
    for name in "block_size", "vocab_size", "n_layer", "n_head", "n_embd":
        command = command.replace(f"{name}=?", f"{name}={SHAPE[name]}")
    exec(command.replace("model_args", entry).replace("ckpt.pt", str(tmp_path / "ckpt.pt")),
         {"torch": torch, "state_dict": state_dict})


# ---- tensors without sizes

MINGPT = {"gelu": "tanh", "tie_word_embeddings": False}


@pytest.mark.parametrize("entry, changes, prefix", [
    ("model_args", {"bias": False}, "transformer."), ("config", MINGPT, "_orig_mod.transformer."),
    ("config", MINGPT, ""),
    ("config", MINGPT, "module._orig_mod."),
], ids=["nanoGPT", "compiled", "short", "short-compiled-DDP"])
def test_the_advice_for_a_bare_state_dict_works(entry, changes, prefix, tmp_path):
    model, wrapper = make_gpt(**changes), prefix.removesuffix("transformer.")
    tensors = model.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    path = save(tmp_path, {(wrapper if name == "lm_head.weight" else prefix) + name.removeprefix("transformer."): tensor
                           for name, tensor in tensors.items()})
    message = error_of(path)
    assert "n_head cannot be inferred from its tensors" in message
    run_advice(message, tmp_path, torch.load(path, weights_only=True), entry)
    assert same_model(tmp_path, model)


def test_safetensors_of_a_nanogpt_model(tmp_path):
    """The advice is the same for the file and its folder, as out_dir and as init_from, and it works."""
    path, model = tmp_path / "model.safetensors", make_gpt()
    save_model(model, path)
    for config in None, nanogpt_args(model.config): # mixins for Hugging Face's hub write such a config.json
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config))
        for given in path, tmp_path:
            for load in load_nanogpt, load_huggingface:
                message = error_of(given, load)
                assert "n_head cannot be inferred" in message and "pass --out_dir=ckpt.pt" in message
    run_advice(message, tmp_path, load_file(path))
    assert same_model(tmp_path, model)


def test_nanogpts_tensors_as_a_hugging_face_model(tmp_path):
    """A config.json written by hand does not transpose the matrices."""
    tensors = {name: tensor.clone() for name, tensor in make_gpt().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **SHAPE, "n_positions": 16}))
    message = error_of(tmp_path, load_huggingface)
    assert "not transposed" in message and "pass --out_dir=ckpt.pt" in message


def test_the_tensors_of_a_hugging_face_model(tmp_path):
    tensors = make_transformers_gpt2(vocab_size=300).state_dict()
    for content in tensors, {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}:
        message = error_of(save(tmp_path, content))
        assert "save the model with model.save_pretrained(DIR), then pass --init_from=DIR" in message
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    for path in save(tmp_path, tensors, "pytorch_model.bin"), tmp_path / "model.safetensors":
        assert f"belongs to a Hugging Face model; pass --init_from={tmp_path}" in error_of(path)


# ---- other programs

LLAMA2_ARGS = {"dim": 288, "n_layers": 6, "n_heads": 6, "n_kv_heads": 6, "multiple_of": 32, "max_seq_len": 256}


@pytest.mark.parametrize("names, advice", [
    (["tok_emb.weight", "blocks.0.attn.key.weight", "head.weight"],
     "early minGPT, .* program: 'from mingpt.utils import sample'"),
    (["transformer.wte.weight", "_orig_mod.transformer.h.0.attn.c_q.weight", "lm_head.weight"],
     "nanochat, .* program: 'python -m scripts.base_eval --eval sample', or for a chat model"),
    (["tok_embeddings.weight", "layers.0.attention.wq.weight"], "llama2.c, .* 'python sample.py --checkpoint={path}'"),
    (["lm_head.weight", "transformer.h.0.norm_1.weight"], "'litgpt generate {folder}'"),
    (["conv1.weight", "fc.bias"], "named 'conv1.weight', 'fc.bias'; the tensor names of a nanoGPT model begin with"),
], ids=["early-minGPT", "nanochat", "llama2.c", "litgpt", "no-gpt"])
def test_other_architectures(names, advice, tmp_path):
    tensors, path = {name: torch.ones(4, 4) for name in names}, tmp_path / "weights.pt"
    advice = advice.format(path=path, folder=tmp_path)
    assert re.search(advice, error_of(save(tmp_path, tensors)))
    if "conv1.weight" not in names:
        assert re.search(advice, error_of(save(tmp_path, {"model": tensors, "model_args": LLAMA2_ARGS})))


def test_modded_nanogpt(tmp_path):
    path = save(tmp_path, {"step": 9, "code": "print(1)", "model": {"embed.weight": torch.ones(2)}, "optimizers": []})
    message = error_of(path)
    assert "modded-nanogpt" in message and f"torch.load('{path}', weights_only=True)['code']" in message


class Linear(torch.nn.Linear):
    """A module that is pickled whole."""


class AttributeDict(dict):
    """What Lightning saves hyper-parameters as."""


def test_a_whole_pickled_module(tmp_path):
    for content in Linear(2, 2), {"model": Linear(2, 2), "model_args": SHAPE}:
        message = error_of(save(tmp_path, content))
        assert "holds a whole pickled module, and loading it could run code; if you trust the file" in message
        assert 'torch.save({"model": model.state_dict(), "config": vars(model.config)}, "ckpt.pt")' in message


def test_lightning(tmp_path):
    for hyper_parameters in {"lr": 1e-3}, AttributeDict(lr=1e-3):
        content = {"state_dict": {"model.wte.weight": torch.ones(2)}, "pytorch-lightning_version": "2.4.0",
                   "hyper_parameters": hyper_parameters}
        message = error_of(save(tmp_path, content, "last.ckpt"))
        assert "is a Lightning checkpoint; load it with the program that trained it, and save the GPT" in message


@pytest.mark.parametrize("start, advice", [
    (struct.pack("<i", 20240326),
     "'python dev/eval/export_hf.py --input MODEL.bin --output DIR', then pass --init_from"),
    (b"GGUF", "'llama-cli -m {path} -p PROMPT'"),
    (b"First Citizen:\n", "it is not a checkpoint"),
    (pickle.dumps({"stoi": {"a": 0}}), "it is not a checkpoint")], ids=["llm.c", "GGUF", "text", "meta.pkl"])
def test_files_that_torch_did_not_write(start, advice, tmp_path):
    path = tmp_path / "model_00001000.bin"
    path.write_bytes(start + bytes(4000))
    assert advice.format(path=path) in error_of(path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"{}", b"x" * 8, struct.pack("<Q", 2**63) + b"{"],
                         ids=["empty", "a-byte", "json", "eight-bytes", "long-header"])
def test_short_files_end_in_one_line(content, tmp_path):
    for name in "ckpt.pt", "model.safetensors":
        write_settled(tmp_path / name, content)
        with pytest.raises(ValueError, match=f"^cannot read .*{name}"):
            load_nanogpt(tmp_path / name)
