"""Checks the values of the settings."""
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]


def check_settings(settings: Settings) -> None:
    """Check sample.py's settings, by name. Raises ValueError, which says what is allowed and what was given."""
    require(settings, "init_from", lambda v: v not in ("", "scratch"),
            "init_from must be 'resume' or a Hugging Face id or folder")
    check_tokenizer(settings)
    require(settings, "start", bool,
            "start is empty, but a sample needs a prompt; for a newline pass --start='\"\\n\"'")
    require(settings, "seed", lambda v: v == "random" or isinstance(v, int), "seed must be a whole number, or random")
    check_counts(settings)
    params = dict(settings)
    if params["seed"] == "random":
        params["seed"] = 0 # in place of the number that choose_seed draws later
    check_sampling_params(params)
    check_device(settings)
    check_dtype(settings)
    check_model_options(settings)
    if settings["exact"]:
        check_exact(settings)
    check_outputs(settings)


def check_tokenizer(settings: Settings) -> None:
    """Check the name of the tokenizer. Raises ValueError, which says what is allowed and what was given."""
    require(settings, "tokenizer", lambda v: v is None or (isinstance(v, str) and v and "\0" not in v),
            "tokenizer must be an encoding of tiktoken such as gpt2 or cl100k_base, a tokenizer.json or its folder, a "
            "meta.pkl, or None")


def check_counts(settings: Settings) -> None:
    """Check num_samples and batch_size. Raises ValueError, which says what is allowed and what was given."""
    require(settings, "num_samples", lambda v: is_int(v) and 1 <= v <= 10**9, "num_samples must be from 1 to 10**9")
    require(settings, "batch_size", lambda v: v is None or (is_int(v) and 1 <= v <= 10**5),
            "batch_size must be from 1 to 100000, or None")


def check_model_options(options: Settings) -> None:
    """Check the fields of ModelOptions, by name. Raises ValueError, also if two of them exclude each other."""
    for name in "compile", "cuda_graphs", "exact":
        require(options, name, lambda v: isinstance(v, bool), f"{name} must be True or False")
    require(options, "draft", lambda v: v is None or (isinstance(v, str) and v and "\0" not in v),
            "draft must be int8, the name, folder or file of a model, or None")
    for name in "compile", "exact":
        if options["draft"] and options[name]:
            raise ValueError(f"draft does not work with {name}=True: leave out {name}, or "
                             f"draft={brief_repr(options['draft'])}")
    if options["exact"] and options["compile"]:
        raise ValueError("exact=True does only what nanoGPT does: leave out compile=True, or exact")


def check_device(settings: Settings) -> None:
    """Check the name of the device. Raises ValueError, which says what is allowed."""
    require(settings, "device", lambda v: isinstance(v, str) and re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", v),
            "device must be auto, cpu, cuda, cuda:N or mps")


def check_dtype(settings: Settings) -> None:
    """Check the name of the dtype, and that no other setting excludes it. Raises ValueError with what is allowed."""
    require(settings, "dtype", lambda v: v in ("auto", "float32", "bfloat16", "float16", "int8"),
            "dtype must be auto, float32, bfloat16, float16 or int8")
    for name in "compile", "exact":
        if settings["dtype"] == "int8" and settings.get(name):
            raise ValueError(f"dtype=int8 does not work with {name}=True: leave out one of them")
    if settings["dtype"] == settings.get("draft") == "int8":
        raise ValueError("draft=int8 is the model itself if dtype=int8: leave out draft, or use dtype=float32")


def check_sampling_params(params: Settings) -> None:
    """Check the fields of SamplingParams, by name. Raises ValueError, which says what is allowed and what was given."""
    require(params, "max_new_tokens", lambda v: is_int(v) and 0 <= v <= 10**9, "max_new_tokens must be from 0 to 10**9")
    require(params, "temperature", lambda v: is_number(v) and 0 <= v <= sys.float_info.max,
            "temperature must be 0 (always the most likely token) or a larger finite number")
    require(params, "top_k", lambda v: v is None or (is_int(v) and v >= 0),
            "top_k must be at least 1, or None or 0 for every token")
    require(params, "top_p", lambda v: v is None or (is_number(v) and 0 < v <= 1),
            "top_p must be above 0 and at most 1, or None for every token")
    require(params, "min_p", lambda v: v is None or (is_number(v) and 0 <= v <= 1),
            "min_p must be from 0 to 1, or None for every token")
    require(params, "repetition_penalty", lambda v: is_number(v) and 0.01 <= v <= 100,
            "repetition_penalty must be from 0.01 to 100; 1 means no penalty")
    require(params, "stop", lambda v: v is None or all(isinstance(text, str) and text for text in as_list(v)),
            "stop must be a text or a list of texts, none of them empty, or None")
    require(params, "seed", lambda v: is_int(v) and -2**63 <= v < 2**64, "seed must be between -2**63 and 2**64 - 1")
    require(params, "context_shift", lambda v: isinstance(v, bool), "context_shift must be True or False")
    if "num_logprobs" in params: # not a setting
        require(params, "num_logprobs", lambda v: v is None or (is_int(v) and v >= 0),
                "num_logprobs must be at least 0, or None for no log-probabilities")


def check_exact(settings: Settings) -> None:
    """Check settings or fields of SamplingParams for exact=True. Raises ValueError for what nanoGPT cannot do."""
    allowed = {"top_p": (None, 1), "min_p": (None, 0), "repetition_penalty": (1,), "context_shift": (False,),
               "batch_size": (None, 1)}
    for name, values in allowed.items():
        if name in settings and settings[name] not in values:
            raise ValueError("exact=True does only what nanoGPT does: leave out "
                             f"{name}={brief_repr(settings[name])}, or exact")
    if settings["temperature"] == 0:
        raise ValueError("exact=True does only what nanoGPT does: temperature must be above 0, or leave out exact")


def check_outputs(settings: Settings) -> None:
    """Check the settings of output files. Raises ValueError if a path is not allowed or two settings conflict."""
    for name in "out_file", "html_file":
        require(settings, name, lambda v: v is None or (v and "\0" not in v),
                f"{name} must be the path of a file, or None")
    require(settings, "html_file", lambda v: v != "-", "html_file must be the path of a file; only out_file may be -")
    require(settings, "logprobs", lambda v: v is None or 0 <= v <= 1000,
            "logprobs must be from 0 to 1000, or None to save none")
    out_file, html_file = settings["out_file"], settings["html_file"]
    if out_file and html_file and os.path.realpath(out_file) == os.path.realpath(html_file):
        raise ValueError(f"out_file and html_file must be two files; got {out_file!r:.100} for both")
    if settings["interactive"] and (out_file or html_file):
        raise ValueError("interactive=True saves no samples: leave out_file and html_file out")
    if settings["logprobs"] is not None and not out_file:
        raise ValueError("logprobs are saved in out_file: give out_file too, or leave logprobs out")


def require(settings: Settings, name: str, is_allowed: Callable[[Any], Any], rule: str) -> None:
    """Raise ValueError with the rule and the value, unless the value of this name is allowed."""
    if not is_allowed(settings[name]):
        raise ValueError(f"{rule}; got {brief_repr(settings[name])}")


def brief_repr(value: Any) -> str:
    """The beginning of a value's repr."""
    try:
        return f"{value!r:.100}"
    except ValueError: # Python refuses to print an int of more than 4300 digits, also inside a list
        return f"a {type(value).__name__}"


def is_int(value: Any) -> bool:
    """Whether a value is an int. bool is a subclass of int, but True and False are refused."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float."""
    return is_int(value) or isinstance(value, float)


def as_list(value: Any) -> list:
    """Return a list unchanged, and any other value as a list of one element."""
    return value if isinstance(value, list) else [value]
