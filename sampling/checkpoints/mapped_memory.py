"""Finds memory that is mapped from a file, and releases it."""
import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

Pages = list[tuple[int, int]] # (address, bytes)


def pages_of(tensors: Iterable[Tensor]) -> Pages:
    """The mapped regions that hold these tensors. Empty if there are none, or if this is not Linux."""
    pages, addresses = [], [tensor.data_ptr() for tensor in tensors]
    try:
        with open("/proc/self/maps", "rb") as f:
            for line in f:
                span, _, _, _, inode, *_ = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in span.split(b"-"))
                if inode != b"0" and any(start <= address < end for address in addresses):
                    pages.append((start, end - start))
    except OSError: # not Linux
        return []
    return pages


def release_pages(pages: Pages) -> None:
    """Release the memory of these pages. A later access reads them from the file again."""
    for start, size in pages:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
