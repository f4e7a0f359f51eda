"""TextGenerator, which sampling.load returns: text in, text out."""
import os
from collections.abc import Iterator

import torch

from sampling.backends.prepare import choose_device, choose_dtype, default_batch_size, weight_converter
from sampling.checkpoints.nanogpt import load_by_name
from sampling.generation.assembly import LoadedModel, assemble
from sampling.generation.engine import Engine
from sampling.inputs.prompts import make_requests
from sampling.inputs.tokenizer import load_tokenizer
from sampling.messages import info, warn
from sampling.params import ModelOptions, Prompt, Sample, SampleRequest, SamplingParams, check_options, check_values


class TextGenerator:
    """A model with its tokenizer, prepared for a device. Several threads may use it at once."""

    def __init__(self, model: LoadedModel):
        self.model, self.tokenizer = model, model.tokenizer

    @classmethod
    def load(cls, name: str | os.PathLike, device: str, dtype: str, options: ModelOptions,
             tokenizer: str | None = None) -> "TextGenerator":
        check_options({**vars(options), "device": device, "dtype": dtype, "tokenizer": tokenizer})
        torch_device = choose_device(device, log=warn)
        torch_dtype = choose_dtype(torch_device, dtype, options.exact)
        with torch.inference_mode(False): # in the caller's inference mode, the weights could not be used outside of it
            checkpoint = load_by_name(name, weight_converter(torch_dtype), log=info)
            loaded = load_tokenizer(checkpoint, warn, tokenizer)
            return cls(assemble(checkpoint, loaded, torch_device, torch_dtype, options))

    def generate(self, prompts: str | list[str], params: SamplingParams | None = None, num_samples: int = 1,
                 batch_size: int | None = None) -> list[Sample]:
        """Generate num_samples samples for each prompt, in order. batch_size=None: as many at once as memory allows.

        Raises ValueError if a prompt is empty, if the tokenizer cannot encode it, or if a number is not allowed;
        TypeError if a prompt is not a str.
        """
        check_values({"num_samples": num_samples, "batch_size": batch_size})
        params = params or SamplingParams()
        requests = self.make_requests([prompts] if isinstance(prompts, str) else list(prompts), num_samples)
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        size = batch_size or default_batch_size(self.model.backend, longest + params.max_new_tokens)
        return list(self.run(requests, params, size))

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one sample in parts, while it is generated.

        Raises ValueError if the prompt is empty, or if the tokenizer cannot encode it; TypeError if it is not a str.
        """
        num_chars = 0
        for sample in self.run(self.make_requests([prompt], num_samples=1), params or SamplingParams(), stream=True):
            if text := sample.text[num_chars:sample.num_emittable_chars]:
                num_chars += len(text)
                yield text

    def run(self, requests: list[SampleRequest], params: SamplingParams, batch_size: int = 1,
            stream: bool = False) -> Iterator[Sample]:
        """Generate the samples of these requests. With stream, they come unfinished too, after each step."""
        with torch.inference_mode(False): # otherwise, tensors of the engine could not be changed outside of it
            samples = Engine(self.model, params, batch_size, stream).generate(requests)
        while True:
            # Only around each step: autocast must not stay on while the caller has control.
            with torch.inference_mode(False), self.model.autocast():
                sample = next(samples, None)
            if sample is None:
                return
            yield sample

    def make_requests(self, prompts: list[str], num_samples: int) -> list[SampleRequest]:
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TypeError(f"a prompt must be a str; got {prompt!r:.100}")
        if not all(prompts):
            raise ValueError("a prompt is empty, but a sample needs something to continue, such as a newline")
        return list(make_requests(map(Prompt, prompts), self.tokenizer, num_samples))
