"""Reads the prompts that the setting start names, encodes them, and warns about them.

start is a prompt, or it names a file. With FILE:path, the prompt is the whole text of the file. With LINES:path,
each line that is not empty is a prompt. With JSONL:path, each line is a JSON object with a "prompt" and an optional
"id"; its other fields are copied to out_file. The path - is standard input.
"""
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, count

from sampling.inputs.tokenizer import Tokenizer
from sampling.messages import Log
from sampling.params import RULES, Prompt, Sample

MULTI_KINDS = "LINES", "JSONL" # files of many prompts
FILE_KINDS = "FILE", *MULTI_KINDS
# The fields of a line in out_file, besides "prompt" and "id".
RESULT_FIELDS = frozenset(["version", "index", "text", "num_tokens", "finish_reason", "cumulative_logprob", "logprobs",
                           "seed", "checkpoint", "settings"])


def parse_start(start: str) -> tuple[str, str]:
    """Split the setting start into ("FILE", "LINES" or "JSONL", path), or ("TEXT", start) if it names no file."""
    kind, colon, path = start.partition(":")
    return (kind, path) if colon and kind in FILE_KINDS else ("TEXT", start)


class PromptSource:
    """An iterable of the prompts that start names. A pipe can be iterated once, anything else many times.

    Raises ValueError if there is no prompt, if the file cannot be read, or if it is a pipe and watch is True; for a
    later line, when the iteration reaches it.
    """

    def __init__(self, start: str, watch: bool = False):
        self.start = start
        kind, path = parse_start(start)
        self.is_multi = kind in MULTI_KINDS
        self.is_single_pass = self.is_multi and not os.path.isfile(path)
        if watch and self.is_single_pass:
            raise ValueError("watch=True reads the prompts once for each checkpoint: save them in a file")
        self.prompts = read_prompts(start)
        self.first = next(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        if not self.is_multi:
            return iter([self.first])
        return chain([self.first], self.prompts) if self.is_single_pass else read_prompts(self.start)

    def count_and_max_len(self, tokenizer: Tokenizer, num_samples: int) -> tuple[int, int] | tuple[None, None]:
        """The number of samples of the run, and the number of tokens in the longest prompt; (None, None) for a pipe."""
        if self.is_single_pass:
            return None, None
        lengths = [len(sample.prompt_ids) for sample in make_samples(self, tokenizer, num_samples=1)]
        return len(lengths) * num_samples, max(lengths)


def make_samples(prompts: Iterable[Prompt], tokenizer: Tokenizer, num_samples: int,
                 first_index: int = 0) -> Iterator[Sample]:
    """Yield num_samples empty samples per prompt. Raises ValueError, with its location, if one cannot be encoded."""
    indices = count(first_index)
    for prompt in prompts:
        try:
            prompt_ids = tokenizer.encode(prompt.text)
        except ValueError as error:
            raise ValueError(f"{prompt.location}: {error}" if prompt.location else str(error)) from None
        for _ in range(num_samples):
            yield Sample(next(indices), prompt, prompt_ids)


def read_prompts(start: str) -> Iterator[Prompt]:
    """Yield the prompts of start. Reads a file line by line."""
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
                if text := line if kind == "FILE" else line.rstrip("\n"):
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
    for name in found:
        if name in RULES or name in RESULT_FIELDS:
            raise ValueError(f"{location}: {name} is a setting of the whole run, or a field that out_file already has: "
                             "rename the field in the prompt file")
    return prompt


# ---- notices

def warn_about_stop_texts(stop_texts: list[str], tokenizer: Tokenizer, log: Log) -> None:
    """Log a warning for each stop text that cannot end a sample, or probably will not."""
    for text in stop_texts:
        if "\\n" in text:
            log(f"the stop text {text!r:.100} has a backslash and the letter n; if you mean a newline, write "
                "the text in quotes, as Python does: --stop='\"\\n\"'")
        elif not can_produce(tokenizer, text):
            log(f"the stop text {text!r:.100} cannot end a sample: {tokenizer.source} never produces "
                "this text")


def can_produce(tokenizer: Tokenizer, text: str) -> bool:
    """Whether sampled tokens can produce this text. False only if some character of the text is in no token."""
    word = text.strip(" ") # some tokenizers drop the spaces around a text, but put spaces between words
    with suppress(ValueError):
        if word in tokenizer.decode(tokenizer.encode(word)): # a character may take several tokens
            return True
    return set(text) <= set(tokenizer.decode(list(range(tokenizer.size))))


def log_notices(samples: Iterable[Sample], tokenizer: Tokenizer, block_size: int, log: Log) -> Iterator[Sample]:
    """Yield the samples. Of the new ones, log the first that is cropped, and the first that ends in a space."""
    said_cropped, said_space = False, not tokenizer.joins_spaces
    for sample in samples:
        at = f"{sample.prompt.location}: " if sample.prompt.location else ""
        num_tokens, is_new = len(sample.prompt_ids), not sample.already_saved
        if is_new and num_tokens > block_size and not said_cropped:
            said_cropped = True
            log(f"{at}the prompt has {num_tokens} tokens, but the model sees only the last {block_size} of any prompt, "
                f"here from {tokenizer.decode(sample.prompt_ids[-block_size:])[:40]!r} on")
        # In the training text, this space was part of the token of the next word, so the model rarely saw it alone.
        if is_new and sample.prompt.text.endswith(" ") and not said_space:
            said_space = True
            log(f"{at}the prompt ends in a space: a trailing space mostly gives worse text, because in "
                f"{tokenizer.source} a word begins with its space")
        yield sample
