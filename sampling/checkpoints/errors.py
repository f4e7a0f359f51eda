"""Errors of the code that reads checkpoints and tokenizer files."""


class RejectedFileError(ValueError):
    """The file holds something that the reader does not allow. The file may be undamaged."""


class ForbiddenNameError(RejectedFileError):
    """A pickle names a class or function that is not on the list of allowed names."""


class OtherProgramError(RejectedFileError):
    """Another program wrote the file. The message names the file, and says what to do."""


def require(condition: bool, reason: str) -> None:
    """Raises RejectedFileError with this reason unless the condition holds."""
    if not condition:
        raise RejectedFileError(reason)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an exception's message, or the name of the exception's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:200]
