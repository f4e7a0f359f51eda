"""Finds the checkpoint that the user means, says what lies near if there is none, and waits for the next save."""
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from sampling.checkpoints.untrusted_files import MAX_CONFIG_BYTES, read_json

logger = logging.getLogger(__name__)
WATCH_POLL = 0.5 # seconds between two looks at a file that a training will save
ALIASES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
           "n_positions": "max_position_embeddings"} # other names that a config.json may use, as in transformers
State = tuple[int, int, int] # what changes when a file is written


def find_checkpoint(out_dir: str | Path) -> Path:
    """The path of ckpt.pt in out_dir, or out_dir if it is a file, or a safetensors file in it, of which load_nanogpt
    says what is missing. Raises FileNotFoundError, which names what is near, if there is none.
    """
    folder, path = Path(out_dir), checkpoint_path(out_dir)
    if path.is_file():
        return path
    if huggingface_config(folder):
        raise FileNotFoundError(f"{folder} holds a Hugging Face model, but no ckpt.pt; pass --init_from={folder}")
    if snapshots := newest_first(folder.glob("*.pt")): # ckpt-2000-1.2-1.4.pt, best_model.pt or 2000_ckpt.pt of forks
        names = first_names([snapshot.name for snapshot in snapshots])
        raise FileNotFoundError(f"{folder} holds {names}, but no ckpt.pt; pass --out_dir={snapshots[0]}")
    if weights := newest_first(folder.glob("*.safetensors")):
        return weights[0]
    paths = [*folder.parent.glob("ckpt.pt"), *folder.parent.glob("*/ckpt.pt"), *folder.glob("*/ckpt.pt"),
             *Path().glob("*/ckpt.pt")]
    near = list(dict.fromkeys(str(path.parent) for path in newest_first(paths)))
    found = f"found ckpt.pt in {first_names(near)}; " if near else ""
    raise FileNotFoundError(f"there is no checkpoint at {path if folder.is_dir() else folder}; {found}"
                            "pass --out_dir=FOLDER_OR_FILE, or --init_from=gpt2 for GPT-2")


def checkpoint_path(out_dir: str | Path) -> Path:
    """Where the checkpoint is, or will be once a training has saved it."""
    path = Path(out_dir)
    return path if path.is_file() or path.suffix == ".pt" else path / "ckpt.pt"


def first_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(filter(Path.is_file, paths), key=lambda path: (path.stat().st_mtime, path.name), reverse=True)


def huggingface_config(folder: Path) -> dict | None:
    """The config.json of a Hugging Face model in this folder; None if there is none."""
    path = folder / "config.json"
    config = read_json(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    has_sizes = all(config.keys() & names for names in ALIASES.items()) # in 2019, it named no architecture
    return config if "model_type" in config or has_sizes else None


# ---- waiting for the next save

def wait_for_saves(out_dir: str | Path) -> Iterator[State]:
    """Wait until there is a checkpoint in out_dir, and yield its state; then again whenever it is saved anew."""
    last = None
    while True:
        previous, state = None, file_state(out_dir)
        if state is None or last is not None:
            logger.info(f"waiting for the {'next' if last else 'first'} save of {checkpoint_path(out_dir)}")
            while state != previous or state in (last, None): # when the save is over, it stays the same for a while
                time.sleep(WATCH_POLL)
                previous, state = state, file_state(out_dir)
        yield (last := state)


def file_state(out_dir: str | Path) -> State | None:
    """The state of the checkpoint in out_dir; None if there is none now."""
    with suppress(OSError):
        status = checkpoint_path(out_dir).stat()
        return status.st_size, status.st_mtime_ns, status.st_ino
    return None
