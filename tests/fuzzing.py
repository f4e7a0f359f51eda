"""How the fuzz tests make up their cases: the same every time, in half a minute. Other ones at every call, for about an hour:

    SAMPLE_FUZZ_HOUR=1 python -m pytest tests/test_fuzz_*.py
"""
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tokenizer import GPT2Tokenizer

HOUR = bool(os.environ.get("SAMPLE_FUZZ_HOUR"))


def fuzz(examples):
    """So many examples of a test, or 150 times as many."""
    return settings(max_examples=examples * (150 if HOUR else 1), derandomize=not HOUR, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def gpt2(vocabulary):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary))
        return GPT2Tokenizer()


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5).map(repr)
ids = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
                   lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3), max_leaves=5)
