"""GPT-2's byte-pair encoding and tiktoken's others, and where their vocabularies come from."""
import hashlib
import json
import os
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

from sampling.checkpoints.checkpoint import first_sentence, read_json
from sampling.inputs.tokenizer import ENCODINGS, REPLACEMENT, ByteDecodingTokenizer, require_unicode
from sampling.messages import Log, warn

HOST = "https://openaipublic.blob.core.windows.net"
GPT2_URLS = f"{HOST}/gpt-2/encodings/main/vocab.bpe", f"{HOST}/gpt-2/encodings/main/encoder.json"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT2_SHA256 = "855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2" # of the vocabulary in a tokenizer.json


class TiktokenTokenizer(ByteDecodingTokenizer):
    """GPT-2's byte-pair encoding, or tiktoken's of this name. <|endoftext|> in a text becomes the special token."""
    joins_spaces = True

    def __init__(self, name: str = "gpt2", log: Log = warn):
        self.source, self.size = encoding_label(name), ENCODINGS[name]
        self.encoding = load_encoding(name, log)

    def encode(self, text: str) -> list[int]:
        require_unicode(text)
        return self.encoding.encode(text, allowed_special={"<|endoftext|>"}, disallowed_special=())

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return REPLACEMENT.encode()


def encoding_label(name: str) -> str:
    return "GPT-2's encoding" if name == "gpt2" else f"tiktoken's {name}"


def load_encoding(name: str, log: Log):
    """tiktoken's encoding of this name. Logs why a source of its vocabulary failed. Raises ValueError if all do."""
    from tiktoken import get_encoding
    is_gpt2 = name in ("gpt2", "r50k_base") # two names of one encoding
    urls = GPT2_URLS if is_gpt2 else [f"{HOST}/encodings/{name}.tiktoken"]
    files = [hashlib.sha1(url.encode()).hexdigest() for url in urls] # tiktoken's names for them
    sources = [("tiktoken's download", lambda: get_encoding("gpt2" if is_gpt2 else name))] # or its cache
    if is_gpt2:
        hub_cache = "tokenizer.json in Hugging Face's cache", from_hub_cache
        cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "data-gym-cache")
        is_cached = all(os.path.isfile(os.path.join(cache, file)) for file in files) # importing the hub takes 0.1 s
        sources = [*sources, hub_cache] if is_cached else [hub_cache, *sources]
        sources.append(("the download from Hugging Face's hub", from_hub))
    for source, load in sources:
        try:
            if encoding := load():
                return encoding
        except Exception as error:
            log(f"{encoding_label(name)}: {source} failed ({type(error).__name__}: {first_sentence(error)})")
    raise ValueError(
        f"{encoding_label(name)} is not on this machine, and could not be downloaded: on a machine with internet "
        f"access, get {' and '.join(urls)}, save {'them' if is_gpt2 else 'it'} as {' and '.join(files)} in a folder "
        "here, and set TIKTOKEN_CACHE_DIR to that folder")


def from_hub_cache():
    """GPT-2's encoding from Hugging Face's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    for repository in "openai-community/gpt2", "gpt2": # its name, and its older one
        if isinstance(path := try_to_load_from_cache(repository, "tokenizer.json"), str):
            return from_json(path)
    return None


def from_hub():
    """GPT-2's encoding from Hugging Face's hub, or from the mirror that HF_ENDPOINT names."""
    from huggingface_hub import constants, hf_hub_download, hf_hub_url
    file = "openai-community/gpt2", "tokenizer.json"
    if not constants.HF_HUB_OFFLINE: # a hub that does not answer is asked once, not six times
        urlopen(Request(hf_hub_url(*file), method="HEAD"), timeout=10).close()
    return from_json(hf_hub_download(*file))


def from_json(path: str | os.PathLike):
    """GPT-2's encoding from its tokenizer.json. Raises ValueError if the file has another vocabulary."""
    import tiktoken
    vocab = read_json(Path(path))["model"]["vocab"]
    if hashlib.sha256(json.dumps(vocab, sort_keys=True).encode()).hexdigest() != GPT2_SHA256:
        raise ValueError(f"{path} does not have GPT-2's vocabulary")
    # Each character of a token represents a byte: a printable one itself, any other one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    end = "<|endoftext|>"
    ranks = {bytes(byte_of[char] for char in token): i for token, i in vocab.items() if token != end}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={end: vocab[end]})
