"""The tokenizer that Hugging Face's tokenizers library makes of a tokenizer.json, or of the older files."""
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sampling.checkpoints.errors import first_line
from sampling.inputs.token_decoder import REPLACEMENT, Stage, make_stages
from sampling.inputs.tokenizer_files import read_tokenizer
from sampling.inputs.tokenizer_json import check_tokenizer
from sampling.inputs.tokenizer_model import vocab_of

CONTEXT = 32 # no decoder looks further than this from the ends of a prompt


class HFTokenizer:
    """The tokenizer whose main file is at path: tokenizer.json, vocab.json or vocab.txt.

    Texts are those of transformers, with add_special_tokens=False and clean_up_tokenization_spaces=False. Added tokens
    that a model of vocab_size lacks are plain text. Raises ValueError that names the file if it cannot be read.
    """

    def __init__(self, path: Path, vocab_size: int):
        self.source = str(path)
        try:
            content, self.decoders = check_tokenizer(read_tokenizer(path))
            make_stages(self.decoders)
            max_id = max(vocab_of(content["model"]).values())
            # Often a padding token was added to the tokenizer, but not to the model.
            added = [token for token in content["added_tokens"] if token["id"] < max(vocab_size, max_id)]
            self.size = 1 + max([max_id, *(token["id"] for token in added)])
            self.tokenizer = build({**content, "added_tokens": added})
        except (OSError, MemoryError):
            raise
        except Exception as error:
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
            is_named = os.path.join(path.parent, "") in why
            raise ValueError(f"{why:.500}" if is_named else f"cannot read {path}: {why:.500}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text is not valid Unicode, or the vocabulary lacks it."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not valid UTF-8 at character {error.start + 1}") from None
        try:
            ids = guarded(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids)
        except ValueError as error:
            raise ValueError(f"{self.source} cannot encode the prompt: {error}") from None
        if not ids:
            raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}, but a sample needs one to "
                             "continue; pass another --start")
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that form no character decode to U+FFFD."""
        return run(make_stages(self.decoders), map(self._token, ids), last=True)

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for the sequence that continues these ids."""
        stages = make_stages(self.decoders)
        ends = prompt_ids if len(prompt_ids) <= 2 * CONTEXT else [*prompt_ids[:CONTEXT], *prompt_ids[-CONTEXT:]]
        run(stages, map(self._token, ends), last=True)
        return lambda token_id, last=False: run(stages, [self._token(token_id)], last)

    def _token(self, token_id: int) -> str:
        token = self.tokenizer.id_to_token(token_id)
        return REPLACEMENT if token is None else token


def run(stages: list[Stage], tokens, last: bool) -> str:
    """The text of the next tokens, after all stages."""
    tokens = list(tokens)
    for stage in stages:
        tokens = stage.feed(tokens, last)
    return "".join(tokens)


def build(content: dict):
    """The library's tokenizer. Raises ValueError if it gives an added token another id than the file."""
    from tokenizers import Tokenizer
    tokenizer = guarded(lambda: Tokenizer.from_str(json.dumps(content)))
    for token in content["added_tokens"]:
        if tokenizer.token_to_id(token["content"]) != token["id"]:
            raise ValueError(f"its added token {token['content']!r:.60} has the id {token['id']}, which does not "
                             "follow those of its vocabulary")
    return tokenizer


def guarded(call: Callable):
    """What call returns. Raises ValueError if the library fails in it: a panic of Rust is no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(first_line(error)) from None
