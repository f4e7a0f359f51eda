"""TextGenerator, which sampling.load returns: text in, text out. sample.py assembles its model in the same way."""
import logging
import math
import os
from collections.abc import Iterator

import torch

from sampling.backends.prepare import choose_device, choose_dtype, default_batch_size, prepare_backend, weight_converter
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.checkpoints.nanogpt import load_by_name
from sampling.generation.engine import Engine, LoadedModel
from sampling.generation.speculation import prepare_draft
from sampling.inputs.prompts import make_samples
from sampling.inputs.tokenizer import Tokenizer, load_tokenizer
from sampling.params import ModelOptions, Prompt, Sample, SamplingParams, check_options, check_values

logger = logging.getLogger(__name__)


class TextGenerator:
    """A model with its tokenizer, prepared for a device. Several threads may use it at once."""

    def __init__(self, name: str | os.PathLike, device: str, dtype: str, options: ModelOptions, tokenizer: str | None):
        check_options({**vars(options), "device": device, "dtype": dtype, "tokenizer": tokenizer})
        torch_device = choose_device(device)
        torch_dtype = choose_dtype(torch_device, dtype, options.exact)
        with torch.inference_mode(False): # in the caller's inference mode, the weights could not be used outside of it
            checkpoint = load_by_name(name, weight_converter(torch_dtype), log=logger.info)
            self.tokenizer = load_tokenizer(checkpoint, logger.warning, tokenizer)
            self.model = assemble(checkpoint, self.tokenizer, torch_device, torch_dtype, options)

    def generate(self, prompts: str | list[str], params: SamplingParams | None = None, num_samples: int = 1,
                 batch_size: int | None = None) -> list[Sample]:
        """Generate num_samples samples for each prompt, in order. batch_size=None: as many at once as memory allows.

        Raises ValueError if a prompt is empty, if the tokenizer cannot encode it, or if a number is not allowed;
        TypeError if a prompt is not a str, or if params are not SamplingParams.
        """
        check_values({"num_samples": num_samples, "batch_size": batch_size})
        return list(self.run([prompts] if isinstance(prompts, str) else list(prompts), params, num_samples, batch_size))

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one sample in parts, while it is generated.

        Raises ValueError if the prompt is empty, or if the tokenizer cannot encode it; TypeError if it is not a str.
        """
        num_chars = 0
        for sample in self.run([prompt], params, batch_size=1, stream=True):
            if text := sample.text[num_chars:sample.num_emittable_chars]:
                num_chars += len(text)
                yield text

    def run(self, prompts: list[str], params: SamplingParams | None, num_samples: int = 1,
            batch_size: int | None = None, stream: bool = False) -> Iterator[Sample]:
        """Generate num_samples samples for each prompt. With stream, they come unfinished too, after each step."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be a SamplingParams; got {params!r:.100}")
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise TypeError(f"a prompt must be a str; got {prompt!r:.100}")
        if not all(prompts):
            raise ValueError("a prompt is empty, but a sample needs something to continue, such as a newline")
        samples = list(make_samples(map(Prompt, prompts), self.tokenizer, num_samples))
        longest = max((len(sample.prompt_ids) for sample in samples), default=0)
        size = batch_size or default_batch_size(self.model.backend, longest + params.max_new_tokens)
        with torch.inference_mode(False): # otherwise, tensors of the engine could not be changed outside of it
            steps = Engine(self.model, params, size, stream).generate(samples)
        while True:
            # Only around each step: autocast must not stay on while the caller has control.
            with torch.inference_mode(False), self.model.autocast():
                sample = next(steps, None)
            if sample is None:
                return
            yield sample


def assemble(checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype,
             options: ModelOptions, num_steps: int | None = None) -> LoadedModel:
    """Prepare the model of a checkpoint, and take the weights out of it. num_steps: how many steps the run will take;
    None: unknown, or many. Raises ValueError or OSError if an option or the draft cannot be used.
    """
    if options.draft and device.type != "cpu":
        raise ValueError(f"draft works only on a CPU, because no gain was measured on other devices; got {device}: "
                         "leave out draft, or use device=cpu")
    shapes = {id(weight): weight.shape for weight in checkpoint.state_dict.values()} # a tied head once
    speculation = prepare_draft(options.draft, checkpoint, dtype) if options.draft else None # needs the weights
    backend = prepare_backend(checkpoint, device, dtype, options, num_steps)
    return LoadedModel(backend, tokenizer, checkpoint, dtype, sum(map(math.prod, shapes.values())), speculation)
