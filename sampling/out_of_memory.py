"""Recognises the exceptions that mean out of memory."""
import re

OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive"
    "|ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED") # cuBLAS reports the latter if there is no memory for its workspace


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, means out of memory. torch and oneDNN have several messages for it."""
    return error is not None and (bool(OUT_OF_MEMORY.search(f"{type(error).__name__} {error}"))
                                  or is_out_of_memory(error.__context__))
