"""Setting names of other programs, and settings that mean something else in nanoGPT's training files."""
from collections.abc import Collection

ALIASES = { # names of Hugging Face, llama.cpp, vLLM and OpenAI -> what to suggest
    "p": "start", "prompt": "start",
    "m": "out_dir or init_from", "model": "out_dir or init_from", "ckpt": "out_dir", "checkpoint": "out_dir",
    "n": "num_samples or max_new_tokens", "num_return_sequences": "num_samples",
    "n_predict": "max_new_tokens", "max_length": "max_new_tokens", "max_tokens": "max_new_tokens",
    "draft_model": "draft", "model_draft": "draft", "assistant_model": "draft", "speculative_model": "draft",
    "temp": "temperature", "repeat_penalty": "repetition_penalty", "s": "seed", "o": "out_file",
}
TRAINING_NAMES = {"gradient_accumulation_steps", "learning_rate", "max_iters", "eval_iters"} # only train.py has these


def training_settings(names: Collection[str]) -> dict[str, str]:
    """The settings that sample.py ignores in a file that assigns these names. Each has the reason as its value."""
    return {"batch_size": "because this file is for training"} if TRAINING_NAMES & set(names) else {}
