"""What users are told about names that are not ours, and which errors mean that memory ran out."""
import pytest

from configurator import find_settings
from project import SCRIPT
from sampling.messages import ALIASES, is_out_of_memory, training_settings

SETTINGS = find_settings(SCRIPT)


def test_aliases_name_settings_but_are_not_settings():
    assert not ALIASES.keys() & SETTINGS.keys()
    for meant in ALIASES.values():
        assert set(meant.split(" or ")) <= SETTINGS.keys()


@pytest.mark.parametrize("name", ["learning_rate", "gradient_accumulation_steps", "max_iters", "eval_iters"])
def test_the_batch_size_of_a_training_file_is_ignored(name):
    assert list(training_settings([name, "os"])) == ["batch_size"] and not training_settings(["os", "block_size"])


@pytest.mark.parametrize("text", [
    "CUDA out of memory. Tried to allocate 2.00 GiB", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling", "DefaultCPUAllocator: can't allocate memory"])
def test_out_of_memory_errors_are_recognised_also_behind_another_error(text):
    error = ValueError("cannot load it")
    error.__context__ = RuntimeError(text)
    assert is_out_of_memory(error)


def test_other_errors_of_a_gpu_are_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")) and not is_out_of_memory(None)
