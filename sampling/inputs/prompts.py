"""Reads the prompts that the setting start names, encodes them, and says what a user should know about them.

start is a prompt, or it names a file. With FILE:path, the prompt is the whole text of the file. With LINES:path,
each line that is not empty is a prompt. With JSONL:path, each line is a JSON object with a "prompt" and an optional
"id"; its other fields are copied to out_file. The path - is standard input. Raises ValueError for what is no prompt.
"""
import json
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import chain

from sampling.inputs.tokenizer import Tokenizer
from sampling.params import RULES, Prompt, Sample, Score
from sampling.process import expand_home, system_interrupts

logger = logging.getLogger(__name__)
MULTI_KINDS = "LINES", "JSONL" # files of many prompts
FILE_KINDS = "FILE", *MULTI_KINDS
# The fields of a line in out_file, besides "prompt" and "id".
RESULT_FIELDS = frozenset(["version", "index", "prompt_index", "sample_index", "text", "num_tokens", "num_bytes",
                           "finish_reason", "cumulative_logprob", "logprobs", "seed", "checkpoint", "settings"])
MAX_LENGTH = 2**27 # characters of a prompt: 128 MB of English, hours for any model to score
EncodedPrompt = tuple[Prompt, list[int]]


def parse_start(start: str) -> tuple[str, str]:
    """Split the setting start into ("FILE", "LINES" or "JSONL", path), or ("TEXT", start) if it names no file."""
    kind, colon, path = start.partition(":")
    return (kind, expand_home(path)) if colon and kind in FILE_KINDS else ("TEXT", start)


def read_prompts(start: str, watch: bool = False) -> list[Prompt] | Iterator[Prompt]:
    """The prompts that start names: a list, or for a pipe, which may stay open, an iterator. watch: it is no pipe."""
    kind, path = parse_start(start)
    if kind == "TEXT":
        if os.path.isfile(start):
            logger.info(f"the prompt is the text {start!r:.100}; to read the file, pass --start=FILE:{start}")
        return [Prompt(start)]
    if kind == "FILE" and path.endswith(".jsonl"):
        logger.info(f"the prompt is the whole text of {path}; for a prompt in each line, pass --start=JSONL:{path}")
    if path.endswith((".bin", ".npy")):
        raise ValueError(f"{path} is a file of tokens, as a prepare.py writes it: give the text that it was made from")
    is_pipe = kind in MULTI_KINDS and (path == "-" or (os.path.exists(path) and not os.path.isfile(path)))
    if watch and is_pipe:
        raise ValueError("watch=True uses the prompts again for each checkpoint: save them in a file")
    prompts = read_prompt_file(kind, path)
    return chain([next(prompts)], prompts) if is_pipe else list(prompts)


def encode_prompts(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> Iterator[EncodedPrompt]:
    """The prompts with their token ids: each is encoded when it is needed. In a list, a character that the vocabulary
    lacks is found at once.
    """
    def encode(prompt: Prompt) -> EncodedPrompt:
        if len(prompt.text) > 10**6: # it takes a second or more
            logger.info(f"{prompt.location}: encoding {len(prompt.text):,} characters")
        try:
            with system_interrupts(): # a stranger's tokenizer may take long
                return prompt, tokenizer.encode(prompt.text)
        except ValueError as error:
            raise ValueError(f"{prompt.location}: {error}" if prompt.location else str(error)) from None
    if isinstance(prompts, list):
        try:
            tokenizer.encode("".join(set().union(*(prompt.text for prompt in prompts))))
        except ValueError: # the first prompt that has such a character raises it again, with its place
            for prompt in prompts:
                encode(prompt)
    return map(encode, prompts)


def make_samples(encoded: Iterable[EncodedPrompt], num_samples: int, first_index: int = 0,
                 is_score: bool = False) -> Iterator[Sample]:
    """Yield num_samples empty samples for each prompt, or empty scores."""
    repeated = (pair for pair in encoded for _ in range(num_samples))
    for index, (prompt, prompt_ids) in enumerate(repeated, first_index):
        yield Score(index, prompt, [], ids=prompt_ids) if is_score else Sample(index, prompt, prompt_ids)


def read_prompt_file(kind: str, path: str) -> Iterator[Prompt]:
    source, number, is_empty = "standard input" if path == "-" else path, 0, True
    encoding = "utf-8" if kind == "FILE" else "utf-8-sig" # which skips a byte-order mark; nanoGPT keeps it
    try:
        with open(0 if path == "-" else path, encoding=encoding, closefd=path != "-") as file:
            read = file.read if kind == "FILE" else file.readline
            for number, line in enumerate(iter(lambda: read(MAX_LENGTH + 1), ""), 1): # a device may never end
                location = source if kind == "FILE" else f"{source}, line {number}"
                if len(line) > MAX_LENGTH:
                    raise ValueError(f"{location}: a prompt has at most {MAX_LENGTH:,} characters, and here are more")
                text = line if kind == "FILE" else line.rstrip("\n")
                if text.strip() if kind == "JSONL" else text:
                    is_empty = False
                    yield parse_json_line(text, location) if kind == "JSONL" else Prompt(text, None, location)
    except UnicodeDecodeError as error:
        where = f" after line {number}" if number else ""
        raise ValueError(f"{source} is not UTF-8{where} ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {error.strerror}; {kind}: takes the path of a "
                         "file, or - for standard input") from None
    if is_empty:
        raise ValueError(f"{source} is empty, but a sample needs a prompt")


def parse_json_line(line: str, location: str) -> Prompt:
    reason = ""
    try:
        fields = json.loads(line)
        json.dumps(fields, allow_nan=False) # out_file gets these fields, and JSON has no NaN or infinity
    except (ValueError, RecursionError) as error:
        fields, reason = None, f" ({error})"
    text = fields.pop("prompt", None) if isinstance(fields, dict) else None
    if not (isinstance(text, str) and text):
        raise ValueError(f'{location}: every line must be an object with a prompt that is not empty, like '
                         f'{{"prompt": "Once"}}; got {line[:100]!r:.100}{reason}')
    if taken := fields.keys() & (RULES.keys() | RESULT_FIELDS):
        raise ValueError(f"{location}: {min(taken)} is a setting of the whole run, or a field that out_file already "
                         "has: rename the field in the prompt file")
    return Prompt(text, fields.pop("id", None), location, other_fields=fields)


# ---- notices

def log_notices(samples: Iterable[Sample], tokenizer: Tokenizer, block_size: int) -> Iterator[Sample]:
    """Yield the samples. Says once if the model does not see the whole of a new prompt."""
    is_said = False
    for sample in samples:
        ids, location = sample.prompt_ids, sample.prompt.location
        if len(ids) > block_size and not (is_said or sample.already_saved):
            is_said = True
            logger.info(f"{location + ': ' * bool(location)}the prompt has {len(ids)} tokens, but the model sees only "
                        f"the last {block_size} of any, here from {tokenizer.decode(ids[-block_size:])[:40]!r} on")
        yield sample
