"""HFTokenizer: a tokenizer of Hugging Face's tokenizers library, made from a tokenizer.json or from the older files."""
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sampling.checkpoints.errors import first_sentence
from sampling.inputs.token_decoder import REPLACEMENT, DecoderStage, make_decoders
from sampling.inputs.token_ids import IdArray, id_list, require_unicode
from sampling.inputs.tokenizer_files import read_tokenizer
from sampling.inputs.tokenizer_json import check_tokenizer
from sampling.inputs.tokenizer_model import vocab_of

CONTEXT = 32 # the text of the next tokens depends on at most this many tokens at each end of a prompt


class HFTokenizer:
    """The tokenizer whose main file is at path: tokenizer.json, vocab.json or vocab.txt.

    Ids and texts are the same as in transformers with add_special_tokens=False and clean_up_tokenization_spaces=False.
    An added token that a model of vocab_size tokens lacks is plain text. Raises ValueError, which names the file, if
    the tokenizer cannot be read.
    """

    def __init__(self, path: Path, vocab_size: int):
        self.source = str(path)
        try:
            content, self.decoder_configs = check_tokenizer(read_tokenizer(path))
            make_decoders(self.decoder_configs) # raises an error here if they are not supported
            max_id = max(vocab_of(content["model"]).values())
            # Many tokenizers have an added padding token that their model lacks.
            added = [token for token in content["added_tokens"] if token["id"] < max(vocab_size, max_id)]
            self.size = 1 + max([max_id, *(token["id"] for token in added)])
            self.tokenizer = build_tokenizer({**content, "added_tokens": added})
        except (OSError, MemoryError):
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_sentence(error)}"
            is_named = reason.startswith("cannot read ") or os.path.join(path.parent, "") in reason
            raise ValueError(f"{reason:.500}" if is_named else f"cannot read {path}: {reason:.500}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text is not valid Unicode, or cannot be encoded."""
        require_unicode(text)
        try:
            ids = call_library(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids)
        except ValueError as error:
            raise ValueError(f"{self.source} cannot encode the prompt: {error}") from None
        if not ids:
            raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}, but a sample needs at least "
                             "one; pass another --start")
        return ids

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """The text of token ids; invalid UTF-8 bytes decode to U+FFFD."""
        return decode_tokens(make_decoders(self.decoder_configs), map(self._token, id_list(ids)), last=True)

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for the sequence that continues these ids."""
        decoders = make_decoders(self.decoder_configs)
        ends = prompt_ids if len(prompt_ids) <= 2 * CONTEXT else [*prompt_ids[:CONTEXT], *prompt_ids[-CONTEXT:]]
        decode_tokens(decoders, map(self._token, ends), last=True)
        return lambda token_id, last=False: decode_tokens(decoders, [self._token(token_id)], last)

    def _token(self, token_id: int) -> str:
        token = self.tokenizer.id_to_token(token_id)
        return REPLACEMENT if token is None else token


def decode_tokens(decoders: list[DecoderStage], tokens, last: bool) -> str:
    """Pass the next tokens through all decoders, and return their text."""
    tokens = list(tokens)
    for decoder in decoders:
        tokens = decoder.feed(tokens, last)
    return "".join(tokens)


def build_tokenizer(content: dict):
    """Build the library's tokenizer. Raises ValueError if the library gives an added token another id than the file."""
    from tokenizers import Tokenizer
    tokenizer = call_library(lambda: Tokenizer.from_str(json.dumps(content)))
    for token in content["added_tokens"]:
        if tokenizer.token_to_id(token["content"]) != token["id"]:
            raise ValueError(f"its added token {token['content']!r:.60} has the id {token['id']}, but the ids of added "
                             "tokens must follow those of the vocabulary without a gap")
    return tokenizer


def call_library(function: Callable):
    """Call a function that uses the library. Raises ValueError if the function fails.

    A panic in the library's Rust code raises a BaseException that is not an Exception.
    """
    try:
        return function()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(first_sentence(error)) from None
