"""The token ids that a tokenizer's decode takes."""
from collections.abc import Sequence
from typing import Protocol


class IdArray(Protocol):
    """A torch tensor or a numpy array."""
    ndim: int

    def tolist(self) -> list[int]:
        """The ids as a list."""


def id_list(ids: Sequence[int] | IdArray) -> list[int]:
    """Token ids as a list. Raises ValueError for a tensor or an array that does not have one dimension."""
    if not hasattr(ids, "tolist"):
        return list(ids)
    if ids.ndim != 1:
        raise ValueError(f"decode takes the ids of one text, in one dimension; got {ids.ndim} dimensions")
    return ids.tolist()
