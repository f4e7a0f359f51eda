"""What users are told about names that are not ours, and which errors mean that memory ran out."""
import pytest

from configurator import find_settings, override
from project import SCRIPT
from sampling.messages import ALIASES, is_out_of_memory, training_settings

SETTINGS = find_settings(SCRIPT)


def test_aliases_name_settings_but_are_not_settings():
    assert not ALIASES.keys() & SETTINGS.keys()
    for meant in ALIASES.values():
        assert set(meant.split(" or ")) <= SETTINGS.keys()


@pytest.mark.parametrize("argument, setting", [
    ("-p 5", "start"), ("-n 5", "num_samples or max_new_tokens"), ("--max_length=5", "max_new_tokens"),
    ("--max-length 5", "max_new_tokens"), ("-temp=5", "temperature"), ("-seed=5", "seed"), ("--ckpt=5", "out_dir")])
def test_the_error_suggests_our_name_for_an_alias(argument, setting):
    with pytest.raises(ValueError) as error:
        override({"__file__": str(SCRIPT)}, argument.split(), aliases=ALIASES)
    assert f"; did you mean {setting}?" in str(error.value)


@pytest.mark.parametrize("names, ignored", [
    (["learning_rate"], ["batch_size"]), (["gradient_accumulation_steps", "os"], ["batch_size"]),
    (["max_iters"], ["batch_size"]), (["eval_iters"], ["batch_size"]), ([], []), (["os", "block_size"], [])], ids=str)
def test_the_batch_size_of_a_training_file_is_ignored(names, ignored):
    assert list(training_settings(names)) == ignored


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
