"""What samples continue: the prompts that the setting start stands for.

A text is a prompt itself, FILE:path is what the file holds, LINES:path every line of it that is not empty,
JSONL:path the "prompt" of every object, which may also have an "id". A path of - is standard input.
"""
import json
import os
from dataclasses import dataclass
from functools import reduce
from itertools import chain


@dataclass(frozen=True)
class Prompt:
    """A text to continue, the id that its JSONL file gives it, and where it stands in its file, for messages."""
    text: str
    id: object = None
    place: str = ""

    def encode(self, tokenizer):
        """Its token ids; ValueError, which says where it stands, if the tokenizer cannot."""
        try:
            return tokenizer.encode(self.text)
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}" if self.place else str(error)) from None


class Prompts:
    """The prompts that start stands for, to iterate over: again and again, or from a pipe once.

    ValueError, at once or when it comes to that, where there is none, or one is no prompt.
    """

    def __init__(self, start):
        self.start, self.many = start, start.startswith(("LINES:", "JSONL:"))
        self.pipe = self.many and not os.path.isfile(start.partition(":")[2])
        self.read = read_prompts(start)
        self.first = next(self.read)

    def __iter__(self):
        if not self.many:
            return iter([self.first])
        return chain([self.first], self.read) if self.pipe else read_prompts(self.start)

    def survey(self, tokenizer, num_samples):
        """How many samples they make, and the longest one's tokens: None where that cannot be known.

        ValueError where the tokenizer cannot encode one.
        """
        if self.pipe:
            return None, None
        found = longest = 0
        for prompt in self:
            found, longest = found + 1, max(longest, len(prompt.encode(tokenizer)))
        return found * num_samples, longest


def read_prompts(start):
    """Yield the Prompts that start stands for, line by line; ValueError where there is none, or one is no prompt."""
    kind, colon, path = start.partition(":")
    if not colon or kind not in ("FILE", "LINES", "JSONL"):
        yield Prompt(start)
        return
    found = False
    for prompt in read_file(kind, path):
        found = True
        yield prompt
    if not found:
        raise ValueError(f"the prompt file {path} is empty: a sample needs something to continue")


def read_file(kind, path):
    """read_prompts for a file, which may be empty."""
    number = 0
    try:
        # A byte-order mark at the beginning is no text.
        with open(0 if path == "-" else path, encoding="utf-8-sig", closefd=path != "-") as f:
            if kind == "FILE":
                if text := f.read():
                    yield Prompt(text)
                return
            for number, line in enumerate(f, 1):
                if line := line.rstrip("\n"):
                    place = f"{path}, line {number}"
                    yield Prompt(line, place=place) if kind == "LINES" else parse(line, place)
    except UnicodeDecodeError as e:
        where = f" after line {number}" if kind != "FILE" else ""
        raise ValueError(f"the prompt file {path} is not UTF-8{where}: {e.reason}") from None
    except OSError as e:
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {e.strerror}") from None
    except ValueError as e: # a path may not even be one
        if "\0" not in path:
            raise
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {e}") from None


def parse(line, place):
    """The Prompt of a line of JSON; ValueError where it is none."""
    try:
        found = json.loads(line)
        # In out_file it lies deeper, and must be read again; NaN and what a huge number becomes are no JSON.
        json.dumps(reduce(lambda inner, _: [inner], range(50), found), allow_nan=False)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str) or not found["prompt"]:
        raise ValueError(f'{place}: every line must be an object with a text to continue, like {{"prompt": "Once"}}; '
                         f"got {line!r:.100}")
    return Prompt(found["prompt"], found.get("id"), place)
