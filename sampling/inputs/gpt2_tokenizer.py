"""GPT-2's byte-pair encoding, with tiktoken."""
import codecs
from collections.abc import Callable, Sequence

from sampling.inputs.token_ids import IdArray, id_list, require_unicode


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding. <|endoftext|> in a text becomes the special token.

    Raises ValueError, which says where to get the files, if tiktoken does not have them and cannot download them.
    """
    source, size = "GPT-2's encoding", 50257

    def __init__(self):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else None
            why = f"{type(error).__name__} {reason or ''}".strip()
            # tiktoken names a cached file by the SHA-1 of its URL.
            raise ValueError(
                f"GPT-2's encoding is not on this machine, and could not be downloaded and saved ({why}): on a machine "
                "with internet access, get vocab.bpe and encoder.json from "
                "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/, save them as "
                "6d1cbeee0f20b3d9449abfede4726ed8212e3aee and 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 in a folder "
                "here, and set TIKTOKEN_CACHE_DIR to that folder") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises ValueError if the text is not valid Unicode."""
        require_unicode(text)
        return self.encoding.encode(text, allowed_special={"<|endoftext|>"})

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """The text of token ids; bytes that form no character decode to U+FFFD."""
        ids = id_list(ids)
        if max(ids, default=0) < self.size: # one call of tiktoken, for prompts of megabytes
            return self.encoding.decode(ids, errors="replace")
        return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

    def incremental_decoder(self, prompt_ids: Sequence[int] = ()) -> Callable[[int, bool], str]:
        """A function (id, last=False) -> text for one sequence. A character comes with the last of its tokens."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token_id, last=False: decode(self._bytes(token_id), last)

    def _bytes(self, token_id: int) -> bytes:
        if token_id < self.size:
            return self.encoding.decode_single_token_bytes(token_id)
        return "\N{REPLACEMENT CHARACTER}".encode()
