"""Reads the prompts that the setting start names, encodes them, and says what a user should know about them.

start is a prompt, or it names a file. With FILE:path, the prompt is the whole text of the file. With LINES:path,
each line that is not empty is a prompt. With JSONL:path, each line is a JSON object with a "prompt" and an optional
"id"; its other fields are copied to out_file. The path - is standard input.
"""
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, count

from sampling.inputs.tokenizer import Tokenizer
from sampling.params import RULES, Prompt, Sample

logger = logging.getLogger(__name__)
MULTI_KINDS = "LINES", "JSONL" # files of many prompts
FILE_KINDS = "FILE", *MULTI_KINDS
# The fields of a line in out_file, besides "prompt" and "id".
RESULT_FIELDS = frozenset(["version", "index", "text", "num_tokens", "finish_reason", "cumulative_logprob", "logprobs",
                           "seed", "checkpoint", "settings"])
EncodedPrompt = tuple[Prompt, list[int]]


def parse_start(start: str) -> tuple[str, str]:
    """Split the setting start into ("FILE", "LINES" or "JSONL", path), or ("TEXT", start) if it names no file."""
    kind, colon, path = start.partition(":")
    return (kind, path) if colon and kind in FILE_KINDS else ("TEXT", start)


def read_prompts(start: str, watch: bool = False) -> list[Prompt] | Iterator[Prompt]:
    """The prompts that start names: a list, or for a pipe, which may stay open, an iterator.

    Raises ValueError if there is no prompt, if the file cannot be read, or if it is a pipe and watch is True; for a
    later line of a pipe, when the iteration reaches it.
    """
    kind, path = parse_start(start)
    is_pipe = kind in MULTI_KINDS and not os.path.isfile(path)
    if watch and is_pipe:
        raise ValueError("watch=True uses the prompts again for each checkpoint: save them in a file")
    for path in (start, start.partition(":")[2]) if kind == "TEXT" else ():
        if os.path.isfile(path):
            logger.info(f"the prompt is the text {start!r:.100}; to read the file, pass --start=FILE:{path}")
    prompts = iterate_prompts(start)
    return chain([next(prompts)], prompts) if is_pipe else list(prompts)


def count_samples(prompts: Iterable[Prompt], num_samples: int) -> int | None:
    """How many samples the prompts get in all; None if the prompts come from a pipe."""
    return len(prompts) * num_samples if isinstance(prompts, list) else None


def encode_prompts(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> list[EncodedPrompt] | Iterator[EncodedPrompt]:
    """The prompts with their token ids: a list or an iterator, as the prompts are."""
    def encode(prompt):
        try:
            return prompt, tokenizer.encode(prompt.text)
        except ValueError as error:
            raise ValueError(f"{prompt.location}: {error}" if prompt.location else str(error)) from None
    return [*map(encode, prompts)] if isinstance(prompts, list) else map(encode, prompts)


def make_samples(encoded: Iterable[EncodedPrompt], num_samples: int, first_index: int = 0) -> Iterator[Sample]:
    """Yield num_samples empty samples for each prompt."""
    indices = count(first_index)
    for prompt, prompt_ids in encoded:
        for _ in range(num_samples):
            yield Sample(next(indices), prompt, prompt_ids)


def iterate_prompts(start: str) -> Iterator[Prompt]:
    """Yield the prompts that start names. Reads a file line by line."""
    kind, path = parse_start(start)
    if kind == "TEXT":
        yield Prompt(start)
        return
    source, number, is_empty = "standard input" if path == "-" else path, 0, True
    try:
        # utf-8-sig skips a byte-order mark.
        with open(0 if path == "-" else path, encoding="utf-8-sig", closefd=path != "-") as file:
            for number, line in enumerate([file.read()] if kind == "FILE" else file, 1):
                location = "" if kind == "FILE" else f"{source}, line {number}"
                text = line if kind == "FILE" else line.rstrip("\n")
                if text.strip() if kind == "JSONL" else text:
                    is_empty = False
                    yield parse_json_line(text, location) if kind == "JSONL" else Prompt(text, None, location)
    except UnicodeDecodeError as error:
        where = f" after line {number}" if number else ""
        raise ValueError(f"{source} is not UTF-8{where} ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {error.strerror}") from None
    if is_empty:
        raise ValueError(f"{source} is empty, but a sample needs a prompt")


def parse_json_line(line: str, location: str) -> Prompt:
    """The prompt in a line of JSON. Raises ValueError if the line has none, or a field that is not allowed."""
    reason = ""
    try:
        found = json.loads(line)
        json.dumps(found, allow_nan=False) # out_file gets these fields, and JSON has no NaN or infinity
    except (ValueError, RecursionError) as error:
        found, reason = None, f" ({error})"
    if not (isinstance(found, dict) and isinstance(found.get("prompt"), str) and found["prompt"]):
        raise ValueError(f'{location}: every line must be an object with a prompt, like {{"prompt": "Once"}}; '
                         f"got {line!r:.100}{reason}")
    prompt = Prompt(found.pop("prompt"), found.pop("id", None), location, other_fields=found)
    if taken := found.keys() & (RULES.keys() | RESULT_FIELDS):
        raise ValueError(f"{location}: {min(taken)} is a setting of the whole run, or a field that out_file already "
                         "has: rename the field in the prompt file")
    return prompt


# ---- notices

def warn_about_stop_texts(stop_texts: list[str], tokenizer: Tokenizer) -> None:
    """Log a warning for each stop text that cannot end a sample, or probably will not."""
    for text in stop_texts:
        if "\\n" in text:
            logger.warning(f"the stop text {text!r:.100} has a backslash and the letter n; if you mean a newline, "
                           "write the text in quotes, as Python does: --stop='\"\\n\"'")
        elif not can_produce(tokenizer, text):
            logger.warning(f"the stop text {text!r:.100} cannot end a sample: {tokenizer.source} never produces this "
                           "text")


def can_produce(tokenizer: Tokenizer, text: str) -> bool:
    """Whether sampled tokens can produce this text. False only if some character of the text is in no token."""
    word = text.strip(" ") # some tokenizers drop the spaces around a text, but put spaces between words
    with suppress(ValueError):
        if word in tokenizer.decode(tokenizer.encode(word)): # a character may take several tokens
            return True
    return set(text) <= set(tokenizer.decode(list(range(tokenizer.size))))


class PromptNotices:
    """Logs what a user should know about the prompts of new samples, each thing for the first such sample.

    Call it with each sample when it is made; it returns the sample.
    """

    def __init__(self, tokenizer: Tokenizer, block_size: int):
        self.tokenizer, self.block_size = tokenizer, block_size
        self.said_cropped, self.said_space = False, not tokenizer.joins_spaces

    def __call__(self, sample: Sample) -> Sample:
        if sample.already_saved:
            return sample
        at = f"{sample.prompt.location}: " if sample.prompt.location else ""
        num_tokens, size = len(sample.prompt_ids), self.block_size
        if num_tokens > size and not self.said_cropped:
            self.said_cropped = True
            logger.info(f"{at}the prompt has {num_tokens} tokens, but the model sees only the last {size} of any "
                        f"prompt, here from {self.tokenizer.decode(sample.prompt_ids[-size:])[:40]!r} on")
        # In the training text, this space was part of the token of the next word, so the model rarely saw it alone.
        if sample.prompt.text.endswith(" ") and not self.said_space:
            self.said_space = True
            logger.info(f"{at}the prompt ends in a space: a trailing space mostly gives worse text, because in "
                        f"{self.tokenizer.source} a word begins with its space")
        return sample
