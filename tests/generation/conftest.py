"""Fixtures for the tests of generation."""
import pytest

from models import save_meta
from sampling.inputs.char_tokenizer import CharTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer with one token per character."""
    save_meta(path := tmp_path_factory.mktemp("vocabulary") / "meta.pkl")
    return CharTokenizer(path)
