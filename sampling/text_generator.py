"""TextGenerator, which sampling.load returns: text in, text out."""
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from model import GPT
from sampling.backends.backend import Backend
from sampling.backends.devices import autocast, choose_device, choose_dtype
from sampling.backends.memory import max_batch_size
from sampling.checkpoints.by_name import load_by_name
from sampling.generation.engine import Engine
from sampling.generation.speculation import prepare_with_draft
from sampling.inputs.prompts import make_requests
from sampling.inputs.tokenizer import Tokenizer, load_tokenizer
from sampling.log import warn
from sampling.params import ModelOptions, Prompt, Sample, SampleRequest, SamplingParams, TextCursor
from sampling.validation import check_counts, check_device, check_dtype


@dataclass(eq=False)
class TextGenerator:
    """A model with its tokenizer, prepared for a device. Each thread needs its own."""
    backend: Backend
    tokenizer: Tokenizer
    dtype: torch.dtype
    num_init_draws: int
    is_huggingface: bool
    idle_engine: Engine | None = field(default=None, init=False, repr=False)

    @classmethod
    def load(cls, name: str | os.PathLike, device: str, dtype: str, options: ModelOptions) -> "TextGenerator":
        """See sampling.load."""
        check_device({"device": device})
        check_dtype({**vars(options), "dtype": dtype})
        torch_device = choose_device(device)
        torch_dtype = choose_dtype(torch_device, dtype)
        checkpoint = load_by_name(name, copy_weights=torch_dtype != torch.int8)
        gpt = GPT.from_checkpoint(checkpoint)
        tokenizer = load_tokenizer(checkpoint, warn)
        backend = prepare_with_draft(gpt, torch_device, torch_dtype, options)
        return cls(backend, tokenizer, torch_dtype, checkpoint.num_init_draws, checkpoint.is_huggingface)

    def generate(self, prompts: str | list[str], params: SamplingParams | None = None, num_samples: int = 1,
                 batch_size: int | None = None) -> list[Sample]:
        """Generate num_samples samples for each prompt, in order. batch_size=None: as many at once as memory allows.

        Raises ValueError if a prompt is empty, if the tokenizer cannot encode it, or if a number is not allowed;
        TypeError if a prompt is not a str.
        """
        check_counts({"num_samples": num_samples, "batch_size": batch_size})
        params = params or SamplingParams()
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
            raise TypeError(f"prompts must be a str or a list of str; got {prompts!r:.100}")
        requests = self.make_requests([prompts] if isinstance(prompts, str) else list(prompts), num_samples)
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        if batch_size is None: # not more than needed: take_engine compares it, and free memory changes
            batch_size = min(max_batch_size(self.backend, longest + params.max_new_tokens), max(1, len(requests)))
        return list(self.run(requests, params, batch_size=batch_size))

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one sample in parts, while it is generated.

        Raises ValueError if the prompt is empty, or if the tokenizer cannot encode it; TypeError if it is not a str.
        """
        if not isinstance(prompt, str):
            raise TypeError(f"stream takes one prompt, a str; got {prompt!r:.100}")
        cursor = None
        for sample in self.run(self.make_requests([prompt], num_samples=1), params or SamplingParams(), stream=True):
            cursor = cursor or TextCursor(sample)
            for text, _ in cursor.read():
                yield text

    def run(self, requests: list[SampleRequest], params: SamplingParams, batch_size: int = 1,
            stream: bool = False) -> Iterator[Sample]:
        """See Engine.generate. Each call starts at the seed again."""
        # The engine outlives the call. In the caller's inference mode, its tensors could not be changed outside of it.
        with torch.inference_mode(False):
            engine = self.take_engine(params, batch_size, stream)
        samples = engine.generate(requests)
        while True:
            # Only around each step: autocast must not stay on while the caller has control.
            with torch.inference_mode(False), autocast(self.backend.device, self.dtype):
                sample = next(samples, None)
            if sample is None:
                self.idle_engine = engine # only here: an abandoned call may leave an inconsistent state
                return
            yield sample

    def take_engine(self, params: SamplingParams, batch_size: int, stream: bool) -> Engine:
        """An engine for these parameters. If the latest call had the same ones, its engine is used again, with its CUDA
        graphs.

        Two calls may be interleaved, so they never share an engine.
        """
        engine, self.idle_engine = self.idle_engine, None
        if engine and (engine.params, engine.batch_size, engine.stream) == (params, batch_size, stream):
            return engine
        return Engine(self.backend, self.tokenizer, params, self.num_init_draws, batch_size, stream,
                      is_huggingface=self.is_huggingface)

    def make_requests(self, prompts: list[str], num_samples: int) -> list[SampleRequest]:
        """Make num_samples requests for each prompt."""
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TypeError(f"a prompt must be a str; got {prompt!r:.100}")
        if not all(prompts):
            raise ValueError("a prompt is empty, but a sample needs something to continue, such as a newline")
        return list(make_requests(map(Prompt, prompts), self.tokenizer, num_samples))
