"""Where the checkpoint that the user means lies, the wait for its next save, and what to do where no model is found: a
command that works, and never leads back to the error.
"""
import difflib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from sampling.checkpoints.untrusted_files import MAX_CONFIG_BYTES, UNFINISHED, RejectedFileError, read_json

logger = logging.getLogger(__name__)
# The files of a Hugging Face model's weights, and the index that names its shards.
WEIGHTS = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?")
# What else a model is saved as. The other names are of data, of adapters, or of what a Trainer saves beside a model.
SAVED = re.compile(r"(?!adapter|optimizer|sched|scaler|rng_state|training_args|(train|val|model\.\w+)\.)"
                   r".*\.(pt|pth|ckpt|bin|safetensors)")
WATCH_POLL = 0.5 # seconds between two looks at a file that a training will save
ALIASES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
           "n_positions": "max_position_embeddings"} # other names that a config.json may use, as in transformers
LOADED: dict[Path, tuple] = {} # the state of each ckpt.pt when it was loaded


def checkpoint_path(out_dir: str | Path) -> Path:
    """Where the checkpoint is, or will be once a training has saved it."""
    path = Path(out_dir)
    return path if os.path.isfile(path) or path.suffix == ".pt" else path / "ckpt.pt"


def huggingface_config(folder: Path) -> dict | None:
    """The config.json of a Hugging Face model in this folder; None if there is none."""
    path = folder / "config.json"
    config = read_json(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    has_sizes = all(config.keys() & names for names in ALIASES.items()) # in 2019, it named no architecture
    return config if "model_type" in config or has_sizes else None


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights of a Hugging Face model, and its config.json."""
    with suppress(OSError, ValueError): # such as a damaged config.json
        return bool(huggingface_config(folder)) and any(map(WEIGHTS.fullmatch, os.listdir(folder)))
    return False


def huggingface_folder(path: Path) -> Path:
    """The folder of a Hugging Face model if path is config.json, or a file of its weights; otherwise path."""
    is_part = (WEIGHTS.fullmatch(path.name) or path.name == "config.json") and os.path.isfile(path)
    is_other = path.suffix == ".bin" and any(path.parent.glob("model*.safetensors")) # those would be read, not this
    return path.parent if is_part and has_weights(path.parent) and not is_other else path


def flag_for(path: Path) -> str:
    """The flag that loads the model at path; '' if there is none."""
    if os.path.isfile(path / "ckpt.pt") or (SAVED.fullmatch(path.name) and os.path.isfile(path)):
        return f"--out_dir={quote(str(path))}"
    return f"--init_from={quote(str(path))}" if has_weights(path) else ""


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those of these paths that hold a model, each once."""
    def age(path: Path) -> tuple:
        step = re.fullmatch(r"checkpoint-(\d+)", path.name) # a Trainer's; copies may have any time
        file = next(filter(os.path.isfile, (path / "ckpt.pt", path / "config.json")), path)
        return int(step[1]) if step else -1, os.path.getmtime(file), path.name
    return sorted({os.path.realpath(path): path for path in paths if flag_for(path)}.values(), key=age, reverse=True)


# ---- what to do where no model is found

OTHERS = { # files that are no model for us: what each is, and what makes a model of it
    "adapter_model.*": "an adapter, which is no model alone; with peft: python -c 'import peft, sys; peft.AutoPeftModel"
                       "ForCausalLM.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[2])' "
                       "{folder} converted; then pass --init_from=converted",
    "tf_model.h5": "TensorFlow's; with transformers 4 and TensorFlow: python -c 'import sys, transformers as t; t.GPT2"
                   "LMHeadModel.from_pretrained(sys.argv[1], from_tf=True).save_pretrained(sys.argv[1])' {folder}; "
                   "then pass --init_from={folder}",
    "flax_model.msgpack": "Flax's; with transformers 4 and Flax: python -c 'import sys, transformers as t; t.GPT2LMHead"
                          "Model.from_pretrained(sys.argv[1], from_flax=True).save_pretrained(sys.argv[1])' {folder}; "
                          "then pass --init_from={folder}",
    "*.index": "TensorFlow's, as gpt-2-simple saves it; with transformers 4 and TensorFlow: python -m transformers."
               "models.gpt2.convert_gpt2_original_tf_checkpoint_to_pytorch --gpt2_checkpoint_path={folder} --gpt2_"
               "config_file={folder}/hparams.json --pytorch_dump_folder_path={folder}; then pass --init_from={folder}",
    "*.gguf": "llama.cpp's: pass --init_from with the model that it was made from",
    "*.onnx": "ONNX's: pass --init_from with the model that it was exported from",
    "zero_to_fp32.py": "DeepSpeed's, which saved a model in parts; join them: python -m deepspeed.utils.zero_to_fp32 "
                       "{folder} {folder}; then pass --init_from={folder}",
    "model.*.safetensors": "a variant of the weights: cp {file} {folder}/model.safetensors; pass --init_from={folder}",
}


def advice(path: Path) -> str:
    """What is at path or near it, and the command that loads it or makes a model of it."""
    is_file = os.path.isfile(path) or (SAVED.fullmatch(path.name) and not os.path.isdir(path)) # or is called like one
    wanted, place = checkpoint_path(path), path.parent if is_file else path
    for part in wanted, *wanted.parents:
        if os.path.islink(part) and not os.path.exists(part):
            return f"{part} is a link to {os.readlink(part)}, which is not there: repair or replace the link"
        if os.path.isdir(part) and not os.access(part, os.X_OK):
            return f"you have no permission to look into {part}: ask its owner for a copy"
    flag = flag_for(place)
    if "--init_from" in flag or (flag and place == path):
        return f"{place} holds {'a Hugging Face model' if '--init_from' in flag else 'ckpt.pt'}; pass {flag}"
    inside = [folder for pattern in ("*", "*/*", "*/snapshots/*") for folder in place.glob(pattern)]
    beside = found(place, filter(os.path.isdir, [place.parent, *place.parent.glob("*"), *Path().glob("*")]))
    return (found(path, (file for file in place.glob("*") if os.path.isfile(file) and not describe_other(file)))
            or describe_other(path) or describe_other(wanted) or found(place, filter(os.path.isdir, inside))
            or next(filter(None, map(describe_other, inside)), None)
            or f"{beside or 'pass --out_dir=FOLDER_OR_FILE'}, or --init_from=gpt2 for GPT-2")


def found(path: Path, places: Iterable[Path]) -> str:
    """Which places hold a model: first those called like a path that is no folder, then the newest. '' if none."""
    names = list(map(str, newest_first(places)))
    like = [] if os.path.isdir(path) else difflib.get_close_matches(str(path), names, len(names) or 1)
    if not (names := list(dict.fromkeys([*like, *names]))):
        return ""
    first, flag = Path(names[0]), flag_for(Path(names[0]))
    if WEIGHTS.fullmatch(first.name):
        return (f"{first} lacks its config.json: copy that beside it, and pass --init_from={quote(str(first.parent))}; "
                f"for weights that nanoGPT trained, pass {flag}")
    names = [name for name in names if flag_for(Path(name))[:6] == flag[:6]]
    what = "" if first.is_file() else "ckpt.pt in " if "--out_dir" in flag else "models in "
    return f"found {what}{', '.join(names[:5])}{', ...' * (len(names) > 5)}; pass {flag}"


def describe_other(path: Path) -> str:
    """What the file at path, or one in this folder, is, and what makes a model of it; '' if OTHERS does not have it."""
    for pattern, what in OTHERS.items():
        for file in filter(os.path.isfile, [path, *sorted(path.glob(pattern))]):
            if file.match(pattern):
                return f"{file} is {what.format(file=quote(str(file)), folder=quote(str(file.parent)))}"
    return ""


# ---- waiting for the next save

def load_saves(out_dir: str | Path, load: Callable[[], Any]) -> Iterator[Any]:
    """Wait until there is a checkpoint in out_dir, and yield what load returns; then again whenever it is saved anew.
    A file that is no whole checkpoint may become one.
    """
    last = None
    while True:
        previous, state = None, file_state(path := checkpoint_path(out_dir))
        if state is None or last is not None:
            if path not in UNFINISHED:
                logger.info(f"waiting for the {'next' if last else 'first'} save of {path}")
            while state != previous or state in (last, None): # when the save is over, it stays the same for a while
                time.sleep(WATCH_POLL)
                previous, state = state, file_state(path := checkpoint_path(out_dir))
        try:
            yield load()
            last = LOADED.get(path, state) # a newer one than that of the wait, if the training saved it in between
            UNFINISHED.discard(path)
        except (FileNotFoundError, RejectedFileError) as error:
            if path not in UNFINISHED:
                logger.warning(f"{error}; waiting for the next save of {path}")
            last = state
            UNFINISHED.add(path)


def file_state(file: Path | int) -> tuple | None:
    """What changes when the file at this path, or with this descriptor, is written; None if there is none now."""
    with suppress(OSError):
        status = os.stat(file)
        return status.st_size, status.st_mtime_ns, status.st_ino
    return None
