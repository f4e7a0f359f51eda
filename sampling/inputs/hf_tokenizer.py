"""HFTokenizer: a tokenizer of Hugging Face's tokenizers library, from a tokenizer.json or from the older files."""
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

from sampling.inputs.hf_files import load_library_tokenizer
from sampling.inputs.tokenizer import REPLACEMENT, IncrementalDecoder, Tokenizer, call_library, encode_utf8

CONTEXT = 8 # the text of a token depends on at most this many tokens before it, unless the decoder sees the whole text
MAX_HELD = 64 # how many tokens may wait for the end of a run of bytes, and then of a character


class HFTokenizer(Tokenizer):
    """The tokenizer whose main file is at path: a tokenizer.json, vocab.json or vocab.txt.

    Ids and texts are the same as in transformers with add_special_tokens=False and clean_up_tokenization_spaces=False.
    An added token that a model of vocab_size tokens lacks is plain text. Raises ValueError if it cannot be read.
    """
    unit = "tokens"

    def __init__(self, path: Path, vocab_size: int):
        self.source = str(path)
        self.tokenizer, content = load_library_tokenizer(path, vocab_size)
        vocab = self.tokenizer.get_vocab()
        self.size = 1 + max(vocab.values())
        self.joins_spaces = "'ByteLevel'" in str(content.get("pre_tokenizer"))
        # Where ByteFallback joins bytes, <0xE2> and the like are no text before their run ends.
        self.byte_ids = {i for token, i in vocab.items() if token.startswith("<0x") and len(token) == 6}
        self.decodes_whole = decodes_whole_text(content.get("decoder"))

    def encode(self, text: str) -> list[int]:
        encode_utf8(text) # which checks it
        ids = call_library(lambda: self.tokenizer.encode(text, add_special_tokens=False).ids)
        if not ids:
            raise ValueError(f"the prompt {text!r:.60} has no tokens in {self.source}, but a sample needs at least "
                             "one; pass another --start")
        return ids

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder:
        return HFDecoder(self, prompt_ids)

    def is_known(self, token_id: int) -> bool:
        return token_id < self.size and self.tokenizer.id_to_token(token_id) is not None

    def text_of(self, ids: list[int]) -> str:
        decode = self.tokenizer.decode
        return call_library(lambda: decode(ids, skip_special_tokens=False)) if ids else "" # some decoders fail at []


class HFDecoder(IncrementalDecoder):
    """Decodes the last few tokens with the new ones, and returns what these add.

    The library's DecodeStream does so too, but fails if bytes that form no character follow bytes that do.
    """

    def __init__(self, tokenizer: HFTokenizer, prompt_ids: Sequence[int]):
        self.tokenizer, self.held = tokenizer, []
        known = [i for i in prompt_ids[-1000:] if tokenizer.is_known(i)]
        run = [*takewhile(tokenizer.byte_ids.__contains__, reversed(known))][::-1]
        if not tokenizer.text_of(run).endswith(REPLACEMENT): # its characters are complete: no token continues them
            run = []
        self.context = self.context_of(known) + run

    def __call__(self, token_id: int, last: bool = False) -> str:
        tokenizer, is_known = self.tokenizer, self.tokenizer.is_known(token_id)
        held, may_wait = self.held + [token_id] * is_known, is_known and not last
        if may_wait and (tokenizer.decodes_whole or (token_id in tokenizer.byte_ids and len(held) < MAX_HELD)):
            self.held = held
            return ""
        before, after = tokenizer.text_of(self.context), tokenizer.text_of(self.context + held)
        if may_wait and after.endswith(REPLACEMENT) and len(held) < MAX_HELD + 4: # more bytes than a character has
            self.held = held
            return ""
        while not after.startswith(before): # a character of the prompt was incomplete
            before = before[:-1]
        self.context, self.held = self.context_of(self.context + held), []
        return after[len(before):] + ("" if is_known else REPLACEMENT)

    def context_of(self, ids: list[int]) -> list[int]:
        """The tokens before the next one, without bytes, because a new run of bytes is another one."""
        return [i for i in ids if i not in self.tokenizer.byte_ids][-CONTEXT:]


def decodes_whole_text(decoder: dict | None) -> bool:
    """Whether a token may change the text of those before it. Fuse and ByteLevel join all tokens, so then a step must
    be known to act at one place only.
    """
    steps = decoder.get("decoders", [decoder]) if decoder else []
    joined = [*dropwhile(lambda step: step["type"] not in ("Fuse", "ByteLevel", "Sequence"), steps)]
    return not all(step["type"] in ("Fuse", "ByteLevel")
                   or (step["type"] == "Strip" and step["start"] <= CONTEXT and not step["stop"])
                   or (step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1) for step in joined)
