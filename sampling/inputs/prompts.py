"""Reads the prompts that the setting start names, and makes the samples that will continue them.

start is a prompt, or it names a file. With FILE:path, the prompt is the whole text of the file.
With LINES:path, each line that is not empty is a prompt. With JSONL:path, each line is a JSON
object with a "prompt" and an optional "id"; its other fields are copied to out_file. The path - is
standard input. Raises ValueError for what is no prompt.
"""
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from stat import S_ISFIFO
from typing import Any

from sampling.inputs.tokenizer import Tokenizer
from sampling.process import system_interrupts
from sampling.samples import Prompt, Sample, Score
from sampling.settings import ALIASES, RESULT_FIELDS, RULES, SAMPLING_SETTINGS, expand_home

logger = logging.getLogger(__name__)
MULTI_KINDS = "LINES", "JSONL" # files of many prompts
FILE_KINDS = "FILE", *MULTI_KINDS
MAX_DEPTH = 100 # of lists and objects in a field: the lines of out_file must be read again
MAX_LENGTH = 2**27 # characters of a prompt: 128 MB of English, hours for any model to score


def parse_start(start: str) -> tuple[str, str]:
    """The kind of the setting start, and its path. If it names no file: ("TEXT", start)."""
    kind, colon, path = start.partition(":")
    if colon and kind in FILE_KINDS:
        return kind, expand_home(path)
    return "TEXT", start


def read_prompts(start: str, watch: bool = False) -> list[Prompt] | Iterator[Prompt]:
    """The prompts that start names: a list, or for a pipe, which may stay open, an iterator.

    watch: the prompts are used several times, so a pipe is an error.
    """
    kind, path = parse_start(start)
    announce_other_reading(kind, path)
    if kind == "TEXT":
        return [Prompt(start)]
    if path.endswith((".bin", ".npy")):
        raise ValueError(f"{path} is a file of tokens, as a prepare.py writes it: "
                         "give the text that it was made from")
    is_special = path == "-" or (os.path.exists(path) and not os.path.isfile(path))
    prompts = read_prompt_file(kind, path)
    if kind == "FILE" or not is_special:
        return list(prompts)
    if watch:
        raise ValueError("watch=True uses the prompts again for each checkpoint: "
                         "save them in a file")
    return chain([next(prompts)], prompts) # an error of the first prompt is raised at once


def announce_other_reading(kind: str, path: str) -> None:
    """Say how else the setting start could be meant. path: all of it, if it is a text."""
    if kind == "TEXT" and os.path.isfile(path):
        logger.info(f"the prompt is the text {path!r:.100}; to read the file, "
                    f"pass --start=FILE:{path}")
    if kind == "TEXT" and path == "\n" and is_piped():
        logger.info("the prompt is a newline; for the text in the pipe, pass --start=FILE:-")
    if kind == "FILE" and path.endswith(".jsonl"):
        logger.info(f"the prompt is the whole text of {path}; for a prompt in each line, "
                    f"pass --start=JSONL:{path}")


def make_samples(prompts: Iterable[Prompt], tokenizer: Tokenizer, num_samples: int = 1,
                 first_index: int = 0, is_score: bool = False) -> Iterator[Any]:
    """Yield num_samples empty samples for each prompt, or if is_score, empty scores.

    A list is encoded at once, so that a bad prompt is an error before the first sample; a prompt of
    a pipe when its first sample is needed.
    """
    encoded = ((prompt, encode(prompt, tokenizer)) for prompt in prompts)
    if isinstance(prompts, list):
        encoded = list(encoded)
    kind = Score if is_score else Sample
    index = first_index
    for prompt, ids in encoded:
        for _ in range(num_samples):
            yield kind(index, prompt, ids)
            index += 1


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if len(prompt.text) > 10**6: # it takes a second or more
        logger.info(prompt.located(f"encoding {len(prompt.text):,} characters"))
    try:
        with system_interrupts(): # a stranger's tokenizer may take long
            return tokenizer.encode(prompt.text)
    except ValueError as error:
        raise ValueError(prompt.located(str(error))) from None


def read_prompt_file(kind: str, path: str) -> Iterator[Prompt]:
    """Yield the prompts in a file, each as soon as it is read."""
    source = "standard input" if path == "-" else path
    # utf-8-sig skips a byte-order mark. nanoGPT, which has only FILE, keeps it.
    encoding = "utf-8" if kind == "FILE" else "utf-8-sig"
    location = source
    number = 0
    is_empty = True
    has_alias = False
    try:
        with open(0 if path == "-" else path, encoding=encoding, closefd=path != "-") as file:
            read = file.read if kind == "FILE" else file.readline
            while text := read(MAX_LENGTH + 1): # a device may never end
                number += 1
                if kind != "FILE":
                    location = f"{source}, line {number}"
                    text = text.rstrip("\n")
                if len(text) > MAX_LENGTH:
                    raise ValueError(f"{location}: a prompt has at most {MAX_LENGTH:,} characters, "
                                     "and here are more")
                if not text or (kind == "JSONL" and text.isspace()):
                    continue
                is_empty = False
                prompt = Prompt(text, location=location)
                if kind == "JSONL":
                    prompt = parse_json_line(text, location)
                    has_alias = has_alias or warn_about_alias(prompt)
                yield prompt
    except UnicodeDecodeError as error:
        where = f" after line {number}" if number else ""
        raise ValueError(f"{source} is not UTF-8{where} ({error.reason}): "
                         "save it as UTF-8, and not compressed") from None
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {error.strerror}; "
                         f"{kind}: takes the path of a file, or - for standard input") from None
    if is_empty:
        raise ValueError(f"{source} is empty, but a sample needs a prompt")


def is_piped() -> bool:
    """Whether standard input is a pipe that has data."""
    with suppress(ImportError, OSError): # on Windows, or if it is closed
        from fcntl import ioctl
        from termios import FIONREAD
        return S_ISFIFO(os.fstat(0).st_mode) and any(ioctl(0, FIONREAD, bytes(4)))
    return False


def parse_json_line(line: str, location: str) -> Prompt:
    text = None
    try:
        fields = json.loads(line)
        json.dumps(fields, allow_nan=False) # out_file gets them, and JSON has no infinity
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location} is not JSON that out_file could hold ({error}), like "
                         f'{{"prompt": "Once"}}; got {line[:100]!r:.100}') from None
    if isinstance(fields, dict):
        text = fields.pop("prompt", None)
    if not (isinstance(text, str) and text):
        raise ValueError(f'{location}: every line must be an object with a prompt that is not '
                         f'empty, like {{"prompt": "Once"}} (jq -c ".[]" makes such lines of an '
                         f'array); got {line[:100]!r:.100}')
    if taken := fields.keys() & (RULES.keys() | RESULT_FIELDS):
        raise ValueError(f"{location}: {min(taken)} is a setting of the whole run, or a field that "
                         "out_file already has: rename the field in the prompt file")
    for name, value in fields.items():
        if is_deeper(value, MAX_DEPTH):
            raise ValueError(f"{location}: the field {name!r:.100} has lists or objects in each "
                             f"other, more than {MAX_DEPTH} deep: save it as a text, or leave it "
                             "out")
    return Prompt(text, fields.pop("id", None), location, other_fields=fields)


def is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than depth times."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return depth == 0 or any(is_deeper(item, depth - 1) for item in value)


def warn_about_alias(prompt: Prompt) -> bool:
    """Whether a field has the name of a setting in other programs, which a warning then says."""
    for name in prompt.other_fields:
        setting = ALIASES.get(name)
        if setting in SAMPLING_SETTINGS:
            logger.warning(prompt.located(f"{name} is saved, but changes no sample: --{setting} "
                                          "does, for all prompts"))
            return True
    return False
