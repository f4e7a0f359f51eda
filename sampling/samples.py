"""Prompts, and what comes of them: samples or scores, and their tokens. Imports no torch."""
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or to score."""
    text: str
    id: Any = None # a JSONL file may have one, and other fields: out_file repeats them
    location: str = "" # the file and the line, for messages
    other_fields: Mapping[str, Any] = field(default_factory=dict)

    def located(self, message: str) -> str:
        """A message about this prompt, with its location if it has one."""
        return f"{self.location}: {message}" if self.location else message


class Token(NamedTuple):
    """A token of a text.

    A token that ends inside a character has no text. The token that completes the character has all
    of it.
    """
    id: int
    text: str
    logprob: float | None = None # the natural logarithm of its probability, at temperature 1
    top_logprobs: tuple["Token", ...] = () # the most likely tokens in its place


class Piece(NamedTuple):
    """New text of a sample that no stop text can take back, and how likely the model found it."""
    text: str
    # The sum for the token that the text is from, and for those that began its first character.
    logprob: float | None = None


@dataclass(eq=False)
class Sample:
    """One continuation of a prompt.

    Until it is finished, finish_reason is None and tokens are appended.
    """
    index: int # the number in the run, from 0
    prompt: Prompt
    prompt_ids: list[int]
    already_saved: bool = False # out_file has it, so it is not generated, shown or saved again
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None # "length" or "stop"
    # The continuation, without the stop text and the text after it. It is a property, so that it
    # follows the tokens, and a field, so that dataclasses.asdict and tables of pandas have it.
    text: str = field(init=False, default=property( # type: ignore[assignment] # read, it is a str
        lambda sample: "".join(token.text for token in sample.tokens)))

    def __repr__(self) -> str:
        return (f"Sample(index={self.index}, prompt={self.prompt.text!r:.60}, "
                f"text={self.text!r:.60}, num_tokens={self.num_tokens}, "
                f"finish_reason={self.finish_reason!r}, "
                f"cumulative_logprob={self.cumulative_logprob})")

    @property
    def token_ids(self) -> list[int]:
        """The ids of the sampled tokens, including those of a stop text."""
        return [token.id for token in self.tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if the tokens have none."""
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(logprobs) if len(logprobs) == len(self.tokens) else None


@dataclass(eq=False)
class Score:
    """How likely the model finds a text. Until all of the text is scored, finish_reason is None."""
    prompt_ids: ClassVar[list[int]] = [] # no token comes before the text
    index: int # the number in the run, from 0
    prompt: Prompt # the text
    ids: list[int] # the tokens of the text
    already_saved: bool = False # out_file has it, so it is not scored, shown or saved again
    # As many as were asked for. The first one has no logprob, because no token comes before it.
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None # "length"
    num_tokens: int = 0 # how many were scored: all but the first
    num_bytes: int = 0 # the length of these tokens in UTF-8
    cumulative_logprob: float = 0.0

    def __repr__(self) -> str:
        return (f"Score(index={self.index}, prompt={self.prompt.text!r:.60}, "
                f"num_tokens={self.num_tokens}, num_bytes={self.num_bytes}, "
                f"cumulative_logprob={self.cumulative_logprob})")

    @property
    def nats_per_token(self) -> float:
        """The loss of a training on this text; NaN for a text of a single token."""
        if not self.num_tokens:
            return math.nan
        return 0.0 - self.cumulative_logprob / self.num_tokens


Result = Sample | Score # what comes of a prompt
Updates = Iterator[tuple[Result, list[Piece]]] # the results of a run, each with its new pieces
