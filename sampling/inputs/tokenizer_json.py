"""Checks a tokenizer.json before the tokenizers library loads it.

The library trusts its files. Padding to a multiple of 2**40 allocates terabytes. Thirty replacements that each double
the text never finish. Some regular expressions and tables make the library panic. So it gets only the model, the added
tokens, and the normalizers, pre-tokenizers and decoders that this module lists as harmless.
"""
import math
from collections.abc import Callable

from sampling.checkpoints.errors import require
from sampling.inputs.tokenizer_model import MAX_TOKEN_CHARS, check_model, is_bool, is_optional_bool, is_text, vocab_of

MAX_PIPELINE_STEPS = 16 # the most normalizers; also the most pre-tokenizers, and the most decoders
MAX_GROWTH = 256 # how many times longer the steps may make a text
MAX_ADDED_TOKENS = 2**14 # no well-known model has more than 6,400
MAX_STRIP = 2**10 # the most characters that a Strip decoder may remove at an end of a token
FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special" # of an added token
# type -> how many bytes of output one byte of input can become
GROWTH = {"NFKC": 11, "NFKD": 11, "NFC": 3, "NFD": 3, "BertNormalizer": 3, "Lowercase": 2, "ByteLevel": 2,
          "Metaspace": 3}
BEHAVIORS = "Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"
# Regular expressions of well-known models. Others could run forever, or make the library panic.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN_EXPRESSIONS = {
    " {2,}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", # GPT-2
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", # Llama 3
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", # Qwen 2
}


def is_char(value) -> bool:
    """Whether value is one character."""
    return isinstance(value, str) and len(value) == 1


def is_pattern(value) -> bool:
    """Whether value is a pattern that is plain text."""
    return isinstance(value, dict) and list(value) == ["String"] and is_text(value["String"])


def is_known_pattern(value) -> bool:
    """Whether value is a pattern that is plain text or a known regular expression."""
    return is_pattern(value) or value in [{"Regex": expression} for expression in KNOWN_EXPRESSIONS]


def is_text_or_empty(value) -> bool:
    """Whether value is a text, which may be empty."""
    return value == "" or is_text(value)


def is_behavior(value) -> bool:
    """Whether value says what a pre-tokenizer does with the text that it matches."""
    return value in BEHAVIORS


def is_scheme(value) -> bool:
    """Whether value says when Metaspace adds a space before a text."""
    return value in ("always", "first", "never")


def is_count(value) -> bool:
    """Whether value is a number of characters that Strip may remove."""
    return type(value) is int and 0 <= value <= MAX_STRIP


# type -> its fields -> the check of a field's value
Fields = dict[str, dict[str, Callable[[object], bool]]]
BYTE_LEVEL = {"add_prefix_space": is_bool, "trim_offsets": is_bool, "use_regex": is_bool}
METASPACE = {"replacement": is_char, "prepend_scheme": is_scheme, "split": is_bool, "add_prefix_space": is_bool,
             "str_rep": is_char}
NORMALIZERS: Fields = {
    **{name: {} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")},
    "BertNormalizer": {"clean_text": is_bool, "handle_chinese_chars": is_bool, "strip_accents": is_optional_bool,
                       "lowercase": is_bool},
    "Strip": {"strip_left": is_bool, "strip_right": is_bool},
    "Prepend": {"prepend": is_text},
    "Replace": {"pattern": is_known_pattern, "content": is_text_or_empty},
}
PRE_TOKENIZERS: Fields = {
    **{name: {} for name in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")},
    "ByteLevel": BYTE_LEVEL,
    "Metaspace": METASPACE,
    "Punctuation": {"behavior": is_behavior},
    "Digits": {"individual_digits": is_bool},
    "CharDelimiterSplit": {"delimiter": is_char},
    "Split": {"pattern": is_known_pattern, "behavior": is_behavior, "invert": is_bool},
}
DECODERS: Fields = {
    "ByteLevel": BYTE_LEVEL,
    "ByteFallback": {},
    "Fuse": {},
    "WordPiece": {"prefix": is_text, "cleanup": is_bool},
    "Metaspace": METASPACE,
    "BPEDecoder": {"suffix": is_text},
    "Strip": {"content": is_char, "start": is_count, "stop": is_count},
    "Replace": {"pattern": is_pattern, "content": is_text_or_empty},
}


def check_tokenizer(content: dict) -> tuple[dict, list[dict]]:
    """The harmless part of a tokenizer.json, and the configurations of its decoders.

    Drops padding, truncation and the post-processor, which would add tokens to a prompt or remove some. Raises
    RejectedFileError if the rest has anything that is not known to be harmless.
    """
    model = check_model(content.get("model"))
    normalizers = check_steps("normalizer", content.get("normalizer"), "normalizers", NORMALIZERS)
    pre_tokenizers = check_steps("pre_tokenizer", content.get("pre_tokenizer"), "pretokenizers", PRE_TOKENIZERS)
    decoders = check_steps("decoder", content.get("decoder"), "decoders", DECODERS)
    require(math.prod(map(growth, normalizers + pre_tokenizers)) <= MAX_GROWTH,
            f"its normalizer and pre-tokenizer could make a text more than {MAX_GROWTH} times longer")
    require(math.prod(map(growth, (step for step in decoders if step["type"] == "Replace"))) <= MAX_GROWTH,
            f"its decoder could make a text more than {MAX_GROWTH} times longer")
    return {
        "version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": None,
        "added_tokens": check_added_tokens(content.get("added_tokens"), vocab_of(model)),
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None,
        "model": model,
    }, decoders


def check_steps(part: str, value: object, sequence: str, allowed: Fields) -> list[dict]:
    """The steps of a part, which may be nested in Sequences. Raises RejectedFileError if a step is not allowed."""
    steps, rest = [], [] if value is None else [value]
    while rest:
        step = rest.pop()
        require(isinstance(step, dict), f"its {part} must be an object")
        if step.get("type") == "Sequence":
            require(isinstance(step.get(sequence), list), f"the {sequence} of its {part} must be a list")
            rest += reversed(step[sequence])
        else:
            check_step(part, step, allowed)
            steps.append(step)
        require(len(steps) + len(rest) <= MAX_PIPELINE_STEPS, f"its {part} has more than {MAX_PIPELINE_STEPS} steps")
    return steps


def check_step(part: str, step: dict, allowed: Fields) -> None:
    """Raises RejectedFileError unless the step has an allowed type and allowed values."""
    kind = step.get("type")
    require(isinstance(kind, str) and kind in allowed,
            f"its {part} has the type {kind!r:.60}; supported types: {', '.join(allowed)}")
    for name, value in step.items():
        if name != "type":
            require(name in allowed[kind], f"{kind} in its {part} has {name!r:.60}, which is not supported")
            require(allowed[kind][name](value),
                    f"{kind} in its {part} has {name} {value!r:.100}, which is not supported")
    needed = {"Strip": ["content", "start", "stop"], "Replace": ["pattern", "content"]}.get(kind, [])
    require(part != "decoder" or all(name in step for name in needed),
            f"{kind} in its {part} must have {', '.join(needed)}")


def growth(step: dict) -> float:
    """How many times longer a step can make a text."""
    if step["type"] == "Replace":
        pattern = step.get("pattern", {}).get("String", " ")
        return max(1, len(step.get("content", "").encode("utf-8", "surrogatepass")) / len(pattern))
    return GROWTH.get(step["type"], 1)


def check_added_tokens(tokens: object, vocab: dict[str, int]) -> list[dict]:
    """The added tokens, sorted by id. Raises RejectedFileError if they conflict with each other or the vocabulary."""
    tokens = [] if tokens is None else tokens
    require(isinstance(tokens, list), "its added_tokens must be a list")
    require(len(tokens) <= MAX_ADDED_TOKENS,
            f"it has {len(tokens)} added tokens; at most {MAX_ADDED_TOKENS} are allowed")
    checked, own_ids = {}, set(vocab.values())
    for token in tokens:
        require(isinstance(token, dict) and is_text(token.get("content")) and type(token.get("id")) is int,
                f"each added token must have an id, and a content of 1 to {MAX_TOKEN_CHARS} characters")
        content, token_id = token["content"], token["id"]
        flags = {name: token.get(name, False) for name in FLAGS}
        require(all(map(is_bool, flags.values())),
                f"its added token {content!r:.60} has a flag that is neither true nor false")
        conflicts = token_id != vocab[content] if content in vocab else token_id in own_ids
        require(token_id not in checked and not conflicts,
                f"the id {token_id!s:.20} of its added token {content!r:.60} conflicts with another token")
        checked[token_id] = {"id": token_id, "content": content, **flags}
    contents = {token["content"] for token in checked.values()}
    require(len(contents) == len(checked), "two of its added tokens have the same content")
    return [checked[token_id] for token_id in sorted(checked)]
