"""Random settings, prompts, tokens and batches: each is read correctly, or is a one-line error."""
import pickle

import pytest

from engines import TOKENIZER
from models import CHARS
from sampling.inputs.char_tokenizer import CharTokenizer, read_meta
from sampling.inputs.tokenizer_choice import TiktokenTokenizer

pytestmark = pytest.mark.slow


@pytest.fixture
def fuzz(request):
    """The module fuzz. hypothesis, which it imports, takes two seconds."""
    from hypothesis import HealthCheck, settings
    num_new = request.config.getoption("--examples")
    settings.register_profile(
        "ours", max_examples=num_new or 60, derandomize=not num_new, deadline=None, database=None,
        suppress_health_check=[*HealthCheck])
    settings.load_profile("ours") # before the import
    import fuzz
    return fuzz


def test_any_arguments_and_any_settings_file_give_settings_or_a_one_line_error(fuzz, tmp_path):
    fuzz.check_settings_or_error(tmp_path)


@pytest.fixture
def tokenizers(tmp_path, gpt2_encoding):
    """They have characters, overlapping special tokens, and the bytes of GPT-2's encoding."""
    symbols = ["a", "b", "<a>", "", "<b>", "<a|", "<<a>>", "<a>b>"]
    path = tmp_path / "special.pkl"
    path.write_bytes(pickle.dumps({"stoi": {"a": 0, "b": 1}, "itos": symbols}))
    return [(TOKENIZER, len(CHARS)), (CharTokenizer(path, read_meta(path)), len(symbols)),
            (TiktokenTokenizer(), 300)]


@pytest.mark.usefixtures("recordings")
def test_samples_in_batches_equal_samples_generated_alone(fuzz, tokenizers):
    fuzz.check_batches(tokenizers)
