"""Recognises the files of other programs, and says what to do with each."""
import re
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from sampling.checkpoints.build import nanogpt_name
from sampling.checkpoints.checkpoint import RejectedFileError, read_json
from sampling.checkpoints.pickles import StoredTensor
from sampling.checkpoints.tensor_files import TensorFile, read_tensor_file

SAVE_MODEL = 'torch.save({"model": model.state_dict(), "config": vars(model.config)}, "ckpt.pt")'
LLM_C_MAGIC = {20240326, 20240327, 20240328, 20240520, 20240527} # in its files of models, states, tokenizers and data
LIGHTNING_KEY = "pytorch-lightning_version"
QKV = "transformer.h.0.attn.c_attn.weight" # in nanoGPT, build-nanogpt, minGPT and Hugging Face

SAVE_WITH_SIZES = ( # with only these five sizes, "config" selects the tanh form of GELU
    'save it with its sizes: torch.save({"model": state_dict, "model_args": dict(block_size=?, vocab_size=?, '
    'n_layer=?, n_head=?, n_embd=?)}, "ckpt.pt"), with "config" instead of "model_args" for a model of build-nanogpt '
    "or minGPT; then pass --out_dir=ckpt.pt")
# A pattern of tensor names, the program whose models have them, and a command of it that samples.
ARCHITECTURES = [
    (r"layers\.\d+\.attention\.wq\.weight", "llama2.c", "'python sample.py --checkpoint={path}'"),
    (r"transformer\.h\.\d+\.(norm_1|attn\.(attn|qkv))\.weight", "litgpt", "'litgpt generate {folder}'"),
    (r"transformer\.h\.\d+\.attn\.c_[qkv]\.weight", "nanochat",
     "'python -m scripts.base_eval --eval sample', or for a chat model 'python -m scripts.chat_cli'"),
    (r"(tok_emb|pos_emb|blocks\.\d+\.attn\.(key|query|value))(\.weight)?", "an early minGPT",
     "'from mingpt.utils import sample'"),
]


def read_nanogpt_file(file: BinaryIO, path: Path) -> TensorFile:
    """read_tensor_file, but raises ValueError, which says what to do, for a file of another program."""
    start, found, error = file.read(4), None, None
    try:
        found = read_tensor_file(file)
    except RejectedFileError as e:
        error = e
    entries = found.content if found and isinstance(found.content, dict) else {}
    if message := identify(path, start, getattr(error, "pickled", b""), entries):
        raise ValueError(message.replace("{path}", str(path)).replace("{folder}", str(path.parent)))
    if error:
        raise error
    return found


def identify(path: Path, start: bytes, pickled: bytes, entries: dict) -> str | None:
    """What a file of another program is, and what to do with it; None for nanoGPT's and unknown files.

    start: its first bytes. pickled: a pickle in it that names something forbidden, else empty. entries: its content.
    """
    if int.from_bytes(start[:4], "little") in LLM_C_MAGIC:
        return ("it is a file of llm.c; export the model with llm.c's own script, "
                "'python dev/eval/export_hf.py --input MODEL.bin --output DIR', then pass --init_from=DIR")
    if start[:4] == b"GGUF":
        return "it is a GGUF file; sample from it with llama.cpp: 'llama-cli -m {path} -p PROMPT'"
    if LIGHTNING_KEY.encode() in pickled or LIGHTNING_KEY in entries:
        return ("it is a Lightning checkpoint; load it with the program that trained it, and save the GPT that it "
                f"contains: {SAVE_MODEL}")
    if b"_parameters" in pickled and b"_modules" in pickled:
        return ("it holds a whole pickled module, and loading it could run code; if you trust the file, load it in a "
                f"program that defines its class, and save only its tensors and sizes: {SAVE_MODEL}")
    if {"code", "model"} <= entries.keys() and "model_args" not in entries:
        return ("it holds a model of modded-nanogpt, whose architecture changes from run to run; its own code is in "
                "the file, and defines the model: python -c \"import torch; print(torch.load('{path}', "
                "weights_only=True)['code'])\"")
    is_bare = bool(entries) and all(isinstance(value, StoredTensor) for value in entries.values())
    tensors = entries if is_bare else entries.get("model", entries.get("model_state_dict"))
    tensors = tensors if isinstance(tensors, dict) else {}
    plain = {nanogpt_name(name): tensor for name, tensor in tensors.items() if isinstance(name, str)}
    for pattern, program, command in ARCHITECTURES:
        if any(re.fullmatch(pattern, name) for name in plain):
            return (f"it holds a model of {program}, whose architecture is not GPT-2's; sample from it with that "
                    f"program: {command}")
    return describe_bare_tensors(path, plain) if is_bare else None


def describe_bare_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> str:
    """What to do with a file that holds only tensors, given with nanoGPT's names: it lacks the sizes of the model."""
    if has_model_type(path.parent):
        return "it belongs to a Hugging Face model; pass --init_from={folder}"
    if QKV not in tensors:
        some = ", ".join(repr(name[:60]) for name in list(tensors)[:3])
        return (f"it holds only tensors, named {some}; the tensor names of a nanoGPT model begin with transformer.wte "
                "and transformer.h")
    if is_conv1d(tensors[QKV]):
        return ("it holds the tensors of a Hugging Face GPT-2, but its folder has no config.json; save the model with "
                "model.save_pretrained(DIR), then pass --init_from=DIR")
    return f"it holds only a state_dict, and n_head cannot be inferred from its tensors; {SAVE_WITH_SIZES}"


def require_huggingface_tensors(tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ValueError if the weights of a Hugging Face model are nanoGPT's tensors."""
    if QKV in tensors and not is_conv1d(tensors[QKV]):
        raise ValueError("it holds nanoGPT's tensors, which are not transposed like Hugging Face's; "
                         f"{SAVE_WITH_SIZES}")


def is_conv1d(qkv: StoredTensor) -> bool:
    """Whether the weight is (E, 3E), as in Hugging Face's GPT-2, instead of (3E, E)."""
    return len(qkv.shape) == 2 and qkv.shape[0] < qkv.shape[1]


def has_model_type(folder: Path) -> bool:
    """Whether a folder has a config.json that names an architecture, as every Hugging Face model does."""
    path = folder / "config.json"
    try:
        return path.is_file() and "model_type" in read_json(path)
    except (OSError, ValueError):
        return False
