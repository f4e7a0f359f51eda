"""ConfigRecord: the settings of a model, in files that hold them as an instance of a GPTConfig class."""
from sampling.checkpoints.errors import require


class ConfigRecord:
    """Stands in for the GPTConfig class of any module. Its fields are numbers, text or None, by name.

    torch creates it without arguments, and then passes the fields to __setstate__. It has no other attributes or
    methods.
    """
    __slots__ = ("fields",)

    def __new__(cls): # an unpickler never calls __init__
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state):
        is_flat = isinstance(state, dict) and all(
            isinstance(name, str) and isinstance(value, str | int | float | None) for name, value in state.items())
        require(is_flat, "its GPTConfig must hold numbers and text by name")
        self.fields = dict(state)
