"""GPT-2's byte-pair encoding and tiktoken's others, and where their vocabularies come from."""
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

from sampling.inputs.hf_tokenizer import HFTokenizer
from sampling.inputs.tokenizer import ENCODINGS, REPLACEMENT, Tokenizer, call_library, encode_utf8
from sampling.process import first_sentence

logger = logging.getLogger(__name__)
HOST = "https://openaipublic.blob.core.windows.net"
GPT2_URLS = f"{HOST}/gpt-2/encodings/main/vocab.bpe", f"{HOST}/gpt-2/encodings/main/encoder.json"


class TiktokenTokenizer(Tokenizer):
    """tiktoken's encoding of this name. <|endoftext|> in a text becomes the special token."""
    def __init__(self, name: str = "gpt2"):
        from tiktoken import get_encoding
        self.source, self.size, self.encoding = encoding_label(name), ENCODINGS[name], get_encoding(name)

    def encode(self, text: str) -> list[int]:
        encode_utf8(text) # which checks it
        return call_library(
            lambda: self.encoding.encode(text, allowed_special={"<|endoftext|>"}, disallowed_special=()),
            "; mostly because of a million blanks in a row: shorten them")

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return REPLACEMENT.encode()


def encoding_label(name: str) -> str:
    return "GPT-2's encoding" if name == "gpt2" else f"tiktoken's {name}"


def load_encoding(name: str) -> Tokenizer:
    """tiktoken's encoding of this name. Logs why a source of it failed. Raises ValueError if all do."""
    name = "gpt2" if name == "r50k_base" else name # two names of one encoding
    urls = GPT2_URLS if name == "gpt2" else [f"{HOST}/encodings/{name}.tiktoken"]
    files = [hashlib.sha1(url.encode()).hexdigest() for url in urls] # tiktoken's names for them
    sources = [("tiktoken's download", lambda: TiktokenTokenizer(name))] # or its cache
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    if name == "gpt2" and not all(os.path.isfile(os.path.join(cache, file)) for file in files):
        sources = [("tokenizer.json in Hugging Face's cache", from_hub_cache), *sources,
                   ("the download from Hugging Face's hub", from_hub)]
    for source, load in sources:
        try:
            if encoding := load():
                return encoding
        except Exception as error:
            logger.info(f"{encoding_label(name)}: {source} failed ({type(error).__name__}: {first_sentence(error)})")
    raise ValueError(
        f"{encoding_label(name)} is not on this machine, and could not be downloaded: elsewhere, get "
        f"{' and '.join(urls)}, save it as {' and '.join(files)}, and set TIKTOKEN_CACHE_DIR to that folder")


def from_hub_cache() -> HFTokenizer | None:
    """GPT-2's encoding from Hugging Face's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    paths = [try_to_load_from_cache(name, "tokenizer.json") for name in ("openai-community/gpt2", "gpt2")]
    return next((HFTokenizer(Path(path), ENCODINGS["gpt2"]) for path in paths if isinstance(path, str)), None)


def from_hub() -> HFTokenizer:
    """GPT-2's encoding from Hugging Face's hub, or from the mirror that HF_ENDPOINT names."""
    from huggingface_hub import constants, hf_hub_download, hf_hub_url
    file = "openai-community/gpt2", "tokenizer.json"
    if not constants.HF_HUB_OFFLINE: # a hub that does not answer is asked once, not six times
        urlopen(Request(hf_hub_url(*file), method="HEAD"), timeout=10).close()
    return HFTokenizer(Path(hf_hub_download(*file)), ENCODINGS["gpt2"])
