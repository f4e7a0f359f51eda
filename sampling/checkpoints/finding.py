"""Where the checkpoint that the user means lies, and waiting for its next save."""
import logging
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from sampling.checkpoints.untrusted_files import MAX_CONFIG_BYTES, read_json

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


def folder_of(path: Path) -> Path:
    """The folder that is meant: path, or the folder of a file that is called as models are, or is there."""
    return path.parent if not os.path.isdir(path) and (SAVED.fullmatch(path.name) or os.path.isfile(path)) else path


def flag_for(path: Path) -> str:
    """The flag that loads the model at path; '' if there is none."""
    if os.path.isfile(path / "ckpt.pt") or (SAVED.fullmatch(path.name) and os.path.isfile(path)):
        return f"--out_dir={shlex.quote(str(path))}"
    return f"--init_from={shlex.quote(str(path))}" if has_weights(path) else ""


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those of these paths that hold a model, each once."""
    def age(path: Path) -> tuple:
        step = re.fullmatch(r"checkpoint-(\d+)", path.name) # a Trainer's; copies may have any time
        file = next(filter(os.path.isfile, (path / "ckpt.pt", path / "config.json")), path)
        return int(step[1]) if step else -1, os.path.getmtime(file), path.name
    return sorted({os.path.realpath(path): path for path in paths if flag_for(path)}.values(), key=age, reverse=True)


# ---- waiting for the next save

def wait_for_saves(out_dir: str | Path) -> Iterator[None]:
    """Wait until there is a checkpoint in out_dir, and yield; then again whenever it is saved anew."""
    last = None
    while True:
        previous, state = None, file_state(path := checkpoint_path(out_dir))
        if state is None or last is not None:
            logger.info(f"waiting for the {'next' if last else 'first'} save of {path}")
            while state != previous or state in (last, None): # when the save is over, it stays the same for a while
                time.sleep(WATCH_POLL)
                previous, state = state, file_state(path := checkpoint_path(out_dir))
        yield
        last = LOADED.get(path, state) # a newer one than that of the wait, if the training saved it in between


def file_state(file: Path | int) -> tuple | None:
    """What changes when the file at this path, or with this descriptor, is written; None if there is none now."""
    with suppress(OSError):
        status = os.stat(file)
        return status.st_size, status.st_mtime_ns, status.st_ino
    return None
