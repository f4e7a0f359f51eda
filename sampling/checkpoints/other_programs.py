"""Recognises the files of other programs, and says what to do with each."""
import re
from collections.abc import Mapping
from pathlib import Path

from sampling.checkpoints.checkpoint import read_json
from sampling.checkpoints.state_dict import EMBEDDING, HEAD, POSITIONS, plain_name
from sampling.checkpoints.torch_file import StoredTensor

SAVE_MODEL = 'torch.save({"model": model.state_dict(), "config": vars(model.config)}, "ckpt.pt")'
LLM_C_MAGIC = {20240326, 20240327, 20240328, 20240520, 20240527} # in its files of models, states, tokenizers and data
LIGHTNING_KEY = "pytorch-lightning_version"
QKV = "transformer.h.0.attn.c_attn.weight" # in nanoGPT, build-nanogpt, minGPT and Hugging Face

# A pattern of tensor names, and what the model is and can be sampled with. {path} and {folder} are those of the file.
ARCHITECTURES = {
    r"layers\.\d+\.attention\.wq\.weight":
        "holds a model of llama2.c, whose architecture is Llama's; sample from it with llama2.c itself: "
        "'python sample.py --checkpoint={path}'",
    r"transformer\.h\.\d+\.(norm_1|attn\.(attn|qkv))\.weight":
        "holds a model of litgpt, whose architectures have other layers than GPT-2's; sample from it with litgpt "
        "itself: 'litgpt generate {folder}'",
    r"transformer\.h\.\d+\.attn\.c_[qkv]\.weight":
        "holds a nanochat model, whose architecture is not GPT-2's; sample from it with nanochat itself: "
        "'python -m scripts.base_eval --eval sample' for a base model, 'python -m scripts.chat_cli' for a chat model",
    r"(tok_emb|pos_emb|blocks\.\d+\.attn\.(key|query|value))(\.weight)?":
        "holds a model of an early minGPT, whose attention layers have other tensors than nanoGPT's; sample from it "
        "with minGPT itself: 'from mingpt.utils import sample'",
}


def refuse_other_programs(path: Path, **found: object) -> None:
    """Raises ValueError if identify knows the program that wrote the file."""
    if message := identify(path, **found):
        raise ValueError(message)


def identify(path: Path, start: bytes = b"", pickled: bytes = b"", content: object = None) -> str | None:
    """What a file of another program is, and what to do with it; None for nanoGPT's and unknown files.

    start: the first bytes of the file. pickled: a pickle that names something forbidden. content: what was read, with
    a StoredTensor in place of each tensor. Each may be missing.
    """
    if int.from_bytes(start[:4], "little") in LLM_C_MAGIC:
        return (f"{path} is a file of llm.c; export the model with llm.c's own script, "
                "'python dev/eval/export_hf.py --input MODEL.bin --output DIR', then pass --init_from=DIR")
    if start[:4] == b"GGUF":
        return f"{path} is a GGUF file; sample from it with llama.cpp: 'llama-cli -m {path} -p PROMPT'"
    entries = content if isinstance(content, dict) else {}
    if LIGHTNING_KEY.encode() in pickled or LIGHTNING_KEY in entries:
        return (f"{path} is a Lightning checkpoint; load it with the program that trained it, and save the GPT that it "
                f"contains: {SAVE_MODEL}")
    if b"_parameters" in pickled and b"_modules" in pickled:
        return (f"{path} holds a whole pickled module, and loading it could run code; if you trust the file, load it "
                f"in a program that defines its class, and save only its tensors and sizes: {SAVE_MODEL}")
    if {"code", "model"} <= entries.keys() and "model_args" not in entries:
        return (f"{path} holds a model of modded-nanogpt, whose architecture changes from run to run; its own code is "
                f"in the file, and defines the model: python -c \"import torch; print(torch.load('{path}', "
                "weights_only=True)['code'])\"")
    is_bare = bool(entries) and all(isinstance(value, StoredTensor) for value in entries.values())
    tensors = entries if is_bare else entries.get("model", entries.get("model_state_dict"))
    plain = {plain_name(name): tensor for name, tensor in tensors.items() if isinstance(name, str)} if isinstance(
        tensors, dict) else {}
    for pattern, message in ARCHITECTURES.items():
        if any(re.fullmatch(pattern, name) for name in plain):
            return f"{path} " + message.replace("{path}", str(path)).replace("{folder}", str(path.parent))
    return identify_state_dict(path, plain) if is_bare else None


def identify_state_dict(path: Path, tensors: Mapping[str, StoredTensor], is_hf: bool = False) -> str | None:
    """What to do with a file that holds only tensors, given with nanoGPT's names: it lacks the sizes of the model.

    is_hf: whether it is the weights of a Hugging Face folder, where only nanoGPT's own tensors are wrong.
    """
    shape = tensors[QKV].shape if QKV in tensors else ()
    is_conv1d = len(shape) == 2 and shape[0] < shape[1] # as in Hugging Face's GPT-2: (E, 3E) instead of (3E, E)
    if is_hf:
        what = None if is_conv1d or not shape else "nanoGPT's tensors, which are not transposed like Hugging Face's"
        return what and f"{path} holds {what}; {saving_advice(path, tensors)}"
    if has_model_type(path.parent):
        return f"{path} belongs to a Hugging Face model; pass --init_from={path.parent}"
    if not shape:
        some = ", ".join(repr(name[:60]) for name in list(tensors)[:3])
        return (f"{path} holds only tensors, named {some}; the tensor names of a nanoGPT model begin with "
                "transformer.wte and transformer.h")
    if is_conv1d:
        return (f"{path} holds the tensors of a Hugging Face GPT-2, but its folder has no config.json; save the model "
                "with model.save_pretrained(DIR), then pass --init_from=DIR")
    return (f"{path} holds only a state_dict, and n_head cannot be inferred from its tensors; "
            f"{saving_advice(path, tensors)}")


def saving_advice(path: Path, tensors: Mapping[str, StoredTensor]) -> str:
    """A command that saves the tensors with the model's sizes. It has "?" for each size that the tensors do not show.

    build-nanogpt and minGPT use the tanh form of GELU. A config with only these five sizes selects that form.
    """
    def size(name: str, axis: int) -> object:
        shape = tensors[name].shape if name in tensors else ()
        return shape[axis] if len(shape) == 2 else "?"

    layers = {name.split(".")[2] for name in tensors if name.startswith("transformer.h.")}
    sizes = {"block_size": size(POSITIONS, 0), # a tied tensor may be stored under one of its names
             "vocab_size": size(EMBEDDING if EMBEDDING in tensors else HEAD, 0), "n_layer": len(layers), "n_head": "?",
             "n_embd": size(POSITIONS, 1)}
    loader = "safetensors.torch.load_file" if path.suffix == ".safetensors" else "torch.load"
    return (f'save it with its sizes: torch.save({{"model": {loader}({str(path)!r}), "model_args": '
            f'dict({", ".join(f"{name}={value}" for name, value in sizes.items())})}}, "ckpt.pt"), with "config" '
            'instead of "model_args" for a model of build-nanogpt or minGPT; replace each ? by the model\'s own '
            "number; then pass --out_dir=ckpt.pt")


def has_model_type(folder: Path) -> bool:
    """Whether a folder has a config.json that names an architecture, as every Hugging Face model does."""
    path = folder / "config.json"
    try:
        return path.is_file() and "model_type" in read_json(path)
    except (OSError, ValueError):
        return False
