"""Plain values, and words for messages. Imports only the standard library."""
import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any


def as_plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own, a path as text, a tuple as a list, a dict of such
    values; other values as they are.

    In a text, two halves of a character, as in "\\ud83d\\ude00", become the character, as in
    tiktoken.
    """
    if getattr(value, "shape", None) == (): # a number
        return value.item()
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def as_list(value: Any) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def suggest(name: str, settings: Collection[str], aliases: Mapping[str, str] = {},
            prefixes: bool = True) -> str:
    """'; did you mean x?', for an alias, or a setting that begins with name (if prefixes) or is
    similar to it; '' if there is none.
    """
    found = [aliases[name]] if name in aliases else []
    if prefixes and len(name) > 2:
        found += [setting for setting in settings if setting.startswith(name)]
    found += get_close_matches(name.lower(), settings, 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


def first_sentence(error: BaseException) -> str:
    """The first sentence of what an exception says, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]
