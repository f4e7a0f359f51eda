"""Recognises the files of other programs, and says what to do with each."""
import re
from pathlib import Path
from typing import BinaryIO

from sampling.checkpoints.build import nanogpt_names
from sampling.checkpoints.finding import huggingface_config
from sampling.checkpoints.pickles import StoredTensor, fields_of
from sampling.checkpoints.tensor_files import TensorFile, read_tensor_file
from sampling.checkpoints.untrusted_files import LFS_POINTER, require

SAVE_MODEL = 'torch.save({"model": model.state_dict(), "config": vars(model.config)}, "ckpt.pt")'
SAVE_WITH_SIZES = ( # with only these five sizes, "config" selects the tanh form of GELU
    'save it with its sizes: torch.save({"model": state_dict, "model_args": dict(block_size=?, vocab_size=?, '
    'n_layer=?, n_head=?, n_embd=?)}, "ckpt.pt"), with "config" instead of "model_args" for a model of build-nanogpt '
    "or minGPT; then pass --out_dir=ckpt.pt")
QKV = "transformer.h.0.attn.c_attn.weight" # in nanoGPT, build-nanogpt, minGPT and Hugging Face

# A pattern, and what a file is in which it occurs. It is searched in the names of a file's entries and tensors, one a
# line, and in the first bytes of a file that cannot be read.
OTHER_PROGRAMS = [
    (r"\A[\xc6-\xc8\x88\x8f][\xd7\xd8]\x34\x01", # llm.c's numbers are dates, from 20240326 to 20240527
     "it is a file of llm.c; export it with llm.c's dev/eval/export_hf.py, then pass --init_from=DIR"),
    (r"\AGGUF", "it is a GGUF file; sample from it with llama.cpp"),
    (r"pytorch-lightning_version",
     f"it is a Lightning checkpoint; load it with the program that trained it, and save the GPT in it: {SAVE_MODEL}"),
    (r"^_parameters$", # a field of every torch.nn.Module
     "it holds a whole pickled module, and loading it could run code; if you trust the file, load it in a program that "
     f"defines its class, and save only its tensors and sizes: {SAVE_MODEL}"),
    (r"\.lora_[AB](\.|$)",
     "it holds a LoRA adapter, which is no model alone; merge it in the program that trained it, and save the result: "
     "with PEFT, model.merge_and_unload().save_pretrained(DIR), then pass --init_from=DIR"),
    *[(pattern, f"it holds a model of {name}, whose architecture is not GPT-2's; sample from it with that program")
      for name, pattern in [
          ("modded-nanogpt", r"^code\nmodel\noptimizers$"), ("llama2.c", r"^layers\.\d+\.attention\.wq\.weight$"),
          ("litgpt", r"^transformer\.h\.\d+\.(norm_1|attn\.(attn|qkv))\.weight$"),
          ("nanochat", r"^transformer\.h\.\d+\.attn\.c_[qkv]\.weight$"),
          ("an early minGPT", r"^((tok_emb|blocks\.\d+\.attn\.(key|query|value))\.weight|pos_emb)$")]],
]
NOT_TENSORS = [ # patterns only for the first bytes
    (r"\A\x80[\2-\5](?!\x8a\nl\xfc)", # but not the number with which torch began before torch 1.6
     "it is a plain pickle, not a checkpoint; load it in the program that wrote it, and save it with torch.save, not "
     "pickle.dump"),
    (rf"\A(?!{LFS_POINTER})[\t\n\r -~\x80-\xff]+\Z",
     "it is a text file, not a checkpoint; if it is a page that a download saved in the place of the checkpoint, "
     "download it again"),
]


def read_nanogpt_file(file: BinaryIO) -> TensorFile:
    """read_tensor_file, but for a file of another program the error says what to do with it."""
    try:
        tensor_file = read_tensor_file(file)
        advice = advice_for(tensor_file.content, Path(file.name).parent)
    except Exception:
        file.seek(0)
        advice = find_pattern(file.read(2**16).decode("latin1"), OTHER_PROGRAMS + NOT_TENSORS)
        if not advice:
            raise
    require(not advice, advice)
    return tensor_file


def find_pattern(text: str, patterns: list[tuple[str, str]]) -> str | None:
    return next((advice for pattern, advice in patterns if re.search(pattern, text, re.MULTILINE)), None)


def advice_for(content: object, folder: Path) -> str | None:
    """What a file with this content is, and what to do with it; None for nanoGPT's and unknown files."""
    entries = fields_of(content) or {}
    is_bare = bool(entries) and all(isinstance(value, StoredTensor) for value in entries.values())
    tensors = entries if is_bare else fields_of(entries.get("model", entries.get("model_state_dict"))) or {}
    tensors = nanogpt_names({name: tensor for name, tensor in tensors.items() if isinstance(name, str)})
    names = [name for name in entries if isinstance(name, str)]
    advice = find_pattern("\n".join([*names, *tensors]), OTHER_PROGRAMS)
    if advice or not is_bare:
        return advice
    if huggingface_config(folder):
        return f"it belongs to a Hugging Face model; pass --init_from={folder}"
    if QKV not in tensors:
        some = ", ".join(repr(name[:60]) for name in list(tensors)[:3])
        return (f"it holds only tensors, named {some}; the tensor names of a nanoGPT model begin with transformer.wte "
                "and transformer.h")
    if is_conv1d(tensors[QKV]):
        return ("it holds the tensors of a Hugging Face GPT-2, but its folder has no config.json; save the model with "
                "model.save_pretrained(DIR), then pass --init_from=DIR")
    return f"it holds only a state_dict, and n_head cannot be inferred from its tensors; {SAVE_WITH_SIZES}"


def is_conv1d(qkv: StoredTensor) -> bool:
    """Whether the weight is (E, 3E), as in Hugging Face's GPT-2, instead of (3E, E)."""
    return len(qkv.shape) == 2 and qkv.shape[0] < qkv.shape[1]
