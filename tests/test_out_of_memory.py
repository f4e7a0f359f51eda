"""Whether an exception means that memory ran out."""
import pytest

from sampling.out_of_memory import is_out_of_memory


@pytest.mark.parametrize("text, expected", [
    ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
    ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", False),
    ("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory", True),
    ("CUDA error: an illegal memory access was encountered", False),
])
def test_out_of_memory_errors_are_recognised(text, expected):
    assert is_out_of_memory(RuntimeError(text)) == expected


def test_an_error_raised_while_handling_out_of_memory_counts_too():
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("cannot load it") from None
    except ValueError as error:
        assert is_out_of_memory(error)
    assert not is_out_of_memory(None)
