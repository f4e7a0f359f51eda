"""Counts the random numbers that nanoGPT draws before it samples the first token."""
from torch import Tensor

VECTOR_SIZE = 16 # normal_ uses another algorithm for smaller tensors


def count_init_draws(state_dict: dict[str, Tensor]) -> int:
    """How many 32-bit random numbers nanoGPT's GPT(config) draws on the CPU for a model with these tensors.

    nanoGPT sets the seed and builds the model, which draws initial weights. Then it loads the checkpoint and samples.
    PyTorch first initialises every Linear (weight and bias, uniform_) and Embedding (normal_). nanoGPT then
    initialises the weights of both with normal_, and every c_proj.weight once more. state_dict has nanoGPT's names.
    It has a tied lm_head under both names, and both count.
    """
    weights = {name: tensor for name, tensor in state_dict.items() if name.endswith(".weight") and tensor.dim() == 2}
    draws = few = 0
    for name, weight in weights.items():
        is_embedding = name.endswith(("wte.weight", "wpe.weight"))
        if not is_embedding:
            bias = state_dict.get(name.removesuffix("weight") + "bias")
            draws += weight.numel() + (0 if bias is None else bias.numel())
        num_normal = 2 if is_embedding or name.endswith("c_proj.weight") else 1
        if weight.numel() < VECTOR_SIZE:
            few += num_normal * weight.numel()
        else:
            draws += num_normal * normal_draws(weight.numel())
    # For small tensors, normal_ makes two numbers from four draws, and keeps the second number for its next call.
    return draws + 4 * -(-few // 2)


def normal_draws(size: int) -> int:
    """How many numbers normal_ draws for 16 entries or more: one each, and 16 more to redo a partial last vector."""
    return size + (VECTOR_SIZE if size % VECTOR_SIZE else 0)
