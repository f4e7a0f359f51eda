"""Checkpoint: a model as data, whatever file it comes from."""
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING: # it imports torch, which takes a second
    from sampling.model import GPTConfig


@dataclass
class Checkpoint:
    """The content of a ckpt.pt, or of the files of a Hugging Face model. It is data only: nothing in a file was run.

    The tensors have nanoGPT's names and fit config. They are float32, or QuantizedWeights where int8 was asked for.
    """
    path: str # the file, or the folder or Hugging Face id as it was given; for messages and JSONL
    config: "GPTConfig"
    state_dict: dict
    folder: Path # of the file or the model; it may hold the tokenizer
    crc32: str = "" # a checksum of the tensors, 8 hexadecimal digits
    is_huggingface: bool = False # otherwise it is a ckpt.pt
    num_init_draws: int = 0 # how many 32-bit random numbers nanoGPT draws to initialise such a model
    iter_num: int | None = None # how many steps the model was trained
    val_loss: float | None = None
    raw_config: dict = field(default_factory=dict) # the settings of train.py, or config.json: plain data of any type

    def describe(self) -> str:
        """One line for the user: what was loaded."""
        iteration = "" if self.iter_num is None else f"iteration {self.iter_num}"
        loss = "" if self.val_loss is None else f"validation loss {self.val_loss:.4f}"
        return f"{self.path}: {', '.join(filter(None, [iteration, loss])) or 'loaded'}"
