"""Checkpoints that are not of nanoGPT or build-nanogpt: the error says what each is, and what to do with it."""
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from models import SHAPE, make_gpt, make_transformers_gpt2, nanogpt_args, same_model
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt


def error_of(path, load=load_nanogpt):
    """The one line that loading ends in; it names the path."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(str(path))
    message = str(error.value)
    assert str(path) in message and "\n" not in message and len(message) < 700 and "damaged" not in message
    return message


def tensors(*names):
    return {name: torch.ones(4, 4) for name in names}


MODULE_ADVICE = "a whole pickled module, and loading it could run code; if you trust the file, load it"
FILES = { # the content, or the first bytes; a part of the error line
    "llama2.c": ({"model": tensors("layers.0.attention.wq.weight"), "model_args": {"dim": 288, "n_layers": 6}},
                 "a model of llama2.c, whose architecture is not GPT-2's; sample from it with that program"),
    "litgpt": ({"model": tensors("lm_head.weight", "transformer.h.0.norm_1.weight")}, "a model of litgpt"),
    "nanochat": (tensors("transformer.wte.weight", "_orig_mod.transformer.h.0.attn.c_q.weight"), "a model of nanochat"),
    "minGPT": (tensors("blocks.0.attn.key.weight", "head.weight"), "a model of an early minGPT"),
    "modded-nanogpt": ({"step": 9, "code": "print(1)", "model": tensors("embed.weight"), "optimizers": []},
                       "a model of modded-nanogpt"),
    "Lightning": ({"pytorch-lightning_version": "2.4.0", "state_dict": tensors("model.wte.weight")},
                  "is a Lightning checkpoint; load it with the program that trained it, and save the GPT in it: torch"),
    "module": (torch.nn.Linear(2, 2), MODULE_ADVICE),
    "llm.c": ((20240326).to_bytes(4, "little"),
              "export it with llm.c's dev/eval/export_hf.py, then pass --init_from=DIR"),
    "GGUF": (b"GGUF", "it is a GGUF file; sample from it with llama.cpp"),
    "lora": ({"model": tensors("transformer.h.0.mlp.c_fc.lora_B.0"), "model_args": SHAPE}, "a LoRA adapter"),
    "module-of-an-entry": ({"model": torch.nn.Linear(2, 2), "model_args": SHAPE}, MODULE_ADVICE),
    "meta.pkl": (pickle.dumps({"stoi": {"a": 0}}), "it is a plain pickle, not a checkpoint; load it in the program"),
    "web-page": (b"<!DOCTYPE html>\n<title>Models</title>" * 9, "it is a text file, not a checkpoint; if it is a page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "only a pointer of Git LFS"),
    "other": (bytes(range(1, 200)), "it is not a checkpoint: neither torch.save nor safetensors wrote it"),
    "no-gpt": (tensors("conv1.weight", "fc.bias"), "named 'conv1.weight', 'fc.bias'; the tensor names of a nanoGPT"),
}


@pytest.mark.parametrize("content, message", FILES.values(), ids=FILES)
def test_the_error_says_what_a_file_is_and_what_to_do_with_it(content, message, tmp_path):
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content if content.isascii() else content + bytes(4000))
    else:
        torch.save(content, path)
    assert message in error_of(path)


def run_advice(message, tmp_path, state_dict, entry="model_args"):
    """Run the command that the message gives for tensors without sizes. It writes tmp_path/ckpt.pt."""
    command = message.split("sizes: ")[1].split(', with "config"')[0]
    for name in "block_size", "vocab_size", "n_layer", "n_head", "n_embd":
        command = command.replace(f"{name}=?", f"{name}={SHAPE[name]}")
    exec(command.replace("model_args", entry).replace("ckpt.pt", str(tmp_path / "ckpt.pt")),
         {"torch": torch, "state_dict": state_dict})


@pytest.mark.parametrize("entry, changes, rename", [
    ("model_args", {"bias": False}, str),
    ("config", {"gelu": "tanh", "tie_word_embeddings": False},
     lambda name: "module._orig_mod." + name.removeprefix("transformer.")),
], ids=["nanoGPT", "minGPT-short-compiled-DDP"])
def test_the_advice_for_a_bare_state_dict_works(entry, changes, rename, tmp_path):
    model, path = make_gpt(**changes), tmp_path / "weights.pt"
    torch.save({rename(name): tensor for name, tensor in model.state_dict().items()}, path)
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


def test_a_hugging_face_model_as_out_dir(tmp_path):
    model, path = make_transformers_gpt2(vocab_size=300), tmp_path / "model.pt"
    torch.save(model.transformer.state_dict(), path)
    assert "save the model with model.save_pretrained(DIR), then pass --init_from=DIR" in error_of(path)
    model.save_pretrained(tmp_path)
    assert f"holds a Hugging Face model, but no ckpt.pt; pass --init_from={tmp_path}" in error_of(tmp_path)
    assert f"belongs to a Hugging Face model; pass --init_from={tmp_path}" in error_of(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name, save", [("adapter_model.safetensors", save_file), ("adapter_model.bin", torch.save)])
def test_a_folder_of_a_lora_adapter(name, save, tmp_path):
    save(tensors("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"), tmp_path / name)
    for load in load_nanogpt, load_huggingface:
        assert "LoRA adapter, which is no model alone; merge it" in error_of(tmp_path, load)
