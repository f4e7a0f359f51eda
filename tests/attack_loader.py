"""Load each model in a separate process, forked after all modules are imported, with limited memory and time.

Each line of standard input is [folder, init_from, seconds] as JSON: load the model that init_from names in this folder,
or the checkpoint in out. Each line of standard output is [exit status, peak memory in MB] as JSON. The process writes
its standard error to the file stderr in the folder.
"""
import copyreg
import json
import os
import pickle
import resource
import signal
import sys
import traceback

import tiktoken  # noqa: F401

from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.inputs.tokenizer import load_tokenizer
from sampling.outputs.console import report_user_errors

MAX_ADDRESS_SPACE = 2**33 # limits the damage that a failing test can do


def load_and_exit(folder, init_from, seconds):
    """Run the forked process. Exit status 99 means an exception that sample.py would show as a traceback."""
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)) # of processor time: other programs do not matter
    signal.alarm(10 * seconds) # also if it only waits
    try:
        with report_user_errors():
            quiet = {"log": lambda text: None}
            checkpoint = load_nanogpt("out", **quiet) if init_from == "resume" else load_huggingface(init_from, **quiet)
            build_gpt(checkpoint)
            load_tokenizer(checkpoint, **quiet)
        os._exit(0)
    except SystemExit as e:
        os._exit(e.code)
    except BaseException:
        traceback.print_exc()
        os._exit(99)


if __name__ == "__main__":
    copyreg.add_extension("os", "mkdir", 0x12) # for attacks by EXT1, EXT2 and EXT4
    copyreg.add_extension("os", "makedirs", 0x1234)
    copyreg.add_extension("os", "mkfifo", 0x123456)
    pickle.loads(b"\x82\x12.") # pickle now knows this code without asking for the name
    print(flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            load_and_exit(*json.loads(line))
        _, status, used = os.wait4(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_maxrss / 1024]), flush=True)
