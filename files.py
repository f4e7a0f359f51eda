"""Reading what torch, safetensors and Hugging Face write: as data alone, within bounds, and mapped where it can be."""
import ctypes
import json
import mmap
import posixpath
import re
import warnings
import zlib

import torch

from guard import MOST_BYTES, MOST_STEPS, Refused, check_pickle, check_zip, require, require_no_tar

JSON = 2**21 # more bytes than describe a network


def read_pickle(path, most=MOST_STEPS):
    """What torch.save wrote, as data alone, and {(bytes, CRC-32)} of its records, where it has them.

    Tensors stay in the file until they are used. Training settings may hold numpy's numbers and paths: they come
    back as plain numbers and text. most: as check_pickle's.
    """
    with open(path, "rb") as f:
        zipped = f.read(4) == b"PK\3\4" # torch before 1.6 wrote no zip
        f.seek(0)
        pickled, sums = f.read(0 if zipped else 5 * MOST_BYTES), set()
    try:
        if zipped:
            pickled, sums = check_zip(path)
        else:
            require_no_tar(pickled)
        # One, or a number, a version, sizes, what was saved and the keys of its storages.
        for part in [most] if zipped else [4000, 4000, 4000, most, most // 4]:
            require(pickled[:1] != b"\x80" or pickled[1] < 4, "torch reads no weights of pickle_protocol=4 and above")
            pickled = pickled[check_pickle(pickled, NAMES, part):]
        with torch.serialization.safe_globals(STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore") # they are for whoever wrote the file
            # Mapped, since elsewhere torch believes a pickle that says its storages are longer than they are.
            return torch.load(path, map_location="cpu", mmap=zipped, weights_only=True), sums
    except Exception as e: # a damaged file trips torch's reader in many ways
        if "allocate memory" in str(e):
            raise MemoryError(f"reading {path}") from None
        told = re.search(r"WeightsUnpickler error:\s*(.+)", str(e)) # what stands around it is advice to load unsafely
        why = (str(e) if isinstance(e, Refused) else
               f"it is damaged, or torch.save did not write it ({told[1] if told else first_line(e):.200})")
        raise ValueError(f"cannot read {path}: {why}; only tensors, numbers and text are taken") from None


def first_line(error):
    """The first line of an exception's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]


def pages_of(tensors):
    """Where the files are mapped that hold these tensors, as (address, bytes), where the system tells."""
    found, held = [], [tensor.data_ptr() for tensor in tensors]
    try:
        with open("/proc/self/maps", "rb") as f:
            for line in f:
                span, _, _, _, inode, *_ = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in span.split(b"-"))
                if inode != b"0" and any(start <= address < end for address in held):
                    found.append((start, end - start))
    except OSError: # no Linux
        return []
    return found


def let_go(pages):
    """Tell the system that what was read of mapped pages need not stay: it counts as this process's memory."""
    for start, size in pages:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class NumpyDtype:
    """Stands in for numpy.dtype: a code such as "f8" and, from its pickled state, the byte order."""

    def __init__(self, code, *_):
        self.code = code
        self.order = "<"

    def __setstate__(self, state):
        self.order = state[1]


def plain_number(dtype, data):
    """Stands in for numpy's scalars: the bytes of a number or text -> that as Python's, of anything else None."""
    import numpy as np
    if not re.fullmatch(r"[biufcUS]\d{1,4}", dtype.code) or not isinstance(data, bytes):
        return None
    return np.frombuffer(data, np.dtype(dtype.code).newbyteorder(dtype.order), count=1)[0].item()


def plain_path(*parts):
    """Stands in for pathlib's classes: the path as text."""
    return posixpath.join("", *parts) or "."


# What a file may name: tensors, types of numbers, and what settings may hold.
STAND_INS = [(plain_number, "numpy._core.multiarray.scalar"), (plain_number, "numpy.core.multiarray.scalar"),
             (NumpyDtype, "numpy.dtype"),
             *((plain_path, f"pathlib{local}.{kind}Path") for local in ("", "._local")
               for kind in ("", "Posix", "Windows", "Pure", "PurePosix", "PureWindows"))]
NAMES = {" ".join(name.rsplit(".", 1)) for name in [
    *(name for _, name in STAND_INS), "_codecs.encode", "collections.OrderedDict", "collections.Counter",
    "builtins.set", "__builtin__.set", "torch.Size", "torch.device", "torch.storage.UntypedStorage",
    *(f"torch.{name}" for name in vars(torch) if name.endswith("Storage")),
    *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    *(f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter"))]}


def read_safetensors(path, most=MOST_BYTES):
    """The tensors of a safetensors file by name; it has no checksums. most: how many bytes of header are many."""
    from safetensors.torch import load_file
    with open(path, "rb") as f:
        header = int.from_bytes(f.read(8), "little")
    if header > most:
        raise ValueError(f"cannot read {path}: it claims a header of {header} bytes; at most {most} are read")
    try:
        return load_file(path), set()
    except OSError:
        raise
    except Exception as e:
        if "allocate memory" in str(e):
            raise MemoryError(f"reading {path}") from None
        raise ValueError(f"cannot read {path}: damaged, or no safetensors ({first_line(e)})") from None


def read_json(path):
    """The object in a JSON file."""
    try:
        if path.stat().st_size > JSON:
            raise ValueError(f"it has more than {JSON} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"cannot read {path}: {first_line(e)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, and holds a {type(content).__name__}")
    return content


def length_and_checksum(storage):
    """The bytes of a storage, all that its tensors and others have there, and their CRC-32."""
    return storage.nbytes(), zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
