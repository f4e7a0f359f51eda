"""What values sample.py's settings may have, and which of them make the text."""
import math
import os
import re

# What a sample depends on besides its prompt and the weights.
TEXT = ("num_samples", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed",
        "compile", "context_shift")
# What an interactive session may change.
FREE = "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed", "context_shift"


def check(settings):
    """Raise ValueError where a setting, by name, has a value that cannot work, whoever set it."""
    def must(name, holds, rule):
        """Raise ValueError with the rule and what came, where it does not hold."""
        value = settings[name]
        if not holds(value):
            raise ValueError(f"{rule}; got {value!r:.100}")

    must("init_from", lambda v: v not in ("", "scratch"), "init_from must be 'resume' or a Hugging Face id or folder")
    must("start", bool, "start is empty, and a sample needs something to continue: a newline is --start='\"\\n\"'")
    must("num_samples", lambda v: 1 <= v <= 10**9, "num_samples must be at least 1, and at most a thousand million")
    must("max_new_tokens", lambda v: 0 <= v <= 10**9, "max_new_tokens must be from 0 to a thousand million")
    must("temperature", lambda v: 0 <= v < math.inf, "temperature must be 0 (always the likeliest token) or more")
    must("top_k", lambda v: v is None or v >= 0, "top_k must be at least 1, or None or 0 for every token")
    must("top_p", lambda v: v is None or 0 < v <= 1, "top_p must be above 0 and at most 1, or None for every token")
    must("min_p", lambda v: v is None or 0 <= v <= 1, "min_p must be from 0 to 1, or None for every token")
    must("repetition_penalty", lambda v: 0.01 <= v <= 100,
         "repetition_penalty must be from 0.01 to 100; 1 is none")
    must("stop", lambda v: all(isinstance(text, str) and text for text in stops(v)),
         "stop must be a text, or in a settings file a list of texts, none of them empty, or None")
    must("seed", lambda v: -2**63 <= v < 2**64, "seed must lie between -2**63 and 2**64 - 1")
    must("device", lambda v: re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", v),
         "device must be auto, cpu, cuda, cuda:N or mps")
    must("dtype", lambda v: v in ("auto", "float32", "bfloat16", "float16"),
         "dtype must be auto, float32, bfloat16 or float16")
    must("batch_size", lambda v: v is None or 1 <= v <= 10**5, "batch_size must be from 1 to 100000, or None")
    for name in "out_file", "html_file":
        must(name, lambda v: v is None or (v and "\0" not in v), f"{name} must be the path of a file, or None")
    if settings["out_file"] and settings["html_file"] and same_file(settings["out_file"], settings["html_file"]):
        raise ValueError(f"out_file and html_file must be two files; got {settings['out_file']!r:.100} for both")
    if settings["interactive"] and (settings["out_file"] or settings["html_file"]):
        raise ValueError("interactive=True shows its samples and saves none: leave out_file and html_file out")


def same_file(one, other):
    """Whether two paths are the same file's."""
    return os.path.realpath(one) == os.path.realpath(other)


def of_text(settings):
    """The settings that a sample depends on, by name, each value in the one way to say it."""
    found = {name: settings[name] for name in TEXT}
    if not many(settings["start"]): # else a sample's number says which prompt is its own
        del found["num_samples"]
    return found | {"top_k": found["top_k"] or None, "min_p": found["min_p"] or None, "stop": stops(found["stop"]),
                    "top_p": None if found["top_p"] == 1 else found["top_p"]}


def stops(stop):
    """The setting stop as a list of texts."""
    return stop if isinstance(stop, list) else [] if stop is None else [stop]


def many(start):
    """Whether the setting start stands for many prompts."""
    return start.startswith(("LINES:", "JSONL:"))
