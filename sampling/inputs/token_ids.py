"""What tokenizers share: the token ids that decode takes, and the texts that encode takes."""
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


def require_unicode(text: str) -> None:
    """Raises ValueError if the text has lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8 at character {error.start + 1}") from None
