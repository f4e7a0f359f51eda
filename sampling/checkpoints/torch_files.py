"""Reads files of torch.save as data only.

Two scanners check a file before torch's weights_only unpickler loads it. That unpickler runs no code, but trusts the
sizes that a file claims.
"""
import posixpath
import re
import tarfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sampling.checkpoints.config_record import ConfigRecord
from sampling.checkpoints.errors import (
    ForbiddenNameError,
    OtherProgramError,
    RejectedFileError,
    first_sentence,
    require,
)
from sampling.checkpoints.other_programs import reject_forbidden_name
from sampling.checkpoints.pickle_rules import ANY_CONFIG
from sampling.checkpoints.pickle_scanner import MAX_PICKLE_BYTES, MAX_PICKLE_STEPS, CheckedPickle, check_pickle
from sampling.checkpoints.zip_scanner import Checksums, check_zip
from sampling.out_of_memory import is_out_of_memory

ZIP_SIGNATURE = b"PK\3\4"
MAX_SMALL_STEPS = 4000 # for each of the first three pickles of an old file


def read_torch_file(path: Path, max_steps: int = MAX_PICKLE_STEPS) -> tuple[Any, Checksums]:
    """What torch.save wrote, and the checksums of its records. A file from before torch 1.6 has no checksums.

    The tensors of a newer file are memory-mapped: their bytes are read when they are used. numpy's numbers and paths,
    which settings may hold, become plain numbers and text; a GPTConfig of any module becomes a ConfigRecord. Raises
    ValueError if the file is damaged, holds more than data or would cost more than max_steps (see check_pickle);
    OSError if it cannot be opened.
    """
    with open(path, "rb") as f:
        is_zip = f.read(4) == ZIP_SIGNATURE
    try:
        config_names, checksums = check_zip_file(path, max_steps) if is_zip else check_old_file(path, max_steps)
        stand_ins = STAND_INS + [(ConfigRecord, name.replace(" ", ".")) for name in config_names]
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore") # torch's warnings are for the author of the file
            # For a file that is not mapped, torch trusts the storage sizes that the pickle claims.
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True), checksums
    except OtherProgramError:
        raise
    except Exception as e: # a damaged file can make torch raise any exception
        if is_out_of_memory(e):
            raise MemoryError(f"reading {path}") from None
        raise ValueError(f"cannot read {path}: {reason(e)}; only tensors, numbers and text are allowed") from None


def reason(error: Exception) -> str:
    """Why a file cannot be read, in a few words."""
    if isinstance(error, RejectedFileError):
        return str(error)
    # The rest of torch's message is advice on how to load the file unsafely.
    unpickler_error = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    detail = unpickler_error[1] if unpickler_error else first_sentence(error)
    return f"it is damaged, or torch.save did not write it ({detail:.200})"


def check_zip_file(path: Path, max_steps: int) -> tuple[Iterable[str], Checksums]:
    """Check a file of torch 1.6 or later. Returns the GPTConfigs that it names, and the checksums of its records."""
    pickled, checksums = check_zip(path)
    return check_torch_pickle(path, pickled, max_steps).config_names, checksums


def check_old_file(path: Path, max_steps: int) -> tuple[Iterable[str], Checksums]:
    """Check an older file. It begins with five pickles: a magic number, a version, the sizes of C types, the saved
    object, and the keys of its storages. The bytes of the storages follow, without checksums.
    """
    with open(path, "rb") as f:
        head = f.read(5 * MAX_PICKLE_BYTES)
    reject_tar(head)
    config_names: set[str] = set()
    for steps in (MAX_SMALL_STEPS, MAX_SMALL_STEPS, MAX_SMALL_STEPS, max_steps, max_steps // 4):
        checked = check_torch_pickle(path, head, steps)
        head = head[checked.length:]
        config_names |= checked.config_names
    return config_names, set()


def check_torch_pickle(path: Path, pickled: bytes, max_steps: int) -> CheckedPickle:
    """check_pickle with the names that torch.save writes."""
    # torch's own message for these sounds as if the file were damaged.
    require(pickled[:1] != b"\x80" or pickled[1] < 4, "torch cannot read weights saved with pickle_protocol=4 or above")
    try:
        return check_pickle(pickled, ALLOWED_NAMES, max_steps)
    except ForbiddenNameError as e:
        reject_forbidden_name(path, pickled, e)
        raise


def reject_tar(head: bytes) -> None:
    """Raises RejectedFileError if a file begins as a tar file.

    torch would take it for its oldest format, and would read the first header into memory, whatever length it claims.
    """
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
        raise RejectedFileError("it is a tar file")


# ---- stand-ins, which torch calls instead of numpy's and pathlib's classes

class NumpyDtype:
    """Stands in for numpy.dtype: a code such as "f8" and, from its pickled state, the byte order."""

    def __init__(self, code, *_):
        self.code = code
        self.byte_order = "<"

    def __setstate__(self, state):
        self.byte_order = state[1]


def python_number(dtype: NumpyDtype, data: bytes):
    """Stands in for the function that makes numpy scalars. Returns a Python number or text; None for other types."""
    import numpy as np
    if not re.fullmatch(r"[biufcUS]\d{1,4}", dtype.code) or not isinstance(data, bytes):
        return None
    return np.frombuffer(data, np.dtype(dtype.code).newbyteorder(dtype.byte_order), count=1)[0].item()


def path_as_text(*parts: str) -> str:
    """Stands in for pathlib's classes."""
    return posixpath.join("", *parts) or "."


STAND_INS = [
    (python_number, "numpy._core.multiarray.scalar"),
    (python_number, "numpy.core.multiarray.scalar"),
    (NumpyDtype, "numpy.dtype"),
    *((path_as_text, f"pathlib{submodule}.{kind}Path") for submodule in ("", "._local")
      for kind in ("", "Posix", "Windows", "Pure", "PurePosix", "PureWindows")),
]

# What a file may name: tensors, storages, dtypes, and what settings may hold.
ALLOWED_NAMES = {" ".join(name.rsplit(".", 1)) for name in [
    *(name for _, name in STAND_INS),
    ANY_CONFIG.replace(" ", "."),
    "_codecs.encode", "collections.OrderedDict", "collections.Counter", "builtins.set", "__builtin__.set",
    "torch.Size", "torch.device", "torch.storage.UntypedStorage",
    *(f"torch.{name}" for name in vars(torch) if name.endswith("Storage")),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *(f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter")),
]}
