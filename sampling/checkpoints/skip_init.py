"""SkipInit lets GPT.from_state_dict build a model without initial weights, because a checkpoint has them all."""
from torch.overrides import TorchFunctionMode

INIT_FUNCTIONS = "kaiming_uniform_", "uniform_", "normal_", "fill_", "zero_"


class SkipInit(TorchFunctionMode):
    """Skips torch's init functions.

    On the meta device, the first call of one would make torch import modules, which takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ in INIT_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
