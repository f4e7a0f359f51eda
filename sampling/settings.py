"""The rules of the settings, and the parameters that are made of them. Imports no torch."""
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from operator import and_
from typing import Any, NamedTuple

from sampling.torchrun import world_size
from sampling.values import as_list, as_plain

logger = logging.getLogger(__name__)
Settings = Mapping[str, Any]
Predicate = Callable[[Any], Any] # says whether a value is allowed
# The settings that are paths.
PATHS = "init_from", "out_dir", "model_file", "tokenizer", "out_file", "html_file"
NUM_ALTERNATIVES = 5 # how many of the most likely tokens the page shows for each token
# How many tokens of a text are saved or shown: with alternatives, they take ten megabytes or more.
MAX_SCORED_TOKENS = 100_000
# The fields of a line in out_file, besides those of the prompt.
RESULT_FIELDS = frozenset(["version", "index", "prompt_index", "sample_index", "text", "num_tokens",
                           "num_bytes", "finish_reason", "cumulative_logprob", "logprobs", "seed",
                           "checkpoint", "settings"])


class SettingError(ValueError):
    """A value is not allowed, or settings exclude each other. names: of the settings at fault."""
    def __init__(self, message: str, *names: str):
        super().__init__(message)
        self.names = names


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float. bool is a subclass of int, but is no number here."""
    return type(value) in (int, float)


def is_nonempty_text(value: Any) -> bool:
    """Whether a value is a text, not empty, and without a null byte, which no path may have."""
    return isinstance(value, str) and value != "" and "\0" not in value


def whole_number(lowest: int, highest: float = math.inf) -> Predicate:
    return lambda value: type(value) is int and lowest <= value <= highest


def is_same_file(path: str | None, other: str | None) -> Any:
    return path and other and os.path.realpath(path) == os.path.realpath(other)


def optional(is_allowed: Predicate) -> Predicate:
    return lambda value: value is None or is_allowed(value)


TRUE_OR_FALSE = (lambda v: isinstance(v, bool), "must be True or False")
# Setting or field -> which values it takes, and how to say so.
RULES: dict[str, tuple[Predicate, str]] = {
    "init_from": (lambda v: v not in ("", "scratch"),
                  "must be 'resume' or a Hugging Face id or folder"),
    "name": (is_nonempty_text, "must be a folder, a file or a Hugging Face id"),
    "tokenizer": (optional(is_nonempty_text),
                  "must be an encoding of tiktoken such as gpt2 or cl100k_base, a tokenizer.json "
                  "or its folder, a meta.pkl, or None"),
    "model_file": (optional(is_nonempty_text), "must be the path of a model.py, nanogpt, or None"),
    "start": (bool, "is empty, but a sample needs a prompt; for a newline pass --start='\"\\n\"'"),
    "num_samples": (whole_number(1, 10**9), "must be from 1 to 10**9"),
    "max_new_tokens": (whole_number(0, 10**9), "must be from 0 to 10**9"),
    "temperature": (lambda v: is_number(v) and 0 <= v <= sys.float_info.max,
                    "must be 0 (always the most likely token) or a larger finite number"),
    "top_k": (optional(whole_number(0, 10**9)),
              "must be from 1 to 10**9, or None or 0 for every token"),
    "top_p": (optional(lambda v: is_number(v) and 0 < v <= 1),
              "must be above 0 and at most 1, or None for every token"),
    "min_p": (optional(lambda v: is_number(v) and 0 <= v <= 1),
              "must be from 0 to 1, or None for every token"),
    "repetition_penalty": (lambda v: is_number(v) and 0.01 <= v <= 100,
                           "must be from 0.01 to 100; 1 means no penalty"),
    "stop": (lambda v: all(isinstance(text, str) and text for text in as_list(v)),
             "must be a text or a list of texts, none of them empty, or None"),
    "seed": (lambda v: v == "random" or whole_number(-2**63, 2**64 - 1)(v),
             "must be a whole number from -2**63 to 2**64 - 1, or random"),
    "device": (lambda v: isinstance(v, str) and re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", v),
               "must be auto, cpu, cuda, cuda:N or mps"),
    "dtype": (lambda v: v in ("auto", "float32", "bfloat16", "float16", "int8"),
              "must be auto, float32, bfloat16, float16 or int8"),
    "compile": TRUE_OR_FALSE,
    "cuda_graphs": TRUE_OR_FALSE,
    "draft": TRUE_OR_FALSE,
    "context_shift": TRUE_OR_FALSE,
    "batch_size": (optional(whole_number(1, 10**5)), "must be from 1 to 100000, or None"),
    "out_file": (optional(lambda v: is_nonempty_text(v)
                          and not re.search(r"\.(gz|bz2|xz|zst|zip)$", v)),
                 "must be the path of a file that is not compressed, such as a.jsonl, or None"),
    "logprobs": (optional(whole_number(0, 1000)), "must be from 0 to 1000, or None to save none"),
    "num_logprobs": (optional(whole_number(0)),
                     "must be at least 0, or None for no log-probabilities"),
    "html_file": (optional(lambda v: is_nonempty_text(v) and v != "-"),
                  "must be the path of a file, or None; - is not allowed"),
}


class Conflict(NamedTuple):
    """Settings that exclude each other."""
    names: tuple[str, ...]
    applies: Callable[..., Any] # to their values
    remedy: str


CONFLICTS = [
    Conflict(("dtype", "compile"), lambda dtype, compile: dtype == "int8" and compile,
             "dtype=int8 does not work with compile=True: leave out one of them"),
    Conflict(("model_file", "dtype"),
             lambda path, dtype: path not in (None, "nanogpt") and dtype == "int8",
             "dtype=int8 needs nanoGPT's own model: leave out dtype, or model_file"),
    Conflict(("model_file", "init_from"), lambda path, source: path and source != "resume",
             "model_file is for a ckpt.pt: leave out init_from, or model_file"),
    Conflict(("out_file", "html_file"), is_same_file, "out_file and html_file must be two files"),
    Conflict(("watch", "init_from"), lambda watch, source: watch and source != "resume",
             "watch=True waits for a ckpt.pt that train.py saves: leave out init_from, or watch"),
    Conflict(("watch", "interactive"), and_,
             "watch=True does not work with interactive=True: in a session, type :reload"),
    Conflict(("watch", "interactive"), lambda *values: any(values) and world_size() > 1,
             "interactive=True and watch=True need a single process: run it without torchrun"),
    Conflict(("score", "interactive"), and_,
             "score=True does not work with interactive=True: in a session, type :score"),
    Conflict(("interactive", "flags", "num_samples"), # in a file, it is for other runs
             lambda session, flags, count: session and "num_samples" in flags and count > 1,
             "interactive=True prints one sample for each prompt: leave out num_samples, and type "
             ":again for another"),
    Conflict(("interactive", "out_file", "html_file", "logprobs"),
             lambda session, *others: session and {*others} != {None},
             "interactive=True saves no samples: leave out out_file, html_file and logprobs; in a "
             "session, type :save FILE, or :show_probs"),
    Conflict(("logprobs", "out_file"), lambda number, path: number is not None and not path,
             "logprobs are saved in out_file: give out_file too, or leave logprobs out"),
]

ALIASES = { # names of Hugging Face, llama.cpp, vLLM, OpenAI and gpt-2-simple -> what to suggest
    "p": "start",
    "prompt": "start",
    "prefix": "start",
    "m": "out_dir or init_from",
    "model": "out_dir or init_from",
    "ckpt": "out_dir",
    "checkpoint": "out_dir",
    "n": "num_samples or max_new_tokens",
    "num_return_sequences": "num_samples",
    "nsamples": "num_samples",
    "n_predict": "max_new_tokens",
    "length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "truncate": "stop",
    "s": "seed",
    "o": "out_file",
}
# Names that only nanoGPT's train.py has -> a setting that means something else there.
FOREIGN = dict.fromkeys(["learning_rate", "max_iters", "eval_iters"], "batch_size")


def check_values(values: Settings) -> None:
    """Check that each value, in its plain form, keeps its rule. Names without one are not checked.
    """
    for name, (is_allowed, rule) in RULES.items():
        if name in values and not is_allowed(values[name]):
            raise SettingError(f"{name} {rule}; got {values[name]!r:.100}", name)


def check_settings(settings: Settings, flags: Collection[str] = ()) -> None:
    """Check the settings of sample.py. flags: those that the command line names.

    With score, a flag that only sampling has is an error; in a file, such a setting is ignored.
    """
    if settings["score"]:
        useless = [name for name in SAMPLING_SETTINGS if name in flags]
        if useless:
            raise SettingError("score=True generates no samples: leave out score, or "
                               f"{' and '.join(useless)}", "score")
        settings = {name: value for name, value in settings.items()
                    if name not in SAMPLING_SETTINGS}
    check_options({**settings, "flags": flags})
    source = settings["init_from"]
    if (source != "resume" and "init_from" not in flags
            and os.path.isfile(os.path.join(settings["out_dir"], "ckpt.pt"))):
        logger.warning(f"a settings file has init_from={source!r:.100}, so the samples are not "
                       "those of the ckpt.pt in out_dir: pass --init_from=resume for them")


def check_options(options: Settings) -> None:
    """Check the settings that are given: a Python program gives only those of the model."""
    check_values(options)
    for names, applies, remedy in CONFLICTS:
        if options.keys() >= {*names} and applies(*(options[name] for name in names)):
            raise SettingError(remedy, *names)


def choose_seed(seed: int | str) -> int:
    """Return the seed that the setting asks for. For "random", draw one and log it."""
    if isinstance(seed, str): # "random"
        seed = int.from_bytes(os.urandom(4), "big")
        logger.info(f"seed: {seed}, drawn at random; seed={seed} gives the same samples again")
    return seed


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled: sample.py's settings of the same name."""
    max_new_tokens: int = 500
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    seed: int | str = 1337 # "random" becomes a new number
    context_shift: bool = False
    # 0: log-probabilities of the sampled tokens; n: also of the n most likely ones.
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        # The instance is frozen: only vars() can change it.
        vars(self).update(as_plain(vars(self)))
        check_values(vars(self))
        vars(self)["seed"] = choose_seed(self.seed)

    @property
    def stop_texts(self) -> list[str]:
        return as_list(self.stop)


@dataclass(frozen=True)
class ScoringParams:
    num_logprobs: int = 0 # how many of the most likely tokens in the place of each one
    max_tokens: int = 10**9 # to keep of a text. All are scored, but a book has a million


def expand_home(path: Any) -> Any:
    """A path as text, with the home folder for a leading ~, unless a file is called so; other
    values as they are. In --out_dir=~/x, no shell does it.
    """
    path = as_plain(path)
    if not isinstance(path, str) or os.path.lexists(path):
        return path
    return os.path.expanduser(path)


def complete_settings(settings: Settings) -> dict[str, Any]:
    """The final form of checked settings: with expanded paths, a seed that is a number, one score
    for each prompt, and the log-probabilities that the page needs.
    """
    complete = dict(settings)
    for name in PATHS: # start has its own: see parse_start
        complete[name] = expand_home(settings[name])
    complete["seed"] = choose_seed(settings["seed"])
    if settings["score"]:
        complete["num_samples"] = 1
    if settings["html_file"]:
        complete["logprobs"] = max(NUM_ALTERNATIVES, settings["logprobs"] or 0)
    return complete


def choose_params(settings: Settings) -> SamplingParams | ScoringParams:
    """What to do with the prompts. settings: as complete_settings returns them."""
    num_logprobs = settings["logprobs"]
    if settings["score"]:
        needs_tokens = num_logprobs is not None or settings["show_probs"]
        return ScoringParams(num_logprobs or 0, MAX_SCORED_TOKENS if needs_tokens else 0)
    if num_logprobs is None and (settings["out_file"] or settings["show_probs"]):
        num_logprobs = 0
    values = {f.name: settings[f.name] for f in fields(SamplingParams) if f.name in settings}
    return SamplingParams(**values, num_logprobs=num_logprobs)


# The settings that scoring does not have. num_logprobs is not one: scores have it too.
SAMPLING_SETTINGS = ["num_samples", "draft"]
SAMPLING_SETTINGS += [f.name for f in fields(SamplingParams) if f.name != "num_logprobs"]


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded and runs: sample.py's settings of the same name."""
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: str | None = None
    model_file: str | None = None
    compile: bool = False
    cuda_graphs: bool = True
    draft: bool = True

    def __post_init__(self) -> None:
        vars(self).update(as_plain(vars(self)))
