"""Warns about stop texts that cannot match, and about prompts that are too long for the model."""
from collections.abc import Iterable, Iterator
from contextlib import suppress

from sampling.inputs.tokenizer import Tokenizer
from sampling.log import Log
from sampling.params import SampleRequest


def warn_about_stop_texts(stop_texts: list[str], tokenizer: Tokenizer, log: Log) -> None:
    """Log a warning for each stop text that cannot end a sample, or probably will not."""
    for text in stop_texts:
        if "\\n" in text:
            log(f"warning: the stop text {text!r:.100} has a backslash and the letter n; {how_to_write(text)}")
        elif not can_produce(tokenizer, text):
            log(f"warning: the stop text {text!r:.100} cannot end a sample: {tokenizer.source} never produces "
                "this text")


def how_to_write(text: str) -> str:
    """How to write the stop text that a user probably means by this text."""
    if text.startswith(('["', "['")):
        return "a list needs quotes around each text, such as [\"\\n\\n\", \"KING\"]"
    return f"if you mean a newline, write it in quotes: \"{text:.100}\", and in a shell --stop='\"{text:.100}\"'"


def can_produce(tokenizer: Tokenizer, text: str) -> bool:
    """Whether sampled tokens can produce this text. False only if some character of the text is in no token."""
    word = text.strip(" ") # some tokenizers drop the spaces around a text, but put spaces between words
    with suppress(ValueError):
        if word in tokenizer.decode(tokenizer.encode(word)): # a character may take several tokens
            return True
    return set(text) <= set(tokenizer.decode(list(range(tokenizer.size))))


def log_cropped(requests: Iterable[SampleRequest], tokenizer: Tokenizer, block_size: int,
                log: Log) -> Iterator[SampleRequest]:
    """Yield the requests. For the first prompt longer than block_size tokens, log which part the model sees."""
    is_logged = False
    for request in requests:
        num_tokens = len(request.prompt_ids)
        if num_tokens > block_size and not (is_logged or request.already_saved):
            is_logged = True
            visible = tokenizer.decode(request.prompt_ids[-block_size:])
            location = request.prompt.location # empty for the only prompt
            where = f"{location}: " if location else ""
            others = f"; of later prompts too, it sees at most {block_size}" if location else ""
            log(f"{where}the prompt has {num_tokens} tokens, but the model sees only the last {block_size}, which "
                f"begin with {visible[:40]!r}{others}")
        yield request
