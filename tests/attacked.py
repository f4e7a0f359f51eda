"""Load the model in the folder out, as sample.py does: a ckpt.pt, or else Hugging Face's.

This script limits its own time and memory, so that a failing test does no damage.
"""
import copyreg
import logging
import os
import pickle
import resource
import signal
import sys

from sampling.checkpoints.checkpoint import build_gpt
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.inputs.tokenizer_choice import load_tokenizer
from sampling.outputs.console import report_user_errors, setup_console

MAX_SECONDS = 20
MAX_ADDRESS_SPACE = 2**33

resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS)) # of processor time
signal.alarm(10 * MAX_SECONDS) # also if it only waits
copyreg.add_extension("os", "mkdir", 0x12) # for attacks by EXT1
pickle.loads(b"\x82\x12.") # pickle now knows this code without asking for the name
sys.path.insert(0, ".")
setup_console()
logging.getLogger("sampling").setLevel(logging.ERROR)
with report_user_errors():
    load_model = load_huggingface
    if os.path.lexists("out/ckpt.pt"):
        load_model = load_nanogpt
    checkpoint = load_model("out")
    build_gpt(checkpoint)
    load_tokenizer(checkpoint)
