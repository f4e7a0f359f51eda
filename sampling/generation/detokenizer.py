"""Decodes sampled tokens to text, up to a stop text."""
from sampling.inputs.tokenizer import Tokenizer
from sampling.params import Sample, SamplingParams, Token


class IncrementalDetokenizer:
    """Appends tokens to a sample until it has max_new_tokens or a stop text appears."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer, params: SamplingParams):
        self.sample, self.max_new_tokens = sample, params.max_new_tokens
        self.decode = tokenizer.incremental_decoder(sample.request.prompt_ids)
        self.stop_checker = StopChecker(params.stop_texts) if params.stop_texts else None
        self.num_chars = 0

    def append(self, token_id: int, logprob: float | None = None, top_logprobs: tuple = ()) -> None:
        """Append the next token, and set the finish reason if it is the last one."""
        sample, withheld = self.sample, 0
        is_last = len(sample.tokens) + 1 == self.max_new_tokens
        text = self.decode(token_id, is_last)
        sample.tokens.append(Token(token_id, text, logprob, top_logprobs))
        self.num_chars += len(text)
        if self.stop_checker:
            surplus, withheld = self.stop_checker.check_stop(text)
            if surplus:
                sample.finish_reason = "stop"
                self.truncate(surplus)
        if is_last and not sample.finish_reason:
            sample.finish_reason = "length"
        sample.num_emittable_chars = self.num_chars - (0 if sample.finish_reason else withheld)

    def truncate(self, num_chars: int) -> None:
        """Remove this many characters from the end of the text. The tokens stay, but their text becomes shorter."""
        self.num_chars -= num_chars
        tokens, i = self.sample.tokens, len(self.sample.tokens)
        while num_chars > 0:
            i -= 1
            text = tokens[i].text
            tokens[i] = tokens[i]._replace(text=text[:max(0, len(text) - num_chars)])
            num_chars -= len(text)


class StopChecker:
    """Searches the text for stop texts while it is generated. A stop text may span several tokens."""

    def __init__(self, stop_texts: list[str]):
        self.stop_texts = stop_texts
        self.tail_length = max(map(len, stop_texts)) - 1 # how far back an incomplete stop text may begin
        self.tail = ""

    def check_stop(self, new_text: str) -> tuple[int, int]:
        """Search the text after one more token. Returns (surplus, withheld), both counted from the end of the text.

        The last surplus characters are a stop text and the text after it; 0 means that there is no stop text. The last
        withheld characters may be the beginning of a stop text.
        """
        text = self.tail + new_text
        self.tail = text[max(0, len(text) - self.tail_length):]
        starts = [start for stop in self.stop_texts if (start := text.find(stop)) >= 0]
        surplus = len(text) - min(starts, default=len(text))
        return surplus, max(partial_match_len(text, stop) for stop in self.stop_texts)


def partial_match_len(text: str, stop: str) -> int:
    """How many characters at the end of text are the beginning of stop, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
