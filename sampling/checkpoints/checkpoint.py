"""Checkpoint: the weights of a model, and its configuration."""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sampling.out_of_memory import is_out_of_memory


@dataclass
class Checkpoint:
    """The content of a ckpt.pt, or of the files of a Hugging Face model. It is data only: nothing in a file was run.

    The tensors have nanoGPT's names. They are float32 copies, unless copy_tensors kept some. Only build_gpt
    checks that they fit model_args.
    """
    path: str # the file, or the folder or Hugging Face id as it was given; for messages and JSONL
    model_args: dict # GPTConfig's fields
    state_dict: dict[str, Tensor]
    vocab_size: int # rows of the token embedding; 0 if it is missing
    folder: Path # of the file or the model; it may hold the tokenizer
    dataset: object = None # train.py's setting, of any type; data/<dataset> may hold the tokenizer
    crc32: str | None = None # of all tensors, 8 hexadecimal digits; sample.py sets it if there is an out_file
    is_huggingface: bool = False # otherwise it is a ckpt.pt
    num_init_draws: int = 0 # how many 32-bit random numbers nanoGPT draws to initialise such a model


@contextmanager
def named_errors(source: object) -> Iterator[None]:
    """Turn an exception inside the block into a ValueError that names the source.

    A file that holds no model can make torch raise any exception. OSError, MemoryError and other out-of-memory errors
    pass unchanged.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as e:
        if is_out_of_memory(e):
            raise
        is_named = isinstance(e, ValueError) and str(source) in str(e)
        raise ValueError(f"{e!s:.2000}" if is_named else f"cannot load {source}: {e!s:.1000}") from None
