"""Finds checkpoints near a path that is none, for the error to name."""
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NUMBERED = "model_*.pt", "ckpt_*.pt" # of build-nanogpt and of programs like nanoGPT


def checkpoints_near(out_dir: str | Path) -> list[str]:
    """Up to five folders with a ckpt.pt: in or beside out_dir, in the working directory, or in this project."""
    folders = PROJECT, Path(), Path(out_dir).parent, Path(out_dir)
    found = {path.resolve(): str(path.parent) for folder in folders for path in folder.glob("*/ckpt.pt")}
    return sorted(found.values())[:5]


def numbered_near(out_dir: str | Path) -> Path | None:
    """A model_*.pt or ckpt_*.pt near out_dir or the working directory, in a folder that has no ckpt.pt."""
    folders = {path.parent for base in (Path(), Path(out_dir).parent) for pattern in NUMBERED
               for path in (*base.glob(pattern), *base.glob(f"*/{pattern}"))}
    found = (latest_numbered(folder) for folder in sorted(folders) if not (folder / "ckpt.pt").exists())
    return next(filter(None, found), None)


def latest_numbered(folder: Path) -> Path | None:
    """The model_*.pt or ckpt_*.pt with the highest number, as training loops name a checkpoint after its step."""
    paths = [path for pattern in NUMBERED for path in folder.glob(pattern) if path.is_file()]
    return max(paths, key=lambda path: ([int(digits) for digits in re.findall(r"\d{1,18}", path.name)], path.name),
               default=None)
