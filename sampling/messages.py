"""What users are told about names of other programs, and which errors mean out of memory. Imports no torch."""
import errno
import re
from collections.abc import Collection

OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive"
    "|ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED") # cuBLAS reports the latter if there is no memory for its workspace

ALIASES = { # names of Hugging Face, llama.cpp, vLLM and OpenAI -> what to suggest
    **dict.fromkeys(["p", "prompt"], "start"), **dict.fromkeys(["m", "model"], "out_dir or init_from"),
    **dict.fromkeys(["ckpt", "checkpoint"], "out_dir"), "n": "num_samples or max_new_tokens", "s": "seed",
    "num_return_sequences": "num_samples", **dict.fromkeys(["n_predict", "max_length", "max_tokens"], "max_new_tokens"),
    **dict.fromkeys(["draft_model", "model_draft", "assistant_model", "speculative_model"], "draft"),
    "temp": "temperature", "repeat_penalty": "repetition_penalty", "o": "out_file",
}
TRAINING_NAMES = {"gradient_accumulation_steps", "learning_rate", "max_iters", "eval_iters"} # only train.py has these


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, means out of memory. torch and oneDNN have several messages for it. Those of
    other types may quote a file, which could say anything.
    """
    if error is None:
        return False
    has_type = isinstance(error, MemoryError | RuntimeError) or getattr(error, "errno", None) == errno.ENOMEM
    is_named = OUT_OF_MEMORY.search(f"{type(error).__name__} {error}") is not None
    return (has_type and is_named) or is_out_of_memory(error.__context__)


def training_settings(names: Collection[str]) -> dict[str, str]:
    """The settings that sample.py ignores in a file that assigns these names. Each has the reason as its value."""
    return {"batch_size": "because this file is for training"} if TRAINING_NAMES & set(names) else {}
