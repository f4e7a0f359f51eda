"""Chooses the tokenizer of a checkpoint: a list of places in order, and the first that is there."""
import logging
import os
from itertools import chain
from pathlib import Path

from sampling.checkpoints.build import Checkpoint
from sampling.configurator import suggest
from sampling.inputs.char_tokenizer import CharTokenizer, named_encoding, read_meta
from sampling.inputs.hf_tokenizer import HFTokenizer, find_tokenizer
from sampling.inputs.tiktoken_tokenizer import encoding_label, load_encoding
from sampling.inputs.tokenizer import ADVICE, ENCODINGS, Tokenizer

logger = logging.getLogger(__name__)
GPT2_SIZES = {*range(50257, 50305), 51200} # to which people pad its vocabulary: nobody names GPT-2's encoding


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model. Raises ValueError if none is surely the model's, or if it cannot be loaded.

    tokenizer: the setting, which names an encoding of tiktoken or a file. Without it, the first of: a meta.pkl, then a
    Hugging Face tokenizer, in the folder of the checkpoint, and for a ckpt.pt also in data/<dataset> here and beside
    out_dir; the encoding that the training's settings name; GPT-2's, if the vocabulary has its size.
    """
    vocab_size = checkpoint.config.vocab_size
    found = tokenizer_of(checkpoint) if tokenizer is None else tokenizer_named(tokenizer, vocab_size)
    is_name = isinstance(found, str) # of an encoding, whose size is checked first, because loading may download it
    source, size = (encoding_label(found), ENCODINGS[found]) if is_name else (found.source, found.size)
    if size > vocab_size:
        raise ValueError(f"{source} has {size} tokens, but the model has {vocab_size}, so it is not the tokenizer of "
                         f"this model; {ADVICE}")
    if vocab_size > 2 * size:
        advice = "; if the model was trained on GPT-2's tokens, pass --tokenizer=gpt2" * (vocab_size in GPT2_SIZES)
        logger.warning(f"{source} has {size} tokens, but the model has {vocab_size}; the rest may be padding{advice}")
    found = load_encoding(found) if is_name else found
    logger.info(f"{found.source}: {size} tokens")
    return found


def tokenizer_named(name: str, vocab_size: int) -> Tokenizer | str:
    """The tokenizer in the file that the setting names, or the name of an encoding."""
    if name in ENCODINGS:
        return name
    given = Path(name)
    path = find_tokenizer(given) or given / "meta.pkl" if given.is_dir() else given
    if not (path.is_file() and (path.suffix in (".json", ".pkl") or path.name == "vocab.txt")):
        raise ValueError(f"there is no tokenizer {name!r:.200}{suggest(name, ENCODINGS)}; {ADVICE}")
    return tokenizer_in(path, vocab_size) or CharTokenizer(path) # which says that a meta.pkl has no stoi


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | str:
    """The tokenizer in the first place that has one, or the name of an encoding."""
    own, dataset = Path(checkpoint.folder), checkpoint.raw_config.get("dataset") # a stranger's, and of any type
    folders, vocab_size = [own], checkpoint.config.vocab_size
    is_named = not checkpoint.is_huggingface and isinstance(dataset, str)
    if is_named and not Path(dataset).anchor and ".." not in Path(dataset).parts: # never outside of data
        folders += [Path("data", dataset), Path(os.path.abspath(own)).parent / "data" / dataset]
    metas = [] if checkpoint.is_huggingface else [folder / "meta.pkl" for folder in folders]
    for path in chain(filter(os.path.isfile, metas), filter(None, map(find_tokenizer, folders))):
        if found := tokenizer_in(path, vocab_size):
            return found
    if encoding := named_encoding(checkpoint.raw_config, checkpoint.path):
        return encoding
    if vocab_size not in GPT2_SIZES:
        searched = ", ".join(dict.fromkeys(map(os.path.abspath, folders)))
        is_outside = is_named and len(folders) == 1 # of data: nanoGPT would open it
        advice = (f"if you trust the checkpoint, pass --tokenizer={Path('data', dataset, 'meta.pkl')!s:.300}"
                  if is_outside else ADVICE)
        raise ValueError(f"no tokenizer is in {searched:.1000}, and GPT-2's encoding has 50257 tokens, but the model "
                         f"has {vocab_size}; {advice}")
    if checkpoint.is_huggingface:
        logger.info(f"{checkpoint.path} has no tokenizer of its own: using GPT-2's encoding")
    return "gpt2"


def tokenizer_in(path: Path, vocab_size: int) -> Tokenizer | str | None:
    """The tokenizer in a file, or the encoding that the file names; None for a meta.pkl without a vocabulary."""
    if path.suffix != ".pkl":
        return HFTokenizer(path, vocab_size)
    meta = read_meta(path)
    if encoding := named_encoding(meta, path):
        return encoding
    size = meta.get("vocab_size")
    is_large = isinstance(size, int) and size >= min(ENCODINGS.values()) # its whole content may be this
    return None if is_large and not {"stoi", "itos"} & meta.keys() else CharTokenizer(path, meta)
