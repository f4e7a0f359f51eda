"""Errors of the code that reads checkpoint files."""


class Refused(ValueError):
    """The file may be undamaged, but it holds something that the reader does not allow."""


class ForbiddenName(Refused):
    """A pickle names something that is not on the list of what it may name."""


class OtherProgram(Refused):
    """The file is whole, but another program's. The message says what to do, and names the file."""


def require(condition: bool, why_not: str) -> None:
    """Raise Refused with this reason unless the condition holds."""
    if not condition:
        raise Refused(why_not)


def first_line(error: BaseException) -> str:
    """The first sentence of an exception's message, or the exception's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]
