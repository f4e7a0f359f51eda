"""What an exception says."""
import errno
import re
import traceback

OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive"
    "|failed to map segment" # of a library
    # cuBLAS reports the latter if there is no memory for its workspace.
    "|ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED")


def first_sentence(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, means out of memory.

    torch and oneDNN have several messages for it. Those of other types may quote a file, which
    could say anything.
    """
    if error is None:
        return False
    has_type = isinstance(error, MemoryError | RuntimeError | ImportError)
    if isinstance(error, OSError):
        has_type = error.errno == errno.ENOMEM
    text = traceback.format_exception_only(error)[-1] # unlike str, it never raises
    is_named = OUT_OF_MEMORY.search(text) is not None
    return (has_type and is_named) or is_out_of_memory(error.__context__)
