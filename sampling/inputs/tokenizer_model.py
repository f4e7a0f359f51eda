"""Checks the model of a tokenizer.json: its vocabulary, and what it does with words."""
import math
from collections.abc import Callable

from sampling.checkpoints.errors import require

MAX_TOKEN_CHARS = 2**10 # real ones have at most 128, added ones a few hundred
MAX_ID = 2**31
MAX_WORD_CHARS = 2**10 # WordPiece takes the square of it
MAX_SCORE = 1e9 # of a piece of Unigram: sums of them must stay finite
MAX_TRIE_NODES = 2**20 # Unigram builds a tree of its pieces, with 330 bytes a node


def is_bool(value: object) -> bool:
    return isinstance(value, bool)


def is_optional_bool(value: object) -> bool:
    return value is None or isinstance(value, bool)


def is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TOKEN_CHARS


def is_optional_text(value: object) -> bool:
    return value is None or value == "" or is_text(value)


def is_word_length(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_WORD_CHARS


def is_optional_id(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < MAX_ID)


BPE = {"unk_token": is_optional_text, "continuing_subword_prefix": is_optional_text,
       "end_of_word_suffix": is_optional_text, "fuse_unk": is_optional_bool, "byte_fallback": is_optional_bool,
       "ignore_merges": is_optional_bool}
WORD_PIECE = {"unk_token": is_text, "continuing_subword_prefix": is_text, "max_input_chars_per_word": is_word_length}
# type -> its fields beside vocab and merges, and which values they may have. Others, such as dropout, are left out.
MODELS: dict[str, dict[str, Callable[[object], bool]]] = {
    "BPE": BPE, "WordPiece": WORD_PIECE, "WordLevel": {"unk_token": is_text},
    "Unigram": {"unk_id": is_optional_id, "byte_fallback": is_optional_bool},
}


def check_model(model: object) -> dict:
    """The harmless part of a model. Raises Refused if it is damaged, or would cost far more than honest ones do."""
    require(isinstance(model, dict), "its model must be an object")
    kind = model.get("type") or guess_type(model)
    require(isinstance(kind, str) and kind in MODELS, f"its model is {kind!r:.60}; supported are {', '.join(MODELS)}")
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
        require(checked.get("unk_token") in checked["vocab"], "its vocabulary lacks its unk_token")
    return checked


def guess_type(model: dict) -> str:
    """The type of a model in an older file, which does not say it."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def vocab_of(model: dict) -> dict[str, int]:
    """The ids of a checked model's tokens."""
    vocab = model["vocab"]
    return {piece: i for i, (piece, _) in enumerate(vocab)} if model["type"] == "Unigram" else vocab


def check_vocab(vocab: object) -> None:
    """Raise Refused unless this is an object of tokens with an id each."""
    require(isinstance(vocab, dict) and len(vocab) > 0, "its vocabulary must be an object with tokens")
    require(all(len(token) <= MAX_TOKEN_CHARS for token in vocab),
            f"it has a token of more than {MAX_TOKEN_CHARS} characters")
    require(all(type(i) is int and 0 <= i < MAX_ID for i in vocab.values()),
            "its vocabulary has an id that is not a number of at most 31 bits")
    require(len(set(vocab.values())) == len(vocab), "a token id of its vocabulary stands for two tokens")


def check_merges(merges: object, vocab: dict, prefix: str) -> None:
    """Raise Refused unless this is a list of "a b" or of [a, b] that makes tokens of the vocabulary out of others.

    The library panics where b lacks the prefix, or where the merged token is longer than all of the vocabulary.
    """
    require(isinstance(merges, list), "its merges must be a list")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        require(isinstance(pair, list) and len(pair) == 2 and is_text(pair[0]) and is_text(pair[1]),
                f"its merges must be pairs of tokens, got {merge!r:.60}")
        first, second = pair
        require(second.startswith(prefix), f"its merge {merge!r:.60} lacks the continuing_subword_prefix")
        require(first in vocab and second in vocab and first + second[len(prefix):] in vocab,
                f"its merge {merge!r:.60} has a token that its vocabulary lacks")


def check_pieces(pieces: object) -> None:
    """Raise Refused unless this is a list of [piece, score] for a tree of bearable size."""
    require(isinstance(pieces, list) and len(pieces) > 0, "its vocabulary must be a list of pieces")
    for piece in pieces:
        require(isinstance(piece, list) and len(piece) == 2 and is_text(piece[0]) and type(piece[1]) in (int, float)
                and math.isfinite(piece[1]) and abs(piece[1]) <= MAX_SCORE,
                f"its vocabulary must hold pieces with their scores, got {piece!r:.60}")
    require(count_trie_nodes([piece for piece, _ in pieces]) <= MAX_TRIE_NODES, "its vocabulary takes too much memory")


def count_trie_nodes(pieces: list[str]) -> int:
    """How many different beginnings the pieces have, in bytes."""
    nodes, previous = 0, b""
    for piece in sorted(piece.encode("utf-8", "surrogatepass") for piece in pieces):
        shared = next((i for i, (a, b) in enumerate(zip(piece, previous, strict=False)) if a != b),
                      min(len(piece), len(previous)))
        nodes, previous = nodes + len(piece) - shared, piece
    return nodes
