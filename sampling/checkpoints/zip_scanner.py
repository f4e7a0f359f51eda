"""Checks a zip file that torch.save wrote, before anything loads it.

torch maps the records of such a file into memory, and Python's zipfile reads their checksums. An attack could make the
two readers see different records, make records overlap, or make a small file expand to a large one.
"""
import os
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import torch

from sampling.checkpoints.errors import require
from sampling.checkpoints.pickle_scanner import MAX_PICKLE_BYTES

Checksums = set[tuple[int, int]] # (bytes, CRC-32) of a file's records

LOCAL_HEADER = struct.Struct("<4s22xHH") # before each record: signature, lengths of its name and of its extra field
# The end of a file: zip64's end record (length and start of the directory), its locator (where that record is), and
# the old end record (length of the comment).
TRAILER = struct.Struct("<4s36xQQ4s4xQ4x4s16xH")
UTF8_NAME = 2**11 # a flag of a record


def check_zip(path: Path) -> tuple[bytes, Checksums]:
    """The pickle in a zip file that torch.save wrote, and the checksums of its records.

    The checksums are empty if torch saved the file without them. Raises RejectedFileError if torch.save cannot have
    written the file.
    """
    directory_start = check_trailer(path)
    with zipfile.ZipFile(path) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    check_sizes(records)
    check_positions(path, records, directory_start)
    checksums = {(record.file_size, record.CRC) for record in records}
    pickled = read_pickle(path)
    if not any(checksum for _, checksum in checksums):
        return pickled, set()
    require((len(pickled), zlib.crc32(pickled)) in checksums, "its pickle does not match its checksum")
    return pickled, checksums


def check_trailer(path: Path) -> int:
    """Where the directory of a zip file begins.

    Readers search for the directory in different ways, and could find two different directories. If the file
    ends exactly as torch.save ends it, all readers find the same one. Raises RejectedFileError if it does not.
    """
    with open(path, "rb") as f:
        file_size = f.seek(0, os.SEEK_END)
        f.seek(max(0, file_size - TRAILER.size))
        trailer = f.read()
    require(len(trailer) == TRAILER.size, "it is too short")
    end64, length, start, locator, end64_position, end, comment = TRAILER.unpack(trailer)
    directory_end = file_size - TRAILER.size
    require((end64, locator, end) == (b"PK\6\6", b"PK\6\7", b"PK\5\6") and not comment
            and start + length == end64_position == directory_end,
            "its directory of records is not where torch.save puts it")
    require(length <= MAX_PICKLE_BYTES, "it has far more records than a model needs")
    return start


def check_sizes(records: list[zipfile.ZipInfo]) -> None:
    """Stops zip bombs, which need compressed records, and pickles that are too long to scan."""
    require(all(record.compress_type == zipfile.ZIP_STORED for record in records), "one of its records is compressed")
    others = [record.file_size for record in records if record.filename.split("/")[1:2] != ["data"]]
    require(max(others, default=0) <= MAX_PICKLE_BYTES, f"its pickle has more than {MAX_PICKLE_BYTES} bytes")


def check_positions(path: Path, records: list[zipfile.ZipInfo], directory_start: int) -> None:
    """Stops records that overlap, or that are not where the directory says. The records must be sorted by position.

    A record in the place of another could have the right length and checksum. A thousand records that share their
    bytes would be a thousand times larger than the file.
    """
    ends = [*(record.header_offset for record in records), directory_start][1:]
    with open(path, "rb") as f:
        for record, end in zip(records, ends, strict=True):
            f.seek(record.header_offset)
            header = f.read(LOCAL_HEADER.size)
            require(len(header) == LOCAL_HEADER.size, "it is cut short")
            signature, name_length, extra_length = LOCAL_HEADER.unpack(header)
            name = record.orig_filename.encode("utf-8" if record.flag_bits & UTF8_NAME else "cp437")
            require(signature == b"PK\3\4" and f.read(name_length) == name,
                    "one of its records is not where its directory says")
            require(f.tell() + extra_length + record.file_size <= end, "its records overlap")


def read_pickle(path: Path) -> bytes:
    """The pickle, as torch.load will find it.

    Raises RejectedFileError if a machine of the other byte order wrote the file. torch would
    swap the bytes of mapped tensors in place, and release_pages would lose the swap.
    """
    reader = torch._C.PyTorchFileReader(os.fspath(path))
    is_native = not reader.has_record("byteorder") or reader.get_record("byteorder") == sys.byteorder.encode()
    require(is_native, "it was saved on a machine with another byte order")
    return reader.get_record("data.pkl")
