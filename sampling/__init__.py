"""Generates text with a GPT that nanoGPT trained, or with GPT-2.

    import sampling

    gpt = sampling.load("demo")
    for sample in gpt.generate("ROMEO:", num_samples=2, max_new_tokens=100):
        print(sample.text)

The samples are those of sample.py with the same settings. Importing this package does not import
torch; load does.
"""
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

# model.py and configurator.py lie beside this package in a checkout, and in nanogpt_sample where
# pip installed it. They are sampling.model and sampling.configurator, because a program, such as
# nanoGPT, may have a model.py of its own.
ABOVE = Path(__file__).resolve().parent.parent
INSTALLED = ABOVE / "nanogpt_sample"
__path__.append(str(INSTALLED if INSTALLED.is_dir() else ABOVE))
# nanoGPT's have neither of these.
for name, part in ("model.py", b"class KVCache"), ("configurator.py", b"def override("):
    path = Path(__path__[-1], name)
    if not (path.is_file() and part in path.read_bytes()):
        raise ImportError(f"{path} is missing, or belongs to another project")

from sampling.process import shorten_spinning  # noqa: E402
from sampling.samples import Sample, Score, Token  # noqa: E402
from sampling.settings import (  # noqa: E402
    ModelOptions,
    SamplingParams,
    check_options,
    expand_home,
)

if TYPE_CHECKING:
    from sampling.text_generator import TextGenerator as TextGenerator

__version__ = "1.1.0"
__all__ = ["Sample", "SamplingParams", "Score", "Token", "load"]


def __getattr__(name: str) -> Any:
    """TextGenerator, for annotations. It needs torch, which is imported when it is asked for."""
    if name != "TextGenerator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    shorten_spinning() # as load does, before torch is imported
    from sampling.text_generator import TextGenerator
    return TextGenerator


def load(name: str | os.PathLike[str], device: str = "auto", dtype: str = "auto",
         compile: bool = False, cuda_graphs: bool = True, draft: bool = True,
         tokenizer: str | os.PathLike[str] | None = None,
         model_file: str | os.PathLike[str] | None = None) -> "TextGenerator":
    """Load a model and its tokenizer.

    name: a folder with a ckpt.pt, or the file itself; otherwise the Hugging Face id ("gpt2",
    "user/model") or the folder of a GPT-2 model. The other arguments mean the same as in sample.py.
    Raises OSError or ValueError if there is no such model, or if it cannot be used here.

    Changes settings of the whole process: on a CPU how long the threads of OpenMP spin; on CUDA the
    current device, the precision of matrix products and the attention kernels; with compile,
    torch.compile's limits and PYTHONSAFEPATH.
    """
    shorten_spinning() # also for torch's threads, if torch is not imported yet
    from sampling.backends.backend_choice import warm_up
    from sampling.text_generator import load_model
    model = expand_home(name)
    options = ModelOptions(device, dtype, expand_home(tokenizer), expand_home(model_file), compile,
                           cuda_graphs, draft)
    check_options({"name": model, **vars(options)})
    try:
        gpt = load_model("name", model, options)
        warm_up(gpt.backend)
        return gpt
    except (OSError, ValueError) as error:
        message = re.sub("pass (out_dir|init_from)=", "pass name=", str(error))
        if message == str(error):
            raise
        raise type(error)(message) from None
