"""load_tokenizer finds the tokenizer of a checkpoint, or uses the one that the user names."""
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from hf_tokenizers import gpt2_tokenizer_json, random_texts, save_tokenizer
from models import CHARS, cached_snapshot, save_meta
from project import GPT2_FILES
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.inputs.tokenizer_choice import TiktokenTokenizer, load_encoding, load_tokenizer
from sampling.model import GPTConfig


def load(vocab_size, folder="out", name=None, is_huggingface=False, **settings):
    """The tokenizer of a checkpoint in this folder, whose training had these settings.

    name: that of the user.
    """
    config = GPTConfig(vocab_size=vocab_size)
    checkpoint = Checkpoint("ckpt.pt", config, {}, Path(folder), is_huggingface=is_huggingface,
                            raw_config=settings)
    return load_tokenizer(checkpoint, name)


def save_pickle(path, content):
    Path(path).write_bytes(pickle.dumps(content))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, gpt2_encoding):
    """The working directory. cl100k_base is a small encoding, since the real one is not here."""
    monkeypatch.chdir(tmp_path)
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding(
        "small", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|x|>": 100276})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", encoding)
    return tmp_path


@pytest.mark.parametrize("is_huggingface", [False, True])
@pytest.mark.parametrize("dataset", [None, 5, "x" * 100_000, "a\0b"])
def test_gpt2s_encoding_is_used_unnamed_for_gpt2s_vocabulary_alone(
        dataset, is_huggingface, here, messages):
    training = dict(dataset=dataset, is_huggingface=is_huggingface)
    for vocab_size in 50257, 50258, 50304, 51200:
        assert load(vocab_size, **training).encode("Hello") == [15496]
        assert messages.pop() == "GPT-2's encoding: 50257 tokens"
    for vocab_size in 61, 50256, 50305, 65536:
        message = f"^no tokenizer of this model is in {here}/out.* model has {vocab_size}; pass"
        with pytest.raises(ValueError, match=message):
            load(vocab_size, **training)
    line = "ckpt.pt has no tokenizer of its own: using GPT-2's encoding"
    assert messages == ([line] * 4 if is_huggingface else [])


def test_the_first_folder_with_a_tokenizer_has_it(here):
    """The likelier files are written later, so each wins over those before it."""
    out = here / "project" / "out"
    beside = here / "project" / "data" / "letters"
    letters = Path("data", "letters")

    def source(vocab_size, **settings):
        return load(vocab_size, out, dataset="letters", **settings).source
    for folder in beside, out:
        size = save_tokenizer("byte-level", folder)
        assert source(size) == str(folder / "tokenizer.json")
    for folder in beside, letters, out:
        save_meta(folder / "meta.pkl")
        assert source(len(CHARS)) == str(folder / "meta.pkl")
    assert source(size, is_huggingface=True) == str(out / "tokenizer.json")
    save_pickle(out / "meta.pkl", {"vocab_size": 50257}) # for GPT-2's tokens
    assert source(len(CHARS)) == str(letters / "meta.pkl")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "link").symlink_to(out)
    (letters / "meta.pkl").unlink()
    linked = load(len(CHARS), here / "elsewhere" / "link", dataset="letters")
    assert linked.source == str(beside / "meta.pkl")
    (here / "project" / "model.py").write_text("import torch")
    nested = load(len(CHARS), out / "runs" / "one", dataset="letters")
    assert nested.source == str(beside / "meta.pkl")


def test_a_meta_pkl_that_differs_from_that_of_the_data_set_is_an_error_that_names_both(here):
    for path, chars in ("out/meta.pkl", CHARS), ("data/letters/meta.pkl", CHARS[::-1]):
        save_meta(Path(path), chars)
    with pytest.raises(ValueError, match=r"^out/meta\.pkl and data/letters/meta\.pkl .*differ"):
        load(len(CHARS), dataset="letters")
    assert load(len(CHARS), name="out/meta.pkl").source == "out/meta.pkl"


@pytest.mark.parametrize("files, vocab_size, source, line", [
    # The library adds five special tokens.
    ({"vocab.txt": "a\nb"}, 50304, "GPT-2's encoding",
     "not used: data/d/vocab.txt has 7 tokens, but the model has 50304; to use another, pass"),
    ({"vocab.json": '{"the": 10}'}, 50257, "GPT-2's encoding",
     "not used: cannot read data/d/merges.txt: it is missing"),
    ({"tokenizer.model": ""}, 50257, "GPT-2's encoding", "not used: data/d has tokenizer.model"),
    ({"vocab.txt": "\n".join(map(str, range(50250)))}, 50304, "data/d/vocab.txt",
     "using data/d/vocab.txt; for GPT-2's encoding, pass tokenizer=gpt2"),
    ({"vocab.txt": "\n".join(map(str, range(1020)))}, 1024, "data/d/vocab.txt", ""),
    ({"vocab.txt": "a\nb"}, 1025, None, "not used: data/d/vocab.txt has 7 tokens"),
])
def test_a_tokenizer_beside_the_data_counts_only_if_its_size_is_that_of_the_model(
        files, vocab_size, source, line, messages):
    folder = Path("data/d")
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    if source:
        assert load(vocab_size, dataset="d").source == source
    else:
        with pytest.raises(ValueError, match=f"has {vocab_size}; pass"):
            load(vocab_size, dataset="d")
    assert messages[0].startswith(line)


def test_a_model_may_lack_tokens_of_the_tokenizer_in_its_hugging_face_folder(here, messages):
    size = save_tokenizer("byte-level", here / "out")
    tokenizer = load(size - 3, is_huggingface=True)
    assert f"has {size} tokens, but the model has {size - 3}: a prompt with" in messages[0]
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
    last = tokenizer.decode([size - 1])
    with pytest.raises(ValueError, match=r"token of .*/tokenizer.json that the model"):
        tokenizer.encode(last)


def test_nothing_is_read_outside_of_the_data_folder(here):
    (here / "data" / "a").mkdir(parents=True)
    elsewhere = here / "elsewhere"
    save_meta(elsewhere / "meta.pkl")
    (elsewhere / "tokenizer_config.json").write_text('{"tokenizer_class": "Secret"}')
    for dataset in "../elsewhere", "a/../../elsewhere", str(elsewhere):
        with pytest.raises(ValueError, match=r"^no tokenizer of this model is in (?!.*elsewhere)"):
            load(len(CHARS), here / "project" / "out", dataset=dataset)


@pytest.mark.parametrize("meta, error", [
    ({"tokenizer": "tiktoken", "tiktoken_encoding": "cl100k_base", "itos": {0: "!"}}, None),
    ({"tokenizer": "tiktoken", "tiktoken_encoding": "my_own"}, "tiktoken_encoding is 'my_own'"),
    ({"tokenizer": "sentencepiece", "stoi": {"a": 0}}, "tokenizer is 'sentencepiece'"),
    ({"tiktoken_encoding": "cl100k_base", "has_additional_tokens": True},
     "has_additional_tokens is True"),
    ({"tokenizer": {"type": "bpe"}, "stoi": {"a": 0}}, "tokenizer is dict"),
    ({"tokenizer": 10**5000}, "tokenizer is int"),
], ids=range(6))
def test_a_tokenizer_that_is_named_is_believed(meta, error):
    message = f"needs a tokenizer that cannot be read: {error}; pass tokenizer"
    # In the file, and in the checkpoint.
    for content, settings in (meta, {}), ({"vocab_size": 100277}, meta):
        save_pickle("meta.pkl", content)
        if error:
            with pytest.raises(ValueError, match=message):
                load(100277, ".", **settings)
        else:
            assert load(100277, ".", **settings).source == "tiktoken's cl100k_base"


@pytest.mark.parametrize("name, vocab_size, source", [
    ("gpt2", 65536, "GPT-2's encoding"),
    ("cl100k_base", 100352, "tiktoken's cl100k_base"),
    ("words", 75, "words/tokenizer.json"),
    ("words/tokenizer.json", 75, "words/tokenizer.json"),
    ("other", 64, "other/meta.pkl"),
])
def test_a_named_tokenizer_wins_over_what_is_found(name, vocab_size, source):
    for folder in "out", "other":
        save_meta(Path(folder, "meta.pkl"))
    save_tokenizer("words", Path("words"))
    tokenizer = load(vocab_size, name=name)
    assert tokenizer.source == source
    ids = tokenizer.encode("world")
    for same in ids, torch.tensor(ids), np.array(ids, np.uint16):
        assert tokenizer.decode(same) == "world"
    for wrong in [1.5], "12", torch.tensor([1.0]), np.array([0.5]):
        with pytest.raises(TypeError):
            tokenizer.decode(wrong)


@pytest.mark.parametrize("name, vocab_size, message", [
    (None, 60, f"out/meta.pkl has {len(CHARS)} tokens, but the model has 60, "
     "so it is not the tokenizer of this model"),
    ("cl100k_base", 100276, "cl100k_base has 100277 tokens, but the model has 100276"),
    ("gpt2", 50256, "50257 tokens"),
    ("GPT2", 50257, "there is no tokenizer 'GPT2'; did you mean gpt2.; pass tokenizer=NAME"),
    ("empty", 50257, "there is no tokenizer 'empty'"),
    ("bare.pkl", 50257, r"cannot read bare\.pkl: its stoi is not a dict, but None"),
    ("small.pkl", 50304, r"cannot read small\.pkl: its stoi is not a dict, but None"),
])
def test_what_is_no_tokenizer_of_this_model_is_an_error(name, vocab_size, message):
    Path("empty").mkdir()
    save_meta(Path("out", "meta.pkl"))
    save_pickle("bare.pkl", {"vocab_size": 50257})
    save_pickle("small.pkl", {"vocab_size": 50})
    with pytest.raises(ValueError, match=message):
        load(vocab_size, name=name)


@pytest.mark.parametrize("name, vocab_size, warning", [
    (None, 122, ""),
    (None, 123, "meta.pkl has 61 tokens, but the model has 123; the rest may be padding"),
    (None, 50304, "the rest may be padding; if it is not, pass tokenizer="),
    ("gpt2", 65536, ""),
    ("gpt2", 200_000, "GPT-2's encoding has 50257 tokens, but the model has 200000"),
])
def test_a_padded_vocabulary_gets_a_warning_if_it_is_mostly_padding(
        name, vocab_size, warning, messages):
    save_meta(Path("out", "meta.pkl"))
    load(vocab_size, name=name)
    *warnings, _ = messages
    assert len(warnings) == bool(warning)
    assert warning in messages[0]


# ---- tiktoken's encodings, and where their vocabularies come from

@pytest.fixture
def leave_hub_cache(tmp_path, monkeypatch):
    """leave_hub_cache(repository, tokenizer) leaves this one in Hugging Face's cache.

    There is none in tiktoken's, and no network.
    """
    def read_file(url):
        raise ConnectionError("no network")

    def leave(repository, tokenizer):
        monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
        monkeypatch.setattr("tiktoken.load.read_file", read_file)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        (cached_snapshot(tmp_path, repository) / "tokenizer.json").write_text(tokenizer)
    return leave


def test_text_is_encoded_as_by_gpt2():
    tokenizer = TiktokenTokenizer()
    assert tokenizer.encode("Hello world<|endoftext|>") == [15496, 995, 50256]
    # 222 is no character.
    text = tokenizer.decode([15496, 50257, 50303, 995, 222])
    assert text == "Hello\ufffd\ufffd world\ufffd"
    for prompt, message in [
            ("a\udcff", "not valid UTF-8 at character 2"),
            (f"a{' ' * 3_000_000}b", "Regex error.*; mostly because of a million blanks in a row")]:
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(prompt)


def test_hugging_faces_cache_has_the_same_encoding_and_is_before_downloads(
        leave_hub_cache, tiktoken_cache, messages):
    theirs = TiktokenTokenizer()
    leave_hub_cache("openai-community--gpt2", gpt2_tokenizer_json(tiktoken_cache))
    ours = load_encoding("gpt2")
    assert load_encoding("r50k_base").source == ours.source # another name of it
    assert messages == []
    assert ours.size == theirs.size
    for i in range(0, 50304, 7):
        assert ours.decode([i]) == theirs.decode([i])
    for text in random_texts("gpt2", 300):
        text += " \n\n a'll 123'S"
        assert ours.encode(text) == theirs.encode(text)


def test_each_failure_is_said_once_and_the_error_says_what_to_get(
        here, leave_hub_cache, tiktoken_cache, messages, monkeypatch):
    leave_hub_cache("gpt2", "{}")
    with pytest.raises(ValueError, match="set TIKTOKEN_CACHE_DIR to that folder") as error:
        load_encoding("gpt2")
    assert [line.split(": ")[1] for line in messages] == [
        "tokenizer.json in Hugging Face's cache failed (RejectedFileError",
        "tiktoken's download failed (ConnectionError",
        "the download from Hugging Face's hub failed (LocalEntryNotFoundError"]
    assert "it has no model" in messages[0]
    assert messages[1].endswith(": no network)")
    for name, cached_name in GPT2_FILES.items():
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        assert url in str(error.value)
        assert cached_name in str(error.value)
        shutil.copy(tiktoken_cache / cached_name, here) # as the message says
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(here))
    assert load_encoding("gpt2").encode("Hello") == [15496]


def test_a_damaged_file_of_tiktokens_cache_is_named_and_the_hubs_copy_used(
        here, leave_hub_cache, tiktoken_cache, messages):
    leave_hub_cache("gpt2", gpt2_tokenizer_json(tiktoken_cache))
    (here / "empty").mkdir()
    for name in GPT2_FILES.values():
        content = (tiktoken_cache / name).read_bytes()
        (here / "empty" / name).write_bytes(content.replace(b"\n", b"\r\n"))
    damaged = here / "empty" / GPT2_FILES["vocab.bpe"]
    assert load_encoding("gpt2").encode("Hello world") == [15496, 995]
    assert messages == [f"{damaged}, a file of GPT-2's encoding, is damaged: delete it"]
    assert damaged.exists()
