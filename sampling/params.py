"""The types that the parts of the package exchange: parameters, prompts, requests and samples."""
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from sampling.log import Log
from sampling.validation import as_list, check_model_options, check_sampling_params


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. Fields mean the same as sample.py's settings of the same name.

    Raises ValueError if a value is not allowed.
    """
    max_new_tokens: int = 500
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: str | list | None = None
    seed: int = 1337
    context_shift: bool = False
    num_logprobs: int | None = None # 0: log-probabilities of the sampled tokens; n: also of the n most likely ones

    def __post_init__(self):
        check_sampling_params(vars(self))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], num_logprobs: int | None) -> "SamplingParams":
        """Take the parameters from sample.py's settings, which also have other names."""
        shared = {f.name: settings[f.name] for f in fields(cls) if f.name in settings}
        return cls(**shared, num_logprobs=num_logprobs)

    @property
    def stop_texts(self) -> list[str]:
        """stop as a list of texts."""
        return [] if self.stop is None else as_list(self.stop)


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs. Fields mean the same as sample.py's settings of the same name.

    Raises ValueError if two of the options exclude each other.
    """
    compile: bool = False
    cuda_graphs: bool = True
    exact: bool = False
    draft: str | None = None

    def __post_init__(self):
        check_model_options(vars(self))


def choose_seed(seed: int | str, log: Log) -> int:
    """Return the seed that the setting asks for. For "random", draw one and log it."""
    if seed != "random":
        return seed
    drawn = int.from_bytes(os.urandom(4), "big")
    log(f"seed: {drawn}, drawn at random; --seed={drawn} gives the same samples again")
    return drawn


@dataclass(frozen=True)
class Prompt:
    """A text to continue. location is its file and line, for error messages. A JSONL file may also have an id and other
    fields for it, which out_file repeats."""
    text: str
    id: Any = None
    location: str = ""
    other_fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate. index is its number in the run, from 0."""
    index: int
    prompt: Prompt
    prompt_ids: list[int]
    already_saved: bool = False # out_file already holds it: it is not shown or saved again


class Token(NamedTuple):
    """A sampled token. Its text is empty if it ends inside a character: a later token has the whole character."""
    id: int
    text: str
    logprob: float | None = None # natural logarithm of its probability under the model itself, at temperature 1
    top_logprobs: tuple[tuple[str, float], ...] = () # (text, logprob) of the most likely tokens


@dataclass(eq=False)
class Sample:
    """One continuation of a prompt. Until it is finished, finish_reason is None and tokens are appended."""
    request: SampleRequest
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None # "length" or "stop"
    num_emittable_chars: int = 0 # this much of text is final: a stop text may begin in the rest

    @property
    def index(self) -> int:
        """The sample's number in the run, from 0."""
        return self.request.index

    @property
    def prompt(self) -> Prompt:
        """The text that it continues."""
        return self.request.prompt

    @property
    def token_ids(self) -> list[int]:
        """The ids of the sampled tokens, including those of a stop text."""
        return [token.id for token in self.tokens]

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return len(self.tokens)

    @property
    def text(self) -> str:
        """The continuation, without the stop text and the text after it."""
        return "".join(token.text for token in self.tokens)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if the tokens have none."""
        logprobs = [token.logprob for token in self.tokens]
        return None if None in logprobs else sum(logprobs)


class TextCursor:
    """Reads the text of an unfinished sample, each character once."""

    def __init__(self, sample: Sample):
        self.sample = sample
        self.num_read = 0 # characters
        self.token_index = self.offset = 0 # of the next character: its token, its position in the token's text

    def read(self) -> Iterator[tuple[str, int]]:
        """Yield the emittable text that was not read before, in parts: (text, the index of its token)."""
        while self.num_read < self.sample.num_emittable_chars:
            token = self.sample.tokens[self.token_index]
            text = token.text[self.offset:self.offset + self.sample.num_emittable_chars - self.num_read]
            if text:
                yield text, self.token_index
            self.num_read, self.offset = self.num_read + len(text), self.offset + len(text)
            if self.offset == len(token.text):
                self.token_index, self.offset = self.token_index + 1, 0
