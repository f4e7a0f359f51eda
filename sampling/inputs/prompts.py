"""Reads the prompts that the setting start names, encodes them, and says what a user should know about them.

start is a prompt, or it names a file. With FILE:path, the prompt is the whole text of the file. With LINES:path,
each line that is not empty is a prompt. With JSONL:path, each line is a JSON object with a "prompt" and an optional
"id"; its other fields are copied to out_file. The path - is standard input.
"""
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import reduce
from itertools import chain, count

from sampling.checkpoints.checkpoint import require
from sampling.inputs.tokenizer import Tokenizer
from sampling.messages import Log
from sampling.params import Prompt, SampleRequest, SamplingParams

MULTI_KINDS = "LINES", "JSONL" # files of many prompts
FILE_KINDS = "FILE", *MULTI_KINDS
PARAM_NAMES = frozenset(f.name for f in fields(SamplingParams))
# The fields of a line in out_file, besides "prompt" and "id".
RESULT_FIELDS = frozenset(["version", "index", "text", "num_tokens", "finish_reason", "cumulative_logprob", "logprobs",
                           "seed", "checkpoint", "settings"])


def parse_start(start: str) -> tuple[str, str]:
    """Split the setting start into ("FILE", "LINES" or "JSONL", path), or ("TEXT", start) if it names no file."""
    kind, colon, path = start.partition(":")
    return (kind, path) if colon and kind in FILE_KINDS else ("TEXT", start)


class PromptSource:
    """An iterable of the prompts that start names. A pipe can be iterated once, anything else many times.

    setting_names: names that a JSON field may not have, because settings apply to the whole run. Raises ValueError if
    there is no prompt, or if the file cannot be read; for a later line, when the iteration reaches it.
    """

    def __init__(self, start: str, setting_names: Collection[str] = PARAM_NAMES):
        self.start, self.setting_names = start, setting_names
        kind, path = parse_start(start)
        self.is_multi = kind in MULTI_KINDS
        self.is_pipe = self.is_multi and not os.path.isfile(path)
        self.prompts = read_prompts(start, setting_names)
        self.first = next(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        if not self.is_multi:
            return iter([self.first])
        return chain([self.first], self.prompts) if self.is_pipe else read_prompts(self.start, self.setting_names)

    def requests(self, tokenizer: Tokenizer, num_samples: int, first_index: int = 0) -> Iterator[SampleRequest]:
        """make_requests of these prompts."""
        return make_requests(self, tokenizer, num_samples, first_index)

    def count_and_max_len(self, tokenizer: Tokenizer, num_samples: int) -> tuple[int, int] | tuple[None, None]:
        """The number of samples of the run, and the number of tokens in the longest prompt; (None, None) for a pipe.

        Raises ValueError if a line is not a prompt, or if the tokenizer cannot encode it.
        """
        if self.is_pipe:
            return None, None
        lengths = [len(encode_prompt(prompt, tokenizer)) for prompt in self]
        return len(lengths) * num_samples, max(lengths)


def make_requests(prompts: Iterable[Prompt], tokenizer: Tokenizer, num_samples: int,
                  first_index: int = 0) -> Iterator[SampleRequest]:
    """Yield num_samples requests for each prompt, with indices from first_index on. ValueError as encode_prompt."""
    indices = count(first_index)
    for prompt in prompts:
        prompt_ids = encode_prompt(prompt, tokenizer)
        for _ in range(num_samples):
            yield SampleRequest(next(indices), prompt, prompt_ids)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt. Raises ValueError, which names the prompt's location, if it cannot be encoded."""
    try:
        return tokenizer.encode(prompt.text)
    except ValueError as error:
        raise ValueError(f"{prompt.location}: {error}" if prompt.location else str(error)) from None


def read_prompts(start: str, setting_names: Collection[str] = ()) -> Iterator[Prompt]:
    """Yield the prompts of start. Reads a file line by line.

    Raises ValueError if there is no prompt, the file cannot be read, or a line is not a prompt.
    """
    kind, path = parse_start(start)
    if kind == "TEXT":
        yield Prompt(start)
        return
    require(path, f"{kind}: needs the path of a file after the colon, or - for standard input")
    require("\0" not in path, f"cannot read the prompt file {path!r:.200}: the path has a null byte")
    name, number, is_empty = "standard input" if path == "-" else f"the prompt file {path}", 0, True
    try:
        # utf-8-sig skips a byte-order mark.
        with open(0 if path == "-" else path, encoding="utf-8-sig", closefd=path != "-") as file:
            for number, line in enumerate([file.read()] if kind == "FILE" else file, 1):
                location = "" if kind == "FILE" else f"{name.removeprefix('the prompt file ')}, line {number}"
                if text := line.rstrip("\n") if location else line:
                    is_empty = False
                    yield parse_json(text, location, setting_names) if kind == "JSONL" else Prompt(text, None, location)
    except UnicodeDecodeError as error:
        where = f" after line {number}" if number else ""
        raise ValueError(f"{name} is not UTF-8{where} ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {error.strerror}") from None
    require(not is_empty, f"{name} is empty, but a sample needs a prompt")


def parse_json(line: str, location: str, setting_names: Collection[str]) -> Prompt:
    """The prompt in a line of JSON. Raises ValueError if the line has none, or a field that is not allowed."""
    reason = ""
    try:
        found = json.loads(line)
        # out_file nests these fields deeper: leave room for 50 more levels. JSON has no NaN or infinity.
        json.dumps(reduce(lambda inner, _: [inner], range(50), found), allow_nan=False)
    except (ValueError, RecursionError) as error:
        found, reason = None, f" ({error})"
    require(isinstance(found, dict) and isinstance(found.get("prompt"), str) and found["prompt"],
            f'{location}: every line must be an object with a prompt, like {{"prompt": "Once"}}; '
            f"got {line!r:.100}{reason}")
    prompt = Prompt(found.pop("prompt"), found.pop("id", None), location, other_fields=found)
    for name in found:
        require(name not in setting_names, f"{location}: {name} is a setting of the whole run, not of one prompt: pass "
                                           f"--{name}=... to sample.py, or rename the field")
        require(name not in RESULT_FIELDS,
                f"{location}: out_file already has a field {name}: rename the field in the prompt file")
    return prompt


# ---- notices

def warn_about_stop_texts(stop_texts: list[str], tokenizer: Tokenizer, log: Log) -> None:
    """Log a warning for each stop text that cannot end a sample, or probably will not."""
    for text in stop_texts:
        if "\\n" in text:
            how = f"if you mean a newline, write it in quotes: \"{text:.100}\", and in a shell --stop='\"{text:.100}\"'"
            if text.startswith(('["', "['")):
                how = "a list needs quotes around each text, such as [\"\\n\\n\", \"KING\"]"
            log(f"warning: the stop text {text!r:.100} has a backslash and the letter n; {how}")
        elif not can_produce(tokenizer, text):
            log(f"warning: the stop text {text!r:.100} cannot end a sample: {tokenizer.source} never produces "
                "this text")


def can_produce(tokenizer: Tokenizer, text: str) -> bool:
    """Whether sampled tokens can produce this text. False only if some character of the text is in no token."""
    word = text.strip(" ") # some tokenizers drop the spaces around a text, but put spaces between words
    with suppress(ValueError):
        if word in tokenizer.decode(tokenizer.encode(word)): # a character may take several tokens
            return True
    return set(text) <= set(tokenizer.decode(list(range(tokenizer.size))))


def log_notices(requests: Iterable[SampleRequest], tokenizer: Tokenizer, block_size: int,
                log: Log) -> Iterator[SampleRequest]:
    """Yield the requests. Log what a user should know about the first prompt that is cropped or ends in a space."""
    return log_trailing_space(log_cropped(requests, tokenizer, block_size, log), tokenizer, log)


def log_cropped(requests: Iterable[SampleRequest], tokenizer: Tokenizer, block_size: int,
                log: Log) -> Iterator[SampleRequest]:
    """Yield the requests. For the first prompt longer than block_size tokens, log which part the model sees."""
    def message(request: SampleRequest) -> str | None:
        num_tokens = len(request.prompt_ids)
        if num_tokens <= block_size:
            return None
        visible = tokenizer.decode(request.prompt_ids[-block_size:])
        others = f"; of later prompts too, it sees at most {block_size}" if request.prompt.location else ""
        return (f"the prompt has {num_tokens} tokens, but the model sees only the last {block_size}, which begin with "
                f"{visible[:40]!r}{others}")
    return log_first(requests, message, log)


def log_trailing_space(requests: Iterable[SampleRequest], tokenizer: Tokenizer, log: Log) -> Iterator[SampleRequest]:
    """Yield the requests. Log a line for the first prompt that ends in a space, if words begin with their space.

    The model has hardly seen such a space alone: in its training, it belonged to the token of the next word.
    """
    def message(request: SampleRequest) -> str | None:
        return ("the prompt ends in a space: a trailing space mostly gives worse text, because in "
                f"{tokenizer.source} a word begins with its space") if request.prompt.text.endswith(" ") else None
    return log_first(requests, message, log) if tokenizer.joins_spaces else iter(requests)


def log_first(requests: Iterable[SampleRequest], message: Callable[[SampleRequest], str | None],
              log: Log) -> Iterator[SampleRequest]:
    """Yield the requests. Log the message of the first new one that has a message, with the prompt's location."""
    is_logged = False
    for request in requests:
        if not (is_logged or request.already_saved) and (text := message(request)):
            is_logged = True
            log(f"{request.prompt.location}: {text}" if request.prompt.location else text)
        yield request
