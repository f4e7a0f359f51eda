"""Which exceptions mean that memory ran out."""
import re

OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive|ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or the one that caused it, means so. torch and oneDNN have several words for it."""
    return error is not None and (bool(OUT_OF_MEMORY.search(f"{type(error).__name__} {error}"))
                                  or is_out_of_memory(error.__context__))
