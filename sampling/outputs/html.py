"""Writes a run's samples as an HTML page, which shows how likely each token was and which other tokens were likely.

The template page.html has three parts: the beginning, one sample, the end. Each sample is one line of the page, so
that a resumed run can truncate the page after any sample.
"""
import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sampling.outputs.console import plural
from sampling.outputs.output_file import append, open_output
from sampling.params import Sample, Token

NUM_ALTERNATIVES = 5 # of the most likely tokens, shown for each token
FINISH_REASONS = {"length": "stopped at the length limit", "stop": "stopped at a stop text"}


class HtmlWriter:
    """Appends samples to an HTML page. A browser can show the page after each sample.

    run_info: what the page shows about the run, by name.
    num_saved: the number of samples in out_file; None without an out_file. The page must begin with these samples. The
    first write truncates the page after them, so a run that fails earlier does not change it.
    Raises ValueError if the file holds anything else, unless overwrite is True.
    """

    def __init__(self, path: str | os.PathLike, run_info: Mapping[str, Any], num_saved: int | None = None,
                 overwrite: bool = False):
        template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        head, self.sample_template, self.tail = template.split("<!-- split here -->\n")
        # The browser applies the style and runs the script with these hashes, and no others.
        hashes = {element: content_hash(head, element) for element in ("style", "script")}
        self.head = fill(head, title=escape(title(run_info)), run_info=definition_list(run_info), **hashes)
        self.path = path
        if num_saved and not os.path.exists(path):
            raise self.resume_error(num_saved, 0)
        self.file = open_output(path)
        try:
            # Where the first write truncates the file; None after that.
            self.end: int | None = 0 if overwrite else self.find_end(num_saved)
        except BaseException:
            self.file.close()
            raise

    def write(self, sample: Sample) -> None:
        """Append a finished sample, whose tokens have log-probabilities."""
        self.append(fill(self.sample_template, number=str(sample.index), id=escape(shown_id(sample.prompt.id)),
                         prompt=escape(sample.prompt.text), text=escape(sample.text),
                         num_tokens=plural(sample.num_tokens, "token"),
                         finish_reason=FINISH_REASONS[sample.finish_reason], data=token_data(sample.tokens)))

    def close(self) -> None:
        """Write the end of the page."""
        self.append(self.tail)
        self.file.close()

    def append(self, text: str) -> None:
        """Append to the page. The first call truncates it, and writes the head of a page without samples.

        A run that ends earlier leaves the file as it was, and can start again.
        """
        if self.end is not None:
            self.file.truncate(self.end)
            text = text if self.end else self.head + text
            self.end = None
        append(self.file, text.encode())

    def find_end(self, num_saved: int | None) -> int:
        """The position after the first num_saved samples of the file; 0 if the page begins anew.

        Raises ValueError unless the file is a page of this run with at least num_saved samples, or is empty. With an
        out_file that has no samples, the page may have one: a run that died had not saved it in out_file yet.
        """
        head = self.head.encode()
        begin = self.file.read(len(head))
        if not num_saved:
            can_restart = num_saved == 0 and head.startswith(begin) and self.has_one_sample()
            if begin and not can_restart:
                raise ValueError(f"{self.path} exists already, and nothing is overwritten: give html_file another "
                                 "name, or replace it with --overwrite")
            return 0
        num_found = 0
        for line in self.file if begin == head else (): # line by line, because a page can be large
            num_found += line.startswith(sample_start(num_found)) and line.endswith(b"</article>\n")
            if num_found == num_saved:
                return self.file.tell()
        raise self.resume_error(num_saved, num_found)

    def has_one_sample(self) -> bool:
        """Whether the rest of the file is the first sample, or the beginning of it."""
        line, start = self.file.readline(), sample_start(0)
        return line[:len(start)] == start[:len(line)] and not self.file.read(1)

    def resume_error(self, num_saved: int, found: int) -> ValueError:
        """The error for a page that does not hold the samples that out_file holds."""
        return ValueError(f"{self.path} must be the page of this run. out_file holds {plural(num_saved, 'sample')}, "
                          f"but the page holds {found}: leave html_file out, or give both files other names")


def sample_start(index: int) -> bytes:
    """How the line of a sample begins in a page."""
    return b'<article id="sample-%d"' % index


def fill(template: str, **values: str) -> str:
    """Replace each {{name}} of a template by its value, which may itself hold {{name}}."""
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def content_hash(page: str, element: str) -> str:
    """The hash of an element's text, in the form of a Content-Security-Policy."""
    text = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def title(run_info: Mapping[str, Any]) -> str:
    """The page's title, which names the model. Of an absolute path it shows only the last part."""
    model = str(run_info.get("model", ""))
    return f"Samples from {(Path(model).name if os.path.isabs(model) else model) or 'a model'}"


def shown_id(prompt_id: Any) -> str:
    """The prompt's id, as the heading of its sample shows it."""
    if prompt_id is None:
        return ""
    return f", id {prompt_id if isinstance(prompt_id, str) else json.dumps(prompt_id, ensure_ascii=False)}"


def definition_list(run_info: Mapping[str, Any]) -> str:
    """HTML for the terms and values of a <dl>. Values are shown as their repr."""
    return "\n".join(f"<dt>{escape(str(name))}</dt><dd>{escape(repr(value))}</dd>" for name, value in run_info.items())


def token_data(tokens: list[Token]) -> str:
    """JSON for the page's script: [length, surprisal, text, surprisal, text, surprisal ...] for each token.

    The first surprisal is that of the token, the others are those of the most likely tokens. A surprisal is a
    neg_millilogprob. A token that ends inside a character has length 0; the token that completes it has all of it.
    """
    data = []
    for token in tokens:
        entry = [utf16_length(token.text), neg_millilogprob(token.logprob)]
        for text, logprob in token.top_logprobs[:NUM_ALTERNATIVES]:
            entry += [clean(text), neg_millilogprob(logprob)]
        data.append(entry)
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")


def clean(text: str) -> str:
    """Replace what HTML cannot hold: lone surrogates and NUL."""
    return text.encode("utf-8", errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def escape(text: str) -> str:
    """The text as HTML on one line."""
    return html.escape(clean(text)).replace("\r", "&#13;").replace("\n", "&#10;")


def utf16_length(text: str) -> int:
    """The length of a text in JavaScript."""
    return len(text) + sum(char > "\uffff" for char in text)


def neg_millilogprob(logprob: float) -> int:
    """A negated log-probability in whole thousandths, which is short and keeps three digits of the probability."""
    return round(min(99999, -1000 * logprob)) # min in this order also handles NaN
