"""Pages of samples, for the tests of their file and of what a browser makes of them."""
import math

from batches import Sample
from page import Page
from prompts import Prompt

ABOUT = {"model": "out-letters", "start": "ROMEO:\n", "top_k": None}
PROBABILITIES = [0.9, 0.3, 0.15, 0.07, 0.03, 0.015, 0.002] # one for each background
HOSTILE = "</script><script>hacked=1</script><!--<script> ]]>'\"></p></article><img src=//evil.test/x onerror=hacked=1>" \
    "<svg onload=hacked=1>&lt;{{text}} <!-- cut here -->\n\r\n\t\x00\x01\x1b\x85\u2028\u202e\u05d0\ud800😀"
SHOWN = HOSTILE.replace("\0", "�").replace("\ud800", "?")


def token(text, probability, **alternatives):
    """A token as Page takes it, the alternatives by name."""
    return text, math.log(probability), [(other, math.log(p)) for other, p in alternatives.items()]


def words(count, seed=0):
    """So many tokens, each with five alternatives and another probability than the last."""
    return [token(f" w{i}", PROBABILITIES[(seed + i) % 7], **{f" w{i}": PROBABILITIES[(seed + i) % 7]},
                  **{f" other{k}": 0.5 / (k + seed + 2) for k in range(4)}) for i in range(count)]


def add(page, number, prompt, tokens, ended):
    """Add a sample of such tokens to the page."""
    texts, looks = [text for text, _, _ in tokens], [tuple(look) for _, *look in tokens]
    page.add(Sample(number, Prompt(prompt), [], [0] * len(tokens), texts, looks, ended))


def write(path, samples, first=0, about=ABOUT, close=True):
    """A page of these samples; each is its tokens."""
    page = Page(path, about, kept=first)
    for number, tokens in enumerate(samples[first:], first):
        add(page, number, "ROMEO:\n", tokens, "length")
    if close:
        page.close()
    else:
        page.file.close()
    return path


SAMPLES = [words(5), [token(HOSTILE, 0.5, **{HOSTILE: 0.5})], words(3, 1), words(2, 2)]
