"""HTML pages of samples, for the tests of the file and of its display in a browser."""
import math

from sampling.outputs.html import HtmlWriter
from sampling.params import Prompt, Sample, SampleRequest, Token

RUN_INFO = {"model": "out-letters", "start": "ROMEO:\n", "top_k": None}
PROBABILITIES = [0.9, 0.3, 0.15, 0.07, 0.03, 0.015, 0.002] # one for each background colour
HOSTILE = "</script><script>hacked=1</script><!--<script> ]]>'\"></p></article><img src=//evil.test/x onerror=hacked=1>" \
    "<svg onload=hacked=1>&lt;{{text}} <!-- split here -->\n\r\n\t\x00\x01\x1b\x85\u2028\u202e\u05d0\ud800😀"
SHOWN = HOSTILE.replace("\0", "\ufffd").replace("\ud800", "?")


def make_token(text, probability, **alternatives):
    """A token. alternatives are the texts and probabilities of the most likely tokens."""
    return Token(0, text, math.log(probability), tuple((other, math.log(p)) for other, p in alternatives.items()))


def make_tokens(count, seed=0):
    """count tokens with five alternatives each. The probability changes from token to token."""
    return [make_token(f" w{i}", PROBABILITIES[(seed + i) % 7], **{f" w{i}": PROBABILITIES[(seed + i) % 7]},
                  **{f" other{k}": 0.5 / (k + seed + 2) for k in range(4)}) for i in range(count)]


def finished_sample(index, prompt, tokens, finish_reason="length"):
    """A finished sample with these tokens."""
    return Sample(SampleRequest(index, Prompt(prompt), []), tokens, finish_reason)


def write_page(path, samples, num_saved=0, run_info=RUN_INFO, close=True):
    """Write a page of these samples, each a list of tokens. close=False leaves the page as a killed run does.

    num_saved: how many of them out_file holds; None without an out_file.
    """
    writer = HtmlWriter(path, run_info, num_saved)
    for index, tokens in enumerate(samples[num_saved or 0:], num_saved or 0):
        writer.write(finished_sample(index, "ROMEO:\n", tokens))
    if close:
        writer.close()
    else:
        writer.file.close()
    return path


SAMPLES = [make_tokens(5), [make_token(HOSTILE, 0.5, **{HOSTILE: 0.5})], make_tokens(3, 1), make_tokens(2, 2)]
