"""Warns about stop texts that cannot match, and about prompts that are too long for the model."""
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from sampling.inputs.tokenizer import Tokenizer
from sampling.params import SampleRequest

Log = Callable[[str], None]


def warn_of_stop_texts(stop_texts: list[str], tokenizer: Tokenizer, log: Log) -> None:
    """Log a warning for each stop text that will not, or probably will not, end a sample."""
    for text in stop_texts:
        if "\\n" in text:
            log(f"warning: the stop text {text!r:.100} has a backslash and the letter n where you may mean a newline: "
                f"that is --stop='\"{text:.100}\"'")
        elif not can_produce(tokenizer, text):
            log(f"warning: the stop text {text!r:.100} ends no sample: {tokenizer.source} never gives this text")


def can_produce(tokenizer: Tokenizer, text: str) -> bool:
    """Whether sampled tokens can become this text. False only if a character of it is in no token."""
    word = text.strip(" ") # some tokenizers lose the spaces around a text, but put them between words
    with suppress(ValueError):
        if word in tokenizer.decode(tokenizer.encode(word)): # a character may take several tokens
            return True
    return set(text) <= set(tokenizer.decode(list(range(tokenizer.size))))


def log_cropped(requests: Iterable[SampleRequest], tokenizer: Tokenizer, block_size: int,
                log: Log) -> Iterator[SampleRequest]:
    """Yield the requests. Log what the model sees of the first prompt that is longer than block_size tokens."""
    is_logged = False
    for request in requests:
        num_tokens = len(request.prompt_ids)
        if num_tokens > block_size and not (is_logged or request.already_saved):
            is_logged = True
            visible = tokenizer.decode(request.prompt_ids[-block_size:])
            where = f"{request.prompt.location}: " if request.prompt.location else ""
            log(f"{where}the prompt has {num_tokens} tokens, of which the model sees only the last {block_size}: those "
                f"from {visible[:40]!r} on")
        yield request
