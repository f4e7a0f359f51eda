"""TextGenerator, a model that is ready to generate text. sample.py, its session and sampling.load
all use it.
"""
import logging
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, overload

import torch

from sampling.backends.backend import Backend, return_freed_memory
from sampling.backends.backend_choice import choose_device, choose_dtype, prepare_backend
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.checkpoints.finding import is_huggingface
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.model_source import NANOGPT
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.generation.engine import Engine
from sampling.generation.scoring import score_texts
from sampling.inputs.prompts import make_samples
from sampling.inputs.tokenizer import Tokenizer
from sampling.inputs.tokenizer_choice import load_tokenizer
from sampling.process import check_fork, system_interrupts
from sampling.samples import Prompt, Sample, Score, Updates
from sampling.settings import ALIASES, ModelOptions, SamplingParams, ScoringParams, check_values
from sampling.values import as_plain, suggest

logger = logging.getLogger(__name__)


class TextGenerator:
    """A model with its tokenizer on its device. Several threads may use it at once.

    Its methods raise ValueError if a text is empty, if the tokenizer cannot encode it, or if a
    number is not allowed; TypeError if a text is not a str, or if params are of another type.
    """
    # A session has many prompts, but each of these messages comes once.
    has_announced_window = False
    checked_stops: Sequence[str] = () # the latest stop texts

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, backend: Backend):
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.backend = backend

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model cannot be pickled: call sampling.load in each process")

    def __repr__(self) -> str:
        return f"<{self.checkpoint.path}: {self.backend.describe()}>"

    def generate(self, prompts: str | Iterable[str], params: SamplingParams | None = None,
                 num_samples: int = 1, batch_size: int | None = None,
                 **settings: Any) -> list[Sample]:
        """Generate num_samples samples for each prompt, in order.

        batch_size=None: the backend decides. settings: fields of SamplingParams, in place of those
        of params.
        """
        check_values(as_plain({"num_samples": num_samples, "batch_size": batch_size}))
        samples = list(make_samples(self.prompts_of(prompts), self.tokenizer, num_samples))
        for _ in self.run(samples, with_settings(params, settings), batch_size):
            pass
        return samples

    def stream(self, prompt: str, params: SamplingParams | None = None,
               **settings: Any) -> Generator[str, None, None]:
        """Yield the text of one sample in parts, while it is generated. settings: as for generate.

        Its method close ends the sample.
        """
        samples = list(make_samples(self.prompts_of([prompt]), self.tokenizer))
        steps = self.run(samples, with_settings(params, settings), stream=True)
        texts = ("".join(piece.text for piece in pieces) for _, pieces in steps)
        return (text for text in texts if text)

    @overload # a str is an Iterable[str], too
    def score( # type: ignore[overload-overlap]
            self, text: str, num_logprobs: int = 0) -> Score: ...

    @overload
    def score(self, text: Iterable[str], num_logprobs: int = 0) -> list[Score]: ...

    def score(self, text: str | Iterable[str], num_logprobs: int = 0) -> Score | list[Score]:
        """How likely the model finds each token of a text, and num_logprobs of the most likely
        tokens in its place. For several texts, a list of their scores.
        """
        check_values(as_plain({"num_logprobs": num_logprobs}))
        scores = list(make_samples(self.prompts_of(text), self.tokenizer, is_score=True))
        for _ in self.run(scores, ScoringParams(num_logprobs or 0)):
            pass
        return scores[0] if isinstance(text, str) else scores

    def prompts_of(self, prompts: str | Iterable[str]) -> list[Prompt]:
        """The texts as prompts. An error names the one that it is about."""
        is_one = isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable)
        texts = [prompts] if is_one else list(prompts)
        located = []
        for i, text in enumerate(texts):
            prompt = Prompt(as_plain(text), location=f"prompts[{i}]" if len(texts) > 1 else "")
            if not isinstance(text, str):
                raise TypeError(prompt.located(f"a prompt must be a str; got {text!r:.100}"))
            if not text:
                raise ValueError(prompt.located("a prompt is empty, but a sample needs something "
                                                "to continue, such as a newline"))
            located.append(prompt)
        return located

    def run(self, samples: Iterable[Any], params: SamplingParams | ScoringParams,
            batch_size: int | None = None, stream: bool = False) -> Updates:
        """Generate samples, or score them: see Engine.generate and score_texts.

        Yields each with its new text.
        """
        check_fork()
        if isinstance(params, ScoringParams):
            return score_texts(self.backend, self.tokenizer, samples, params, batch_size)
        self.check_params(params)
        engine = Engine(self.checkpoint, self.tokenizer, self.backend, params, batch_size, stream)
        return engine.generate(self.announce(samples, params))

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError if this model cannot be sampled so. Warns of useless stop texts."""
        if params.context_shift and not self.backend.has_cache:
            raise ValueError("context_shift=True shortens a cache, but the model of model_file "
                             "runs itself, without one: leave out context_shift")
        if params.stop_texts != self.checked_stops:
            self.checked_stops = params.stop_texts
            self.warn_about_stops()

    def announce(self, samples: Iterable[Sample], params: SamplingParams) -> Iterator[Sample]:
        """Yield the samples. Says what the user may not expect of the new ones."""
        is_crop_announced = False
        for sample in samples:
            if not sample.already_saved:
                is_crop_announced = is_crop_announced or self.announce_crop(sample)
                self.announce_window(sample, params)
            yield sample

    def announce_crop(self, sample: Sample) -> bool:
        """Whether the model does not see all of a prompt, which a line then says."""
        num_ids = len(sample.prompt_ids)
        block_size = self.backend.config.block_size
        if num_ids > block_size:
            seen = self.tokenizer.decode(sample.prompt_ids[-block_size:])[:40]
            logger.info(sample.prompt.located(
                f"the prompt has {num_ids} tokens, but the model sees only the last {block_size} "
                f"of any, here from {seen!r} on"))
        return num_ids > block_size

    def announce_window(self, sample: Sample, params: SamplingParams) -> None:
        """Say once that a sample gets slow past block_size, and what helps."""
        block_size = self.backend.config.block_size
        can_shift = self.backend.has_cache and not params.context_shift
        length = min(block_size, len(sample.prompt_ids)) + params.max_new_tokens
        if can_shift and length > block_size and not self.has_announced_window:
            self.has_announced_window = True
            logger.info(f"past {block_size} tokens, each token recomputes the whole window, as in "
                        "nanoGPT; pass context_shift=True to drop the older half of a full window "
                        "instead: much faster, but other text")

    def warn_about_stops(self) -> None:
        for text in self.checked_stops:
            composed = unicodedata.normalize("NFC", text)
            if text != composed:
                logger.warning(f"the stop text {text!a:.100} is decomposed (NFD); most texts have "
                               f"{composed!a:.100}")
            if "\\n" in text:
                logger.warning(f"the stop text {text!r:.100} has a backslash and the letter n; if "
                               "you mean a newline, write the text in quotes, as Python does: "
                               "--stop='\"\\n\"' in a shell, :stop=\"\\n\" in a session")
            elif missing := self.tokenizer.missing_from(text):
                logger.warning(f"the stop text {text!r:.100} never occurs: "
                               f"{self.tokenizer.source} lacks {min(missing)!r}")


def with_settings(params: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    """The params, by default all defaults, with other values of some fields."""
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be a SamplingParams; got {params!r:.100}")
    for name in settings.keys() - vars(params):
        raise TypeError(f"{name} is no field of SamplingParams"
                        f"{suggest(name, vars(params), ALIASES)}")
    return replace(params, **settings)


def load_model(setting: str, name: str, options: ModelOptions,
               is_short: bool = False) -> TextGenerator:
    """Load the ckpt.pt or the model of Hugging Face that a setting names, with its tokenizer.

    setting: see is_huggingface. is_short: see is_short_run. Raises ValueError or OSError if there
    is no such model, or if it cannot be used here.
    """
    is_of_hub = is_huggingface(setting, name)
    if is_of_hub and options.model_file:
        raise ValueError(f"model_file is for a ckpt.pt, but {name} is a Hugging Face model: leave "
                         "it out")
    runs_itself = options.model_file not in (None, NANOGPT)
    return_freed_memory() # that of the model before this one
    device = choose_device(options.device)
    dtype = choose_dtype(device, options.dtype, runs_itself)
    # In the caller's inference mode, the weights could not be used outside of it; nor on the
    # caller's default device.
    with torch.inference_mode(False), torch.device("cpu"):
        with system_interrupts(): # a stranger's file may keep Python busy for minutes
            if is_of_hub:
                checkpoint = load_huggingface(name, dtype)
            else:
                checkpoint = load_nanogpt(name, dtype, options.model_file)
            tokenizer = load_tokenizer(checkpoint, options.tokenizer)
        backend = prepare_backend(checkpoint, device, dtype, options, is_short)
    logger.info(backend.describe())
    return TextGenerator(checkpoint, tokenizer, backend)
