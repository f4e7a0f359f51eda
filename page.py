"""A run's samples as one page for a browser, which shows how likely each token was and what else could have come.

page.html is its template: what stands before the samples, one sample, and what follows them. A sample is one line
of the page, so that the page of a run that was killed can be cut after any of them.
"""
import base64
import hashlib
import html
import json
import os
import re
from pathlib import Path

from saving import named, open_output

ENDED = {"length": "stopped at the length limit", "stop": "stopped at a stop sequence"}


class Page:
    """A page of samples, written as they come: after each of them the file is a page that a browser shows.

    kept is how many samples a resumed run has there already: the page is cut after them and goes on. ValueError where
    the file holds anything else: nothing is overwritten.
    """

    def __init__(self, path, about, kept=0):
        template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        head, self.sample, self.tail = template.split("<!-- cut here -->\n")
        # The browser applies the style and runs the script that have these hashes, and no others.
        hashes = {element: content_hash(head, element) for element in ("style", "script")}
        self.head = fill(head, title=escape(title(about)), about=describe(about), **hashes)
        self.path = path
        if kept and not os.path.exists(path):
            raise self.lacking(kept, 0)
        self.file = open_output(path)
        try:
            self.cut(kept)
        except BaseException:
            self.file.close()
            raise

    def add(self, sample):
        """Write a sample that has ended to the file at once.

        A token that ends inside a character has no text, and the next one the whole character.
        """
        data = [[utf16_length(text), cost(logprob), *(x for other, p in others for x in (clean(other), cost(p)))]
                for text, (logprob, others) in zip(sample.pieces, sample.looks, strict=True)]
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")
        length = f"{len(sample.new)} token{'' if len(sample.new) == 1 else 's'}"
        self._write(fill(self.sample, number=str(sample.number + 1), prompt=escape(sample.prompt.text),
                         text=escape(sample.text), length=length, ended=ENDED[sample.ended], data=data))

    def close(self):
        """Write what ends the page."""
        self._write(self.tail)
        self.file.close()

    def cut(self, kept):
        """Leave the file's first kept samples; ValueError, with all as it was, where it is no page with as many."""
        head, found = self.head.encode(), 0
        if kept and self.file.read(len(head)) == head:
            for line in self.file: # not all at once: a page can be large
                found += line.startswith(b'<article id="sample-%d"' % (found + 1)) and line.endswith(b"</article>\n")
                if found == kept:
                    self.file.truncate(self.file.tell())
                    self.head = ""
                    return
        if kept:
            raise self.lacking(kept, found)
        if os.fstat(self.file.fileno()).st_size:
            raise ValueError(f"{self.path} is there already, and nothing is overwritten: move it, or give html_file "
                             "another name")

    def lacking(self, kept, found):
        """The error for a page that cannot go on where out_file does."""
        return ValueError(f"{self.path} should be the page of this very run and hold its first {kept} samples, as "
                          f"out_file does, and has {found}: leave html_file out, or give both files other names")

    def _write(self, text):
        # What stands before the samples comes with the first: a run that dies earlier leaves the file empty.
        with named(self.path):
            self.file.write((self.head + text).encode())
            self.file.flush()
        self.head = ""


def fill(template, **values):
    """The template with each {{name}} replaced by its value, which may hold anything."""
    return re.sub(r"{{(\w+)}}", lambda name: values[name[1]], template)


def content_hash(page, element):
    """What a Content-Security-Policy calls the text of that element."""
    text = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def title(about):
    """The page's title, which says whose samples these are."""
    return f"Samples from {about.get('model', 'a network')}"


def describe(about):
    """The settings as the terms of an HTML list, their values as Python writes them."""
    return "\n".join(f"<dt>{escape(str(name))}</dt><dd>{escape(repr(value))}</dd>" for name, value in about.items())


def clean(text):
    """The text without what no page can hold: lone surrogates and NUL."""
    return text.encode("utf-8", errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def escape(text):
    """HTML that shows the text, on one line."""
    return html.escape(clean(text)).replace("\r", "&#13;").replace("\n", "&#10;")


def utf16_length(text):
    """How long the text is where the page's script counts."""
    return len(text) + sum(char > "\uffff" for char in text)


def cost(logprob):
    """A log probability in whole thousandths, without its sign: short, and the probability has three digits."""
    return round(min(99999, -1000 * logprob)) # in this order also for NaN
