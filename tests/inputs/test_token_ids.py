"""What the decode of each tokenizer takes."""
import numpy as np
import pytest
import torch

from hf_tokenizers import save_tokenizer
from models import save_meta
from sampling.inputs.char_tokenizer import CharTokenizer
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer

TEXT = "hello world"


@pytest.fixture(params=["characters", "gpt2", "huggingface"])
def tokenizer(request, tmp_path, gpt2_encoding):
    """A tokenizer of each kind."""
    if request.param == "gpt2":
        return GPT2Tokenizer()
    if request.param == "characters":
        save_meta(tmp_path / "meta.pkl")
        return CharTokenizer(tmp_path / "meta.pkl")
    save_tokenizer("byte-level", tmp_path)
    return HFTokenizer(tmp_path / "tokenizer.json", 10**6)


def test_lists_and_tensors_are_decoded_alike(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert type(ids) is list and all(type(i) is int for i in ids)
    unknown = [*ids, 50_300] # beyond each vocabulary
    for convert in list, tuple, torch.tensor, np.array, lambda ids: torch.tensor([ids])[0], lambda ids: np.array(ids, dtype=np.uint16):
        assert tokenizer.decode(convert(ids)) == TEXT, convert
        assert tokenizer.decode(convert(unknown)) == TEXT + "\ufffd", convert


def test_no_ids_are_no_text(tokenizer):
    assert [tokenizer.decode(convert([])) for convert in (list, torch.tensor, np.array)] == [""] * 3


def test_other_dimensions_are_refused(tokenizer):
    for ids, num_dims in (torch.ones(1, 2, dtype=torch.long), 2), (np.ones((1, 2), dtype=int), 2), (torch.tensor(1), 0):
        with pytest.raises(ValueError, match=f"decode takes the ids of one text, in one dimension; got {num_dims} dimensions"):
            tokenizer.decode(ids)
