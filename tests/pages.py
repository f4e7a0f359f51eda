"""Samples, their lines and their pages, for the tests of the files and of a browser's display."""
import math
from types import SimpleNamespace

from project import SCRIPT
from sampling.configurator import find_settings
from sampling.outputs import html
from sampling.outputs.jsonl import Run
from sampling.samples import Prompt, Sample, Token

CHECKPOINT_ID = {"path": "out-letters/ckpt.pt", "crc32": "00000000", "iter_num": 100,
                 "val_loss": 1.5}
DEFAULTS = {name: setting.default for name, setting in find_settings(SCRIPT).items()}
SETTINGS = DEFAULTS | dict(num_samples=2, top_k=None, seed=1)
PROBABILITIES = [0.9, 0.3, 0.15, 0.07, 0.03, 0.015, 0.002] # one for each background colour
HOSTILE = ("</script><script>hacked=1</script><!--<script> ]]>'\"></p></article>"
           "<img src=//evil.test/x onerror=hacked=1><svg onload=hacked=1>"
           "&lt;{{text}} <!-- split here -->"
           "\n\r\n\t\x00\x01\x1b\x85\u2028\u202e\u05d0\ud800😀")
SHOWN = HOSTILE.replace("\0", "\ufffd").replace("\ud800", "?")


def make_token(text, probability, **alternatives):
    """A token. alternatives are the texts and probabilities of the most likely tokens."""
    top = [Token(i, other, math.log(p)) for i, (other, p) in enumerate(alternatives.items())]
    return Token(0, text, math.log(probability), tuple(top))


def make_tokens(count, seed=0):
    """count tokens with five alternatives each. The probability changes from token to token."""
    others = {f"other{k}": 0.5 / (k + seed + 2) for k in range(4)}
    tokens = []
    for i in range(count):
        text = f" w{i}"
        probability = PROBABILITIES[(seed + i) % 7]
        tokens.append(make_token(text, probability, **{text: probability}, **others))
    return tokens


def finished_sample(index, prompt, tokens, id=None):
    return Sample(index, Prompt(prompt, id), [], tokens=tokens, finish_reason="length")


class CodePointTokenizer:
    def fingerprint(self):
        return ""

    def decode(self, ids):
        return "".join(map(chr, ids))


def model_of(crc32="00000000", iter_num=100):
    """What Outputs needs of a TextGenerator."""
    checkpoint = SimpleNamespace(path="out/ckpt.pt", crc32=crc32, iter_num=iter_num, val_loss=1.5,
                                 describe=lambda: f"iteration {iter_num}")
    backend = SimpleNamespace(device=SimpleNamespace(type="cpu"), dtype_name="float32")
    return SimpleNamespace(checkpoint=checkpoint, tokenizer=CodePointTokenizer(), backend=backend)


def write_lines(path, samples, logprobs=5, prompt="ROMEO:\n", id=None,
                checkpoint=CHECKPOINT_ID, **settings):
    """Write the lines of these samples, each a list of tokens, as a run with these settings does.

    checkpoint: what differs from CHECKPOINT_ID. Returns path.
    """
    settings = {"seed": 1, "temperature": 0.8, **settings}
    if logprobs is not None:
        settings["logprobs"] = logprobs
    run = Run(CHECKPOINT_ID | checkpoint, settings)
    lines = [run.line(finished_sample(i, prompt, samples[i], id)) for i in range(len(samples))]
    path.write_bytes(b"".join(lines))
    return path


def make_page(path, *files):
    html.write_page(path, list(map(str, files)))
    return path


def write_page(path, samples, **run):
    """Write a page of these samples, each a list of tokens, of a run with these settings.

    Returns path.
    """
    return make_page(path, write_lines(path.with_suffix(".jsonl"), samples, **run))
