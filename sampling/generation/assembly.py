"""Assembles what a model needs to generate. sample.py and sampling.load both go through assemble."""
import math
from dataclasses import dataclass

import torch

from sampling.backends.backend import Backend
from sampling.backends.prepare import autocast, prepare_backend
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.generation.speculation import Speculation, prepare_draft
from sampling.inputs.tokenizer import Tokenizer
from sampling.messages import Log, warn
from sampling.params import ModelOptions
from sampling.sampler.row_streams import draws_like_multinomial


@dataclass(eq=False)
class LoadedModel:
    """A model that is ready to generate.

    checkpoint: where the model is from, without its weights. speculation: decodes with a draft, if there is one.
    """
    backend: Backend
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    dtype: torch.dtype
    num_params: int
    speculation: Speculation | None = None

    @property
    def dtype_name(self) -> str:
        """Such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> torch.autocast:
        return autocast(self.backend.device, self.dtype)


def assemble(checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype,
             options: ModelOptions, num_steps: int | None = None, log: Log = warn) -> LoadedModel:
    """Prepare the model of a checkpoint, and take the weights out of it. num_steps: how many steps the run will take;
    None: unknown, or many. Raises ValueError or OSError if an option or the draft cannot be used.
    """
    if options.draft and device.type != "cpu":
        raise ValueError(f"draft works only on a CPU, because no gain was measured on other devices; got {device}: "
                         "leave out draft, or use device=cpu")
    shapes = {id(weight): weight.shape for weight in checkpoint.state_dict.values()} # a tied head once
    draft = prepare_draft(options.draft, checkpoint, dtype, log) if options.draft else None # while it has its weights
    backend = prepare_backend(checkpoint, device, dtype, options, num_steps, log)
    if device.type == "cuda" and not draws_like_multinomial(device, backend.config.vocab_size):
        log("the random numbers are not those of torch.multinomial here: the samples are good, but not the ones that "
            "nanoGPT generates with this seed")
    speculation = Speculation(backend, *draft, options.draft == "int8", log) if draft else None
    return LoadedModel(backend, tokenizer, checkpoint, dtype, sum(map(math.prod, shapes.values())), speculation)
