"""Records the operators of a block with torch.jit, and makes a loop of them that runs many blocks."""
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from sampling.backends.cpu.packed_block import PackedBlock


def trace_loop(block: PackedBlock, inputs: tuple) -> Callable[..., Tensor]:
    """A function that runs several blocks, one after another. They must have the same operators as this block.

    inputs: the tensors of this block, then the arguments of its decode_step. A tensor that the block uses must be among
    them, otherwise torch.jit.trace would make it a constant, the same for all blocks.
    """
    def decode_step(tensors, *inputs):
        """The block's decode_step, with its tensors as an input."""
        return block.decode_step(*inputs)

    with warnings.catch_warnings():
        # torch warns that torch.jit is deprecated, and that Python numbers become constants. Here they never change.
        warnings.simplefilter("ignore")
        step = torch.jit.trace(decode_step, inputs, check_trace=False)

        def loop(tensors: list[list[Tensor]], x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
            """Run blocks with these tensors, keys and values, one after another: (B, E) -> (B, E)."""
            for i, block_tensors in enumerate(tensors):
                x = step(block_tensors, x, keys[i], values[i], position)
            return x

        return torch.jit.script(loop)


def tensors_of(item) -> list[Tensor]:
    """The tensors among the attributes of an object, the attributes of these, and so on, in a fixed order."""
    if isinstance(item, Tensor):
        return [item]
    parts = item if isinstance(item, list | tuple) else vars(item).values() if hasattr(item, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def layout_of(tensors: list[Tensor]) -> tuple:
    """Blocks of a model with equal layouts have the same operators."""
    return tuple((tensor.shape, tensor.dtype, tensor.layout) for tensor in tensors)
