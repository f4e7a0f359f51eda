"""Checks the model in a tokenizer.json: its vocabulary, and how it splits words into tokens."""
import math
from collections.abc import Callable

from sampling.checkpoints.errors import require

MAX_TOKEN_CHARS = 2**10 # tokens of real models have at most 128, added tokens a few hundred
MAX_ID = 2**31
MAX_WORD_CHARS = 2**10 # WordPiece takes time in proportion to the square of a word's length
MAX_SCORE = 1e9 # of a Unigram piece; sums of scores must stay finite
MAX_TRIE_NODES = 2**20 # Unigram builds a trie of its pieces, and a node takes 330 bytes


def is_bool(value: object) -> bool:
    """Whether value is True or False."""
    return isinstance(value, bool)


def is_optional_bool(value: object) -> bool:
    """Whether value is True, False or None."""
    return value is None or isinstance(value, bool)


def is_text(value: object) -> bool:
    """Whether value is a text of allowed length, and not empty."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TOKEN_CHARS


def is_optional_text(value: object) -> bool:
    """Whether value is a text of allowed length, which may be empty, or None."""
    return value is None or value == "" or is_text(value)


def is_word_length(value: object) -> bool:
    """Whether value is an allowed limit on the length of words."""
    return type(value) is int and 0 < value <= MAX_WORD_CHARS


def is_optional_id(value: object) -> bool:
    """Whether value is a token id or None."""
    return value is None or (type(value) is int and 0 <= value < MAX_ID)


BPE = {"unk_token": is_optional_text, "continuing_subword_prefix": is_optional_text,
       "end_of_word_suffix": is_optional_text, "fuse_unk": is_optional_bool, "byte_fallback": is_optional_bool,
       "ignore_merges": is_optional_bool}
WORD_PIECE = {"unk_token": is_text, "continuing_subword_prefix": is_text, "max_input_chars_per_word": is_word_length}
# type -> its fields besides vocab and merges -> the check of a field's value. check_model drops other fields,
# such as dropout.
MODELS: dict[str, dict[str, Callable[[object], bool]]] = {
    "BPE": BPE, "WordPiece": WORD_PIECE, "WordLevel": {"unk_token": is_text},
    "Unigram": {"unk_id": is_optional_id, "byte_fallback": is_optional_bool},
}


def check_model(model: object) -> dict:
    """The harmless part of a model.

    Raises RejectedFileError if the model is damaged, or would take far more time or memory than real models do.
    """
    require(isinstance(model, dict), "its model must be an object")
    kind = model.get("type") or guess_type(model)
    require(isinstance(kind, str) and kind in MODELS,
            f"its model has the type {kind!r:.60}; supported types: {', '.join(MODELS)}")
    checked = {"type": kind, "vocab": model.get("vocab")}
    for name, is_allowed in MODELS[kind].items():
        if name in model:
            require(is_allowed(model[name]), f"its model has {name} {model[name]!r:.60}, which is not supported")
            checked[name] = model[name]
    if kind == "Unigram":
        check_pieces(checked["vocab"])
    else:
        check_vocab(checked["vocab"])
    if kind == "BPE":
        checked["merges"] = model.get("merges")
        check_merges(checked["merges"], checked["vocab"], checked.get("continuing_subword_prefix") or "")
    if kind == "WordPiece":
        require(checked.get("unk_token") in checked["vocab"], "its unk_token is not in its vocabulary")
    return checked


def guess_type(model: dict) -> str:
    """The type of a model in an older file, which does not name it."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def vocab_of(model: dict) -> dict[str, int]:
    """The id of each token of a checked model."""
    vocab = model["vocab"]
    return {piece: i for i, (piece, _) in enumerate(vocab)} if model["type"] == "Unigram" else vocab


def check_vocab(vocab: object) -> None:
    """Raises RejectedFileError unless vocab maps tokens to different ids."""
    require(isinstance(vocab, dict) and len(vocab) > 0, "its vocabulary must be an object that maps tokens to ids")
    require(all(len(token) <= MAX_TOKEN_CHARS for token in vocab),
            f"it has a token of more than {MAX_TOKEN_CHARS} characters")
    require(all(type(i) is int and 0 <= i < MAX_ID for i in vocab.values()),
            "its vocabulary has an id that is not a whole number from 0 to 2**31 - 1")
    require(len(set(vocab.values())) == len(vocab), "two tokens of its vocabulary have the same id")


def check_merges(merges: object, vocab: dict, prefix: str) -> None:
    """Raises RejectedFileError unless merges is a list of "a b" or [a, b] whose tokens are in the vocabulary.

    The merged token must be in the vocabulary, too. The library panics if b does not begin with the prefix, or if the
    merged token is longer than every token of the vocabulary.
    """
    require(isinstance(merges, list), "its merges must be a list")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        require(isinstance(pair, list) and len(pair) == 2 and is_text(pair[0]) and is_text(pair[1]),
                f"its merges must be pairs of tokens, got {merge!r:.60}")
        first, second = pair
        require(second.startswith(prefix),
                f"the second token of its merge {merge!r:.60} lacks the continuing_subword_prefix")
        require(first in vocab and second in vocab and first + second[len(prefix):] in vocab,
                f"its merge {merge!r:.60} uses or makes a token that its vocabulary lacks")


def check_pieces(pieces: object) -> None:
    """Raises RejectedFileError unless pieces is a list of [piece, score] whose trie is small enough."""
    require(isinstance(pieces, list) and len(pieces) > 0, "its vocabulary must be a list of pieces")
    for piece in pieces:
        require(isinstance(piece, list) and len(piece) == 2 and is_text(piece[0]) and type(piece[1]) in (int, float)
                and math.isfinite(piece[1]) and abs(piece[1]) <= MAX_SCORE,
                f"its vocabulary must hold pieces with their scores, got {piece!r:.60}")
    require(count_trie_nodes([piece for piece, _ in pieces]) <= MAX_TRIE_NODES,
            "its vocabulary would take too much memory")


def count_trie_nodes(pieces: list[str]) -> int:
    """The number of nodes in a trie of the pieces: one for each different prefix, in bytes."""
    nodes, previous = 0, b""
    for piece in sorted(piece.encode("utf-8", "surrogatepass") for piece in pieces):
        shared = next((i for i, (a, b) in enumerate(zip(piece, previous, strict=False)) if a != b),
                      min(len(piece), len(previous)))
        nodes, previous = nodes + len(piece) - shared, piece
    return nodes
