"""Chooses the tokenizer of a checkpoint, and the source of tiktoken's vocabularies.

Each is the first of a list of places that has one. Raises ValueError if none has.
"""
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from sampling.checkpoints.checkpoint import Checkpoint
from sampling.checkpoints.finding import code_folders
from sampling.checkpoints.untrusted_files import is_inside, require
from sampling.inputs.char_tokenizer import CharTokenizer, named_encoding, read_meta
from sampling.inputs.hf_tokenizer import HFTokenizer, find_tokenizer
from sampling.inputs.tokenizer import ADVICE, ENCODINGS, Tokenizer, call_library, encode_utf8
from sampling.values import first_sentence, suggest

logger = logging.getLogger(__name__)
# The sizes to which people pad GPT-2's vocabulary: nobody names its encoding.
GPT2_SIZES = {*range(50257, 50305), 51200}
HOST = "https://openaipublic.blob.core.windows.net"
GPT2_FILES = { # URL -> SHA-256
    f"{HOST}/gpt-2/encodings/main/vocab.bpe":
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{HOST}/gpt-2/encodings/main/encoder.json":
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None) -> Tokenizer:
    """Load the tokenizer that is surely the model's.

    tokenizer: the setting, which names an encoding of tiktoken or a file. Without it, the first of:
    a meta.pkl, then a Hugging Face tokenizer, in the folder of the checkpoint, and for a ckpt.pt
    also in data/<dataset> here and where the code of its clone may lie; the encoding that the
    training's settings name; GPT-2's, if the vocabulary has its size. All files meta.pkl must be
    equal. In data/<dataset>, a Hugging Face tokenizer must have the size of the model.
    """
    vocab_size = checkpoint.config.vocab_size
    found = tokenizer_named(tokenizer, vocab_size) if tokenizer else tokenizer_of(checkpoint)
    if isinstance(found, str): # an encoding
        # Its size is checked first, because loading may download it.
        check_size(encoding_label(found), ENCODINGS[found], vocab_size)
        found = load_encoding(found)
    else:
        is_own = checkpoint.is_huggingface and not tokenizer
        check_size(found.source, found.size, vocab_size, is_own)
    logger.info(f"{found.source}: {found.size} tokens")
    return found


def check_size(source: str, size: int, vocab_size: int, is_own: bool = False) -> None:
    """Raises ValueError if a tokenizer is too large for a model. Warns if it is much smaller, or
    too large, but in the folder of the Hugging Face model: transformers uses it.
    """
    sizes = f"{source} has {size} tokens, but the model has {vocab_size}"
    if size > vocab_size and is_own:
        logger.warning(f"{sizes}: a prompt with one of the others will be an error")
    elif size > vocab_size:
        raise ValueError(f"{sizes}, so it is not the tokenizer of this model; {ADVICE}")
    if vocab_size > 2 * size:
        logger.warning(f"{sizes}; the rest may be padding; if it is not, {ADVICE}")


def tokenizer_named(name: str, vocab_size: int) -> Tokenizer | str:
    """The tokenizer in the file that the setting names, or the name of an encoding."""
    if name in ENCODINGS:
        return name
    path = Path(name)
    if path.is_dir():
        path = find_tokenizer(path) or path / "meta.pkl"
    if path.is_file() and path.suffix == ".pkl":
        # CharTokenizer says that it has no stoi.
        return tokenizer_in(path) or CharTokenizer(path, read_meta(path))
    if path.is_file() and (path.suffix == ".json" or path.name == "vocab.txt"):
        return HFTokenizer(path, vocab_size)
    raise ValueError(f"there is no tokenizer {name!r:.200}{suggest(name, ENCODINGS)}; {ADVICE}")


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | str:
    """The tokenizer in the first place that has one, or the name of an encoding."""
    vocab_size = checkpoint.config.vocab_size
    own, *others = folders = tokenizer_folders(checkpoint)
    metas = []
    if not checkpoint.is_huggingface:
        metas = [folder / "meta.pkl" for folder in folders if os.path.isfile(folder / "meta.pkl")]
    found = None
    for path in metas:
        meta = tokenizer_in(path)
        if found and meta and getattr(found, "itos", found) != getattr(meta, "itos", meta):
            raise ValueError(f"{' and '.join(map(str, metas))} differ; nanoGPT uses that in data; "
                             "pass as tokenizer the one that the model was trained with")
        found = found or meta
    if found:
        return found
    if path := find_tokenizer(own):
        return HFTokenizer(path, vocab_size)
    try: # in the folders of the data set, where nanoGPT has none
        for path in filter(None, map(find_tokenizer, others)):
            found = HFTokenizer(path, vocab_size)
            # The model may be padded to a multiple of a number up to 1024.
            require(0 <= vocab_size - found.size <= -found.size % 1024,
                    f"{path} has {found.size} tokens, but the model has {vocab_size}")
            if vocab_size in GPT2_SIZES:
                logger.warning(f"using {path}; for GPT-2's encoding, pass tokenizer=gpt2")
            return found
    except ValueError as error:
        logger.warning(f"not used: {error}; to use another, pass tokenizer=FILE")
    if encoding := named_encoding(checkpoint.raw_config, checkpoint.path):
        return encoding
    if vocab_size not in GPT2_SIZES:
        searched = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
        raise ValueError(f"no tokenizer of this model is in {searched:.1000}, and GPT-2's encoding "
                         f"has 50257 tokens, but the model has {vocab_size}; {ADVICE}")
    if checkpoint.is_huggingface:
        logger.info(f"{checkpoint.path} has no tokenizer of its own: using GPT-2's encoding")
    return "gpt2"


def tokenizer_folders(checkpoint: Checkpoint) -> list[Path]:
    """The folders that may have the tokenizer of a checkpoint, the likeliest first."""
    own = checkpoint.folder
    dataset = checkpoint.raw_config.get("dataset") # a stranger's, and of any type
    if checkpoint.is_huggingface or not is_inside(dataset): # never outside of data
        return [own]
    places = Path(), *code_folders(own / "ckpt.pt")
    return [own, *(place / "data" / dataset for place in places)]


def tokenizer_in(path: Path) -> Tokenizer | str | None:
    """The tokenizer in a meta.pkl, or the encoding that it names; None if it has neither."""
    meta = read_meta(path)
    if encoding := named_encoding(meta, path):
        return encoding
    size = meta.get("vocab_size") # for GPT-2's tokens, a meta.pkl may have nothing else
    is_large = isinstance(size, int) and size >= min(ENCODINGS.values())
    if is_large and not {"stoi", "itos"} & meta.keys():
        return None
    return CharTokenizer(path, meta)


# ---- tiktoken's encodings

class TiktokenTokenizer(Tokenizer):
    """tiktoken's encoding of this name. <|endoftext|> in a text becomes the special token."""
    def __init__(self, name: str = "gpt2"):
        from tiktoken import get_encoding
        self.source = encoding_label(name)
        self.size = ENCODINGS[name]
        self.encoding = get_encoding(name)

    def encode(self, text: str) -> list[int]:
        encode_utf8(text) # which checks it
        special = {"<|endoftext|>"}
        return call_library(
            lambda: self.encoding.encode(text, allowed_special=special, disallowed_special=()),
            "; mostly because of a million blanks in a row: shorten them")

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return super().token_bytes(token_id)


def encoding_label(name: str) -> str:
    return "GPT-2's encoding" if name == "gpt2" else f"tiktoken's {name}"


def load_encoding(name: str) -> Tokenizer:
    """tiktoken's encoding of this name. Logs why a source of it failed."""
    if name == "r50k_base": # another name of GPT-2's encoding
        name = "gpt2"
    urls = [*GPT2_FILES] if name == "gpt2" else [f"{HOST}/encodings/{name}.tiktoken"]
    files = [hashlib.sha1(url.encode()).hexdigest() for url in urls] # tiktoken's names for them
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or f"{tempfile.gettempdir()}/data-gym-cache")
    sources = {"tiktoken's download": lambda: TiktokenTokenizer(name)} # or its cache
    if name == "gpt2" and not all(map(is_whole, map(cache.joinpath, files), GPT2_FILES.values())):
        sources = {
            "tokenizer.json in Hugging Face's cache": from_hub_cache,
            **sources,
            "the download from Hugging Face's hub": from_hub}
    for source, load in sources.items():
        try:
            if encoding := load():
                return encoding
        except Exception as error:
            reason = f"{type(error).__name__}: {first_sentence(error)}"
            logger.info(f"{encoding_label(name)}: {source} failed ({reason})")
    raise ValueError(
        f"{encoding_label(name)} is not on this machine, and could not be downloaded: elsewhere, "
        f"get {' and '.join(urls)}, save it as {' and '.join(files)}, "
        "and set TIKTOKEN_CACHE_DIR to that folder")


def is_whole(path: Path, sha256: str) -> bool:
    """Whether a file is in tiktoken's cache, and undamaged: tiktoken deletes a damaged one."""
    found = os.path.isfile(path) and hashlib.sha256(path.read_bytes()).hexdigest()
    if found not in (False, sha256):
        logger.warning(f"{path}, a file of GPT-2's encoding, is damaged: delete it")
    return found == sha256


def from_hub_cache() -> HFTokenizer | None:
    """GPT-2's encoding from Hugging Face's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    for name in "openai-community/gpt2", "gpt2":
        path = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(path, str):
            return HFTokenizer(Path(path), ENCODINGS["gpt2"])
    return None


def from_hub() -> HFTokenizer:
    """GPT-2's encoding from Hugging Face's hub, or from the mirror that HF_ENDPOINT names."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    file = ("openai-community/gpt2", "tokenizer.json")
    if not constants.HF_HUB_OFFLINE: # a hub that does not answer is asked once, not six times
        get_hf_file_metadata(hf_hub_url(*file))
    return HFTokenizer(Path(hf_hub_download(*file)), ENCODINGS["gpt2"])
