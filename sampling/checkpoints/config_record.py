"""ConfigRecord: the settings of a model, where a file holds them as an instance of its program's GPTConfig."""
from sampling.checkpoints.errors import require


class ConfigRecord:
    """Stands in for the GPTConfig of any module: its fields by name, which are numbers, text or None.

    torch makes it without arguments and then hands it the fields. It has no other attributes, and no behaviour.
    """
    __slots__ = ("fields",)

    def __new__(cls): # a reader of pickles never calls __init__
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state):
        is_flat = isinstance(state, dict) and all(
            isinstance(name, str) and isinstance(value, str | int | float | None) for name, value in state.items())
        require(is_flat, "its GPTConfig must hold numbers and text by name")
        self.fields = dict(state)
