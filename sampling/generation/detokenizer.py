"""From tokens to the text of a sample, piece by piece, and the search for stop texts."""
from collections.abc import Sequence

from sampling.inputs.tokenizer import Tokenizer
from sampling.samples import Piece, Sample, Token
from sampling.settings import SamplingParams


class Detokenizer:
    """Appends tokens to a sample until it has max_new_tokens or a stop text appears, which may span
    several tokens. The new text comes as pieces, as soon as no stop text can take it back.
    """

    def __init__(self, sample: Sample, tokenizer: Tokenizer, params: SamplingParams):
        self.sample = sample
        self.tokenizer = tokenizer
        self.params = params
        self.num_taken = 0 # pieces that take_pieces has returned
        self.restart()

    def restart(self) -> None:
        """Remove all tokens. The pieces that were taken already do not come again."""
        self.sample.tokens = []
        self.decode = self.tokenizer.decoder(self.sample.prompt_ids)
        self.pieces: list[Piece] = []
        self.withheld: list[Piece] = [] # with these, a stop text may begin
        # The log-probability of the tokens since the last text: a character may have several.
        self.logprob: float | None = None
        if self.params.max_new_tokens == 0:
            self.sample.finish_reason = "length"

    @property
    def is_finished(self) -> bool:
        return self.sample.finish_reason is not None

    def take_pieces(self) -> list[Piece]:
        pieces = self.pieces[self.num_taken:]
        self.num_taken += len(pieces)
        return pieces

    def append(self, token_id: int, logprob: float | None = None, top: Sequence[float] = (),
               top_ids: Sequence[int] = ()) -> None:
        """Append the next token, and set the finish reason if it is the last one.

        top, top_ids: the most likely.
        """
        sample = self.sample
        is_last = len(sample.tokens) + 1 == self.params.max_new_tokens
        top_texts = [self.decode.peek(top_id, is_last) for top_id in top_ids]
        text = self.decode(token_id, is_last)
        alternatives = tuple(map(Token, top_ids, top_texts, top))
        sample.tokens.append(Token(token_id, text, logprob, alternatives))
        if logprob is not None:
            self.logprob = logprob + (self.logprob or 0.0)
        if text:
            self.withheld.append(Piece(text, self.logprob))
            self.logprob = None
        sample.finish_reason, num_chars = self.find_stop(is_last)
        self.make_final(num_chars)
        if sample.finish_reason == "stop":
            self.truncate()

    def find_stop(self, is_last: bool) -> tuple[str | None, int]:
        """The finish reason, and how many characters of the withheld text are final."""
        text = "".join(piece.text for piece in self.withheld)
        stops = self.params.stop_texts
        if starts := [text.index(stop) for stop in stops if stop in text]:
            return "stop", min(starts)
        if is_last:
            return "length", len(text)
        # A stop text may begin at the end of the text.
        for start in range(len(text)):
            if any(stop.startswith(text[start:]) for stop in stops):
                return None, start
        return None, len(text)

    def make_final(self, num_chars: int) -> None:
        """Move the first num_chars characters of the withheld pieces to the final ones. A piece may
        become two.
        """
        while num_chars > 0:
            piece = self.withheld.pop(0)
            self.pieces.append(piece._replace(text=piece.text[:num_chars]))
            rest = piece.text[num_chars:]
            if rest:
                self.withheld.insert(0, piece._replace(text=rest))
            num_chars -= len(piece.text)

    def truncate(self) -> None:
        """Leave the tokens only the text of the pieces, which ends where a stop text begins."""
        num_chars = sum(len(piece.text) for piece in self.pieces)
        for i, token in enumerate(self.sample.tokens):
            text = token.text[:num_chars]
            num_chars -= len(text)
            self.sample.tokens[i] = token._replace(text=text)
