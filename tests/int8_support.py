"""What the tests of int8 share."""
import pytest

from sampling.backends.cpu.int8_matmul import onednn_limits


def skip_without_int8():
    """Skip the test file that calls this if torch, or the processor, lacks the operators."""
    try:
        onednn_limits()
    except ValueError:
        pytest.skip("this torch, or this processor, lacks the operators", allow_module_level=True)
