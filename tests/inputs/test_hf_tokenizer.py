"""The tokenizers of Hugging Face folders, compared with transformers."""
import json
import random

import pytest

from hf_tokenizers import KINDS, random_texts, save_tokenizer
from sampling.generation.detokenizer import IncrementalDetokenizer
from sampling.inputs.hf_tokenizer import HFTokenizer
from sampling.inputs.tokenizer_files import find_tokenizer
from sampling.params import Prompt, Sample, SampleRequest, SamplingParams

COUNTS = [300, pytest.param(5_000, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A tokenizer of each kind, as transformers reads its folder and as we do."""
    from transformers import AutoTokenizer
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(request.param, folder)
    return AutoTokenizer.from_pretrained(folder), HFTokenizer(find_tokenizer(folder), 10**6)


def theirs_encode(theirs, text):
    return theirs(text, add_special_tokens=False).input_ids


def theirs_decode(theirs, ids):
    return theirs.decode(ids, clean_up_tokenization_spaces=False)


def stream(tokenizer, ids, prompt_ids=()):
    """The text of these ids, token by token."""
    decode = tokenizer.incremental_decoder(prompt_ids)
    return "".join(decode(token_id, i == len(ids) - 1) for i, token_id in enumerate(ids))


@pytest.mark.parametrize("count", COUNTS)
def test_texts_are_encoded_and_decoded_as_by_transformers(pair, count):
    theirs, ours = pair
    for text in random_texts(f"texts {count}", count):
        if ids := theirs_encode(theirs, text):
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == stream(ours, ids) == theirs_decode(theirs, ids), text
        else:
            with pytest.raises(ValueError, match="has no tokens"):
                ours.encode(text)


@pytest.mark.parametrize("count", COUNTS)
def test_any_ids_are_decoded_as_by_transformers(pair, count):
    theirs, ours = pair
    rng = random.Random(count)
    for _ in range(count):
        ids = [rng.randrange(ours.size) for _ in range(rng.randrange(1, 30))]
        assert ours.decode(ids) == stream(ours, ids) == theirs_decode(theirs, ids), ids


@pytest.mark.parametrize("count", COUNTS)
def test_a_continuation_is_what_it_adds_to_the_text_of_the_prompt(pair, count):
    """Unless a byte of the continuation belongs to the bytes that end the prompt."""
    theirs, ours = pair
    rng = random.Random(count)
    for text in random_texts(f"prompts {count}", count):
        text += rng.choice(["", "a" * 100, " world" * 40]) + "."
        prompt_ids, ids = ours.encode(text), [rng.randrange(ours.size) for _ in range(rng.randrange(1, 20))]
        if not theirs.convert_ids_to_tokens(ids[:1])[0].startswith("<0x"):
            assert ours.decode(prompt_ids) + stream(ours, ids, prompt_ids) == theirs_decode(theirs, prompt_ids + ids), (text, ids)


def test_unknown_ids_decode_to_replacement_characters(pair):
    ours = pair[1]
    ids = ours.encode("world")
    for unknown in ours.size, 10**6:
        assert ours.decode([*ids, unknown]).endswith("\ufffd") and stream(ours, [*ids, unknown]) == ours.decode([*ids, unknown])


def test_text_that_is_not_valid_unicode_is_refused(pair):
    with pytest.raises(ValueError, match="not valid UTF-8 at character 2"):
        pair[1].encode("a\udcff")


def test_a_special_token_in_a_text_is_one_token_and_comes_back(pair):
    theirs, ours = pair
    special = next(iter(theirs.added_tokens_decoder.values())).content
    ids = ours.encode(f"a{special}")
    assert ids[-1] == theirs.convert_tokens_to_ids(special) and special in ours.decode(ids)


def test_a_special_token_as_the_stop_text_ends_a_sample(pair):
    theirs, ours = pair
    token = next(iter(theirs.added_tokens_decoder.values())).content
    prompt_ids, before, special = ours.encode("world"), ours.encode("world world"), ours.encode(token)[-1]
    sample = Sample(SampleRequest(0, Prompt("world"), prompt_ids))
    detokenizer = IncrementalDetokenizer(sample, ours, SamplingParams(max_new_tokens=50, stop=token))
    for token_id in [*before, special]:
        assert sample.finish_reason is None
        detokenizer.append(token_id)
    text = stream(ours, [*before, special], prompt_ids)
    assert sample.finish_reason == "stop" and sample.text == text[:text.rindex(token)]


def test_a_decoder_of_only_fuse_joins_the_tokens(tmp_path):
    from tokenizers import Tokenizer
    save_tokenizer("byte-level", tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": {"type": "Fuse"}}))
    ours, theirs = HFTokenizer(path, 10**6), Tokenizer.from_file(str(path))
    ids = ours.encode("Hello world, Welt!")
    assert ours.decode(ids) == stream(ours, ids) == theirs.decode(ids, skip_special_tokens=False) and len(ids) > 1


def test_bytes_of_a_character_come_with_the_last_of_them(tmp_path):
    for kind in "byte-level", "byte-fallback":
        save_tokenizer(kind, tmp_path / kind)
        tokenizer = HFTokenizer(find_tokenizer(tmp_path / kind), 10**6)
        ids = tokenizer.encode("🦖")
        decode = tokenizer.incremental_decoder()
        texts = [decode(token_id, i == len(ids) - 1) for i, token_id in enumerate(ids)]
        assert len(ids) > 1 and "".join(texts).strip() == "🦖" and set(texts[:-1]) <= {"", " "}
