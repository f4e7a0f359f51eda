"""NanoGPTSampler: nanoGPT's own operations on the logits, in the dtype of the logits."""
from dataclasses import dataclass

import torch
from torch import Tensor

from sampling.sampler.logits import apply_top_k, require_finite
from sampling.sampler.per_row_rng import PerRowRNG
from sampling.sampler.sample_fn import Logits, SampleFn


@dataclass(frozen=True)
class NanoGPTSampler(SampleFn):
    """Samples as nanoGPT does: it calls torch.multinomial itself, with the generator of each row.

    TokenSampler computes the tokens from numbers that PerRowRNG draws, and works in batches and CUDA graphs.
    """
    temperature: float
    top_k: int | None
    rng: PerRowRNG

    def __call__(self, logits: Logits, ids: Tensor) -> Tensor:
        """See SampleFn. Raises ValueError if a logit is NaN or infinite, or if the temperature makes it so."""
        values = logits.values / float(self.temperature) # torch refuses an int of more than 64 bits
        if not values.isfinite().all(): # multinomial's own check can end all use of the GPU
            require_finite(logits.values)
            raise ValueError(f"temperature={self.temperature} is too low for exact=True: the logits overflow")
        if self.top_k:
            values = apply_top_k(values, min(self.top_k, values.size(-1)))
        probs = values.softmax(dim=-1) # (B, V)
        rows = zip(probs.split(1), self.rng.generators, strict=True)
        return torch.cat([torch.multinomial(row, num_samples=1, generator=generator) for row, generator in rows])
