"""Decodes sampled tokens to text, up to a stop text."""
from collections.abc import Sequence

from sampling.inputs.tokenizer import Tokenizer
from sampling.params import Sample, SamplingParams, Token


class IncrementalDetokenizer:
    """Appends tokens to a sample until it has max_new_tokens or a stop text appears, which may span several tokens.

    first_step: the step of the batch in which its first token is sampled, from 0.
    """

    def __init__(self, sample: Sample, tokenizer: Tokenizer, params: SamplingParams, first_step: int = 0):
        self.sample, self.first_step = sample, first_step
        self.max_new_tokens, self.stop_texts = params.max_new_tokens, params.stop_texts
        self.tokenizer, self.decode = tokenizer, tokenizer.incremental_decoder(sample.request.prompt_ids)
        self.withheld = "" # the end of the text, with which a stop text may begin

    def append(self, token_id: int, logprob: float | None = None, top: Sequence[float] = (),
               top_ids: Sequence[int] = ()) -> None:
        """Append the next token, and set the finish reason if it is the last one. top, top_ids: see Step.logprobs."""
        sample = self.sample
        before = sample.request.prompt_ids[-1:] # some tokenizers leave out the space before the first word of a text
        top_texts = [self.tokenizer.incremental_decoder(before)(top_id, True) for top_id in top_ids]
        is_last = len(sample.tokens) + 1 == self.max_new_tokens
        text = self.decode(token_id, is_last)
        sample.tokens.append(Token(token_id, text, logprob, tuple(zip(top_texts, top, strict=True))))
        pending_text = self.withheld + text # not emittable yet
        stop_starts = [start for stop in self.stop_texts if (start := pending_text.find(stop)) >= 0]
        if stop_starts:
            sample.finish_reason, end = "stop", min(stop_starts)
            self.truncate(len(pending_text) - end)
        elif is_last:
            sample.finish_reason, end = "length", len(pending_text)
        else:
            lengths = [partial_match_len(pending_text, stop) for stop in self.stop_texts]
            end = len(pending_text) - max(lengths, default=0)
        sample.num_emittable_chars += end
        self.withheld = pending_text[end:]

    def truncate(self, num_chars: int) -> None:
        """Remove this many characters from the end of the text. The tokens stay, but their text becomes shorter."""
        tokens, i = self.sample.tokens, len(self.sample.tokens)
        while num_chars > 0:
            i -= 1
            text = tokens[i].text
            tokens[i] = tokens[i]._replace(text=text[:max(0, len(text) - num_chars)])
            num_chars -= len(text)


def partial_match_len(text: str, stop: str) -> int:
    """How many characters at the end of text are the beginning of stop, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
