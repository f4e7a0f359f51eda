"""Checkpoint: the weights of a model, and what its file says about them."""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sampling.errors import is_out_of_memory


@dataclass
class Checkpoint:
    """What a ckpt.pt or the files of a Hugging Face model hold, all of it data: nothing of a file is run.

    The tensors are float32 copies under nanoGPT's names. Only GPT.from_checkpoint checks that they fit model_args.
    """
    path: str # the file, or the folder or Hugging Face id as it was given: for messages and JSONL
    model_args: dict # GPTConfig's fields
    state_dict: dict[str, Tensor]
    vocab_size: int # rows of the token embedding; 0 if it is missing
    folder: Path | None = None # of a ckpt.pt; its meta.pkl may lie there
    dataset: object = None # what train.py's settings say, of any type; a meta.pkl may lie in data/<dataset>
    crc32: str | None = None # over all tensors, 8 hexadecimal digits; only if it was asked for
    num_init_draws: int = 0 # 32-bit random numbers that nanoGPT draws before it samples from such a model


@contextmanager
def named_errors(source: object) -> Iterator[None]:
    """Turn whatever fails inside into a ValueError that names the source.

    A file that holds no model trips torch in many ways. OSError, MemoryError and other errors that mean out of
    memory pass through.
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
