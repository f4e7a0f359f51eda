"""Checks on the user's own GPU that the fast path computes what the plain model computes.

If a check fails, the run continues without what failed, which is slower, and a line tells the user.
"""
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sampling.log import Log
from sampling.sampler.per_row_rng import PerRowRNG

# The largest logits_error that rounding explains; a wrong key, mask or position gives more.
TOLERANCE_FLOAT32, TOLERANCE_HALF = 0.005, 0.05

Key = int | str | tuple[int, int] # of a step or a pass: see DecodeState and GraphedPasses


@dataclass
class SelfCheck:
    """What this GPU may use, as far as the checks have shown.

    use_graphs: run steps as CUDA graphs.
    use_static_forward: run StaticForward; otherwise the plain model, which CUDA graphs cannot hold.
    """
    log: Log
    use_graphs: bool = True
    use_static_forward: bool = True
    checked_shapes: set[tuple[int, Key]] = field(default_factory=set) # batch size, key of the step

    def check_random_numbers(self, device: torch.device, vocab_size: int) -> None:
        """Tell the user if the random numbers are not those of torch.multinomial."""
        if not draws_like_multinomial(device, vocab_size):
            self.log("the random numbers are not those of torch.multinomial here: the samples are good, but not the "
                     "ones that nanoGPT generates with this seed")

    def check_logits(self, shape: tuple[int, Key], found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
        """Whether found agrees with the plain model's logits of the same row. If not, stop using StaticForward."""
        self.checked_shapes.add(shape)
        error, limit = logits_error(found, expected), TOLERANCE_FLOAT32 if dtype == torch.float32 else TOLERANCE_HALF
        if error <= limit or not expected.isfinite().all(): # logits that are not finite get an error of their own
            return True
        self.use_graphs = self.use_static_forward = False
        self.log(f"the fast path for GPUs computes other logits than the plain model here (a difference of {error:.3g} "
                 f"standard deviations, batch size {shape[0]}): continuing with the plain model, which is slower")
        return False

    def graphs_failed(self, error: Exception, device: torch.device) -> None:
        """Continue without CUDA graphs after this error. Raises ValueError if the GPU cannot be used any more."""
        while error.__context__ is not None: # the first error says more than those that it caused
            error = error.__context__
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line:.200}"
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise ValueError("a CUDA graph failed, and the GPU accepts nothing more from this process: run it again "
                             f"with --cuda_graphs=False ({reason})") from None
        self.disable_graphs(reason)

    def disable_graphs(self, reason: str) -> None:
        """Continue without CUDA graphs, and tell the user why."""
        self.use_graphs = False
        self.log(f"CUDA graphs do not work here ({reason}): continuing without them, which is slower")


def draws_like_multinomial(device: torch.device, vocab_size: int) -> bool:
    """Whether PerRowRNG draws the numbers of two calls of torch.multinomial, and skips as many as they draw."""
    rng = PerRowRNG(1, device, draws_per_sample=1, vocab_size=vocab_size)
    states = [rng.state_for_sample(index) for index in range(3)] # the rows of a batch start one call apart
    rng.set_rows(states[:2])
    probs = torch.linspace(1, 2, vocab_size, device=device)
    found = (probs / rng((2, vocab_size), None, device)).argmax(dim=-1)
    generator = torch.Generator(rng.run_generator.device).manual_seed(1)
    expected = torch.cat([torch.multinomial(probs, 1, generator=generator) for _ in range(2)])
    ends = generator.get_state(), rng.generators[1].get_state()
    return torch.equal(found, expected) and all(torch.equal(end, states[2]) for end in ends)


def logits_error(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference without its mean, relative to the standard deviation of expected.

    The mean is left out because a constant added to all logits does not change their probabilities.
    """
    found, expected = found.float().flatten(), expected.float().flatten()
    difference = (found - expected).std(correction=0)
    return (difference / expected.std(correction=0).clamp(min=1e-30)).item()
