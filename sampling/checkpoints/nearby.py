"""Finds checkpoints near a path that has none. The error message suggests them."""
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NUMBERED_PATTERNS = "model_*.pt", "ckpt_*.pt" # file names of build-nanogpt, and of programs similar to nanoGPT


def checkpoints_near(out_dir: str | Path) -> list[str]:
    """Up to five folders that have a ckpt.pt: in or beside out_dir, in the working directory, or in this project."""
    folders = PROJECT, Path(), Path(out_dir).parent, Path(out_dir)
    found = {path.resolve(): str(path.parent) for folder in folders for path in folder.glob("*/ckpt.pt")}
    return sorted(found.values())[:5]


def numbered_checkpoint_near(out_dir: str | Path) -> Path | None:
    """A model_*.pt or ckpt_*.pt near out_dir or in the working directory; None if there is none.

    Ignores folders that have a ckpt.pt.
    """
    folders = {path.parent for base in (Path(), Path(out_dir).parent) for pattern in NUMBERED_PATTERNS
               for path in (*base.glob(pattern), *base.glob(f"*/{pattern}"))}
    found = (latest_numbered_checkpoint(folder) for folder in sorted(folders) if not (folder / "ckpt.pt").exists())
    return next(filter(None, found), None)


def latest_numbered_checkpoint(folder: Path) -> Path | None:
    """The model_*.pt or ckpt_*.pt with the highest number, which is the training step; None if there is none."""
    paths = [path for pattern in NUMBERED_PATTERNS for path in folder.glob(pattern) if path.is_file()]
    return max(paths, key=lambda path: ([int(digits) for digits in re.findall(r"\d{1,18}", path.name)], path.name),
               default=None)
