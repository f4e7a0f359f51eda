"""Reads the files of Hugging Face models: safetensors and JSON."""
import json
from pathlib import Path
from typing import TYPE_CHECKING

from sampling.checkpoints.errors import first_sentence
from sampling.out_of_memory import is_out_of_memory

if TYPE_CHECKING: # importing torch takes a second
    from torch import Tensor

MAX_HEADER_BYTES = 2**23 # of a safetensors file
MAX_JSON_BYTES = 2**21 # a config.json has about 1,000 bytes, the index of a large model has 100,000


def read_safetensors(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> "dict[str, Tensor]":
    """The tensors of a safetensors file by name, memory-mapped. Raises ValueError if the file is damaged.

    The header is JSON. Parsing it takes many times its size in memory, so this function checks its length first.
    """
    from safetensors.torch import load_file
    with open(path, "rb") as f:
        header_bytes = int.from_bytes(f.read(8), "little")
    if header_bytes > max_header_bytes:
        raise ValueError(f"cannot read {path}: it claims a header of {header_bytes} bytes; "
                         f"at most {max_header_bytes} are allowed")
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as e:
        if is_out_of_memory(e):
            raise MemoryError(f"reading {path}") from None
        raise ValueError(f"cannot read {path}: it is damaged, or not a safetensors file "
                         f"({first_sentence(e)})") from None


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict:
    """The object in a JSON file. Raises ValueError if the file holds anything else, or more than max_bytes."""
    try:
        if path.stat().st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes >> 20} MiB; without indentation it may be small enough: "
                             "load it with Python's json, and save it with indent=None")
        text = path.read_text(encoding="utf-8")
        # An empty list takes 2 bytes in the file, and about 60 bytes in memory.
        if text.count(",") > max_bytes // 16 or text.count("[") + text.count("{") > max_bytes // 32:
            raise ValueError(f"it has more than {max_bytes // 16} values, or {max_bytes // 32} lists and objects")
        content = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"cannot read {path}: it is damaged, or not JSON ({e}); copy it again") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"cannot read {path}: {first_sentence(e)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content
