"""Fixtures that the fuzz tests share."""
import pytest

from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder that all examples of a test write to."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def gpt2(tiktoken_cache, needs_gpt2_encoding):
    """GPT-2's encoding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
        return GPT2Tokenizer()
