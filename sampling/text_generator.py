"""TextGenerator, a model that is ready to generate text. sample.py, its session and sampling.load all use it."""
import logging
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch

from sampling.backends.backend import Backend, num_step_weights
from sampling.backends.prepare import has_numba, prepare_backend
from sampling.checkpoints.build import Checkpoint
from sampling.configurator import plain
from sampling.generation.engine import Engine
from sampling.generation.scoring import score_texts
from sampling.inputs.prompts import EncodedPrompt, encode_prompts, make_samples
from sampling.inputs.tokenizer import Tokenizer
from sampling.params import ModelOptions, Piece, Prompt, Sample, SamplingParams, Score, ScoringParams, check_values
from sampling.process import check_fork

logger = logging.getLogger(__name__)
MIN_DRAFT_WEIGHTS = 50_000_000 # of a model whose steps wait for memory
MIN_DRAFT_TOKENS = 100 # of a sample that pays for the copy
DEFAULT_OPTIONS, DEFAULT_PARAMS = ModelOptions(), SamplingParams()


class TextGenerator:
    """A model with its tokenizer on its device. Several threads may use it at once. It uses the checkpoint's weights.

    num_steps: about how many decode steps it will run; None: unknown, or many. Raises ValueError or OSError if an
    option cannot be used. Its methods raise ValueError if a text is empty, if the tokenizer cannot encode it, or if a
    number is not allowed; TypeError if a text is not a str, or if params are of another type.
    """
    has_announced_window = False # that the window moves, which takes long: once, not for each prompt of a session
    checked_stops = () # the latest stop texts: their warnings come once, too

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype,
                 options: ModelOptions = DEFAULT_OPTIONS, num_steps: int | None = None):
        self.checkpoint, self.tokenizer, self.device, self.dtype = checkpoint, tokenizer, device, dtype
        shapes = {id(weight): weight.shape for weight in checkpoint.state_dict.values()} # a tied head once
        self.num_params = sum(map(math.prod, shapes.values()))
        self.backend = prepare_backend(checkpoint, device, dtype, options, num_steps)
        self.draft, self.may_draft, self.draft_lock = None, options.draft, threading.RLock()
        logger.info(f"{self.num_params / 1e6:.2f}M parameters on {device} in {self.dtype_name}")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def draft_for(self, num_tokens: int) -> Backend | None:
        """The draft for so many tokens of a single sample, if any. It is made when it pays for the first time."""
        with self.draft_lock:
            if (self.may_draft and self.backend.can_copy_to_int8 and num_tokens >= MIN_DRAFT_TOKENS
                    and num_step_weights(self.backend.config) >= MIN_DRAFT_WEIGHTS):
                self.may_draft = False
                if has_numba(is_required=False): # the working directory may be another one now
                    self.draft = self.backend.int8_copy()
                    logger.info("draft: a copy of the model in int8")
        return self.draft

    @contextmanager
    def inference(self) -> Iterator[None]:
        """The context of each step: without gradients, under autocast for half precision, and outside of the caller's
        inference mode, because its tensors could not be changed elsewhere.
        """
        has_device = torch.get_default_device().type != "cpu" # of the caller; ours is named, or the CPU
        is_half = self.dtype in (torch.bfloat16, torch.float16)
        with (torch.inference_mode(False), torch.no_grad(), torch.device("cpu") if has_device else nullcontext(),
              torch.autocast(self.device.type, self.dtype if is_half else None, enabled=is_half)):
            yield

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model cannot be pickled: call sampling.load in each process")

    def __repr__(self) -> str:
        size = f"{self.num_params / 1e6:.2f}M parameters"
        return f"<{self.checkpoint.path}: {size} on {self.device} in {self.dtype_name}>"

    def generate(self, prompts: str | list[str], params: SamplingParams | None = None, num_samples: int = 1,
                 batch_size: int | None = None, **settings: Any) -> list[Sample]:
        """Generate num_samples samples for each prompt, in order. batch_size=None: the backend decides.
        settings: fields of SamplingParams, in place of those of params.
        """
        check_values({"num_samples": num_samples, "batch_size": batch_size})
        samples = make_samples(self.encode(prompts), num_samples)
        return [sample for sample, _ in self.run(samples, params, batch_size, **settings) if sample.finish_reason]

    def stream(self, prompt: str, params: SamplingParams | None = None, **settings: Any) -> Iterator[str]:
        """Yield the text of one sample in parts, while it is generated. settings: as for generate."""
        steps = self.run(make_samples(self.encode([prompt]), 1), params, batch_size=1, stream=True, **settings)
        return (text for _, pieces in steps if (text := "".join(piece.text for piece in pieces)))

    def score(self, text: str, num_logprobs: int = 0) -> Score:
        """How likely the model finds each token of a text, and num_logprobs of the most likely tokens in its place."""
        check_values({"num_logprobs": num_logprobs})
        *_, (score, _) = self.run(make_samples(self.encode([text]), 1, is_score=True), ScoringParams(num_logprobs or 0))
        return score

    def encode(self, prompts: str | Iterable[str]) -> list[EncodedPrompt]:
        is_one = isinstance(prompts, str) or not isinstance(prompts, Iterable)
        texts = [prompts] if is_one else list(prompts)
        located = []
        for i, text in enumerate(texts):
            location = f"prompts[{i}]" if len(texts) > 1 else ""
            where = location and f"{location}: "
            if not isinstance(text, str):
                raise TypeError(f"{where}a prompt must be a str; got {text!r:.100}")
            if not text:
                raise ValueError(f"{where}a prompt is empty, but a sample needs something to continue, such as a "
                                 "newline")
            located.append(Prompt(plain(text), location=location))
        return list(encode_prompts(located, self.tokenizer))

    def run(self, samples: Iterable[Sample], params: SamplingParams | ScoringParams | None = None,
            batch_size: int | None = None, stream: bool = False,
            **settings: Any) -> Iterator[tuple[Sample, list[Piece]]]:
        """Generate samples, or score them: see Engine.generate and score_texts. Yields each with its new text."""
        check_fork()
        params = DEFAULT_PARAMS if params is None else params
        if isinstance(params, ScoringParams):
            return score_texts(self, samples, params, batch_size)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be a SamplingParams; got {params!r:.100}")
        params = replace(params, **settings)
        self.check_params(params)
        return Engine(self, params, batch_size, stream).generate(samples)

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError if this model cannot be sampled so."""
        if params.context_shift and not self.backend.has_cache:
            raise ValueError("context_shift=True shortens a cache, but the model of model_file runs itself, without "
                             "one: leave out context_shift")
