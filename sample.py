"""Sample from a GPT that nanoGPT trained, or from GPT-2.

    python sample.py --out_dir=demo --start="ROMEO:"
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --temperature=0.9
    python sample.py config/story.py --seed=42

The samples go to standard output, everything else to standard error. Arguments apply from left to
right: settings files (Python that assigns settings) and --key=value, --key value, or a bare --key
for True.
"""
import inspect
import os
import sys

sys.path.append(os.path.dirname(os.path.realpath(__file__))) # for runpy, python -I, a link with -m
try:
    from sampling import __version__ as __version__  # --version prints it
except ImportError as error: # this file was copied into another project
    sys.exit(f"error: {error}: do not copy sample.py; link to it with ln -s, or pip install it")
from sampling.checkpoints.saves import load_saves
from sampling.configurator import override
from sampling.inputs.prompts import make_samples, read_prompts
from sampling.outputs.console import hard_exit, name_write_errors, report_user_errors, setup_console
from sampling.outputs.outputs import OutputFiles, Outputs
from sampling.process import shorten_spinning
from sampling.settings import (
    ALIASES,
    FOREIGN,
    ModelOptions,
    check_settings,
    choose_params,
    complete_settings,
)
from sampling.torchrun import run_on_all, serve

# The model
init_from = 'resume' # 'resume': the checkpoint in out_dir; otherwise the Hugging Face id or the
                     # folder of a GPT-2 model
out_dir = 'out' # the folder that holds ckpt.pt, or the path of such a file
tokenizer: str | None = None # an encoding of tiktoken (gpt2, r50k_base, p50k_base, cl100k_base,
                             # o200k_base), a tokenizer.json or its folder, or a meta.pkl; None: the
                             # one that is found with the model
model_file: str | None = None # the model.py of the checkpoint, if its code was edited: it is run;
                              # 'nanogpt': nanoGPT's own, whatever lies near the checkpoint

# The samples
start = "\n" # the prompt; FILE:path: the text of a file; LINES:path, JSONL:path: a file of many
             # prompts; FILE:-: stdin; quotes around all of it are removed: '"\n"' is a newline
num_samples = 10 # how many samples to generate for each prompt
max_new_tokens = 500 # how many tokens each sample adds to the prompt
score = False # instead of continuing the prompts, say how likely the model finds them

# How tokens are chosen
temperature = 0.8 # lower: more predictable; higher: more random; 0: always the most likely token
top_k: int | None = 200 # sample only from the top_k most likely tokens; None or 0: from all
top_p: float | None = None # nucleus sampling: only from the most likely tokens whose probabilities
                           # add up to top_p
min_p: float | None = None # sample only from tokens at least min_p times as likely as the best one
repetition_penalty = 1.0 # above 1: tokens that are already in the text become less likely
stop: str | list | None = None # end a sample before this text, or one of a list: ["\n\n", "KING:"]
seed: int | str = 1337 # the same seed gives the same samples; random: a new seed, which is printed

# How the model runs
device = 'auto' # 'cpu', 'cuda', 'cuda:1' or 'mps'; auto: CUDA, else MPS, else the CPU
dtype = 'auto' # 'float32', 'bfloat16' or 'float16'; auto: on CUDA bfloat16 (float16 if the GPU
               # lacks it), elsewhere float32; 'int8', on a CPU: 8-bit weights: faster, other text
compile = False # use torch.compile: a minute at first, not faster on a CPU, untested on a GPU
cuda_graphs = True # on a GPU, run each decode step as a CUDA graph, if graphs work; False is slower
context_shift = False # past block_size, drop the older half of a full window: much faster, but not
                      # nanoGPT's text
draft = True # speculative decoding, with the same text: for one long sample of a large model, on a
             # CPU in float32, an int8 copy proposes tokens, and the model checks them
batch_size: int | None = None # how many samples to generate at once; None: up to 64, on a GPU 128

# Where samples go
out_file: str | None = None # append each sample as a line of JSON to this file; the same command
                            # resumes a run; - prints the lines instead of the samples
logprobs: int | None = None # save each token's log-probability, and so many of the most likely ones
html_file: str | None = None # write a page of the lines in out_file (or in the same name with
                             # .jsonl) that shows how likely each token was
overwrite = False # replace out_file and html_file, instead of resuming the run
show_probs = False # colour each token on the terminal by its probability
interactive = False # ask for prompts and answer each with a sample
watch = False # whenever train.py saves a new ckpt.pt, sample from it too; Ctrl-C ends


def main():
    """Generate samples of all prompts, or score these; print and save each. Or run a session."""
    params = choose_params(globals())
    if interactive:
        from sampling.repl import run_repl
        return run_repl(load_gpt, params, start)
    files = OutputFiles(out_file, html_file, start, overwrite)
    prompts = read_prompts(start, watch)
    for gpt in load_saves(out_dir, load_gpt) if watch else [load_gpt()]:
        samples = make_samples(prompts, gpt.tokenizer, num_samples, is_score=score)
        outputs = Outputs(globals(), files, gpt, prompts)
        new = outputs.resume(samples)
        updates = run_on_all(gpt, new, params=params, batch_size=batch_size, stream=outputs.streams)
        for sample, pieces in updates:
            outputs.update(sample, pieces)
        outputs.finish()
        gpt = None # the memory must be free before the next model is loaded


def load_gpt():
    """The model with its tokenizer, on its device."""
    from sampling.backends.backend_choice import is_short_run  # torch takes a second
    from sampling.text_generator import load_model
    setting = 'out_dir' if init_from == 'resume' else 'init_from' # a ckpt.pt of train.py, or GPT-2
    # The tokenizer: without a setting, a meta.pkl, or an encoding of tiktoken such as GPT-2's.
    options = ModelOptions(device, dtype, tokenizer, model_file, compile, cuda_graphs, draft)
    return load_model(setting, globals()[setting], options, is_short_run(globals()))


def command(owns_process=True):
    """Run with the command line's arguments. owns_process: nothing else runs in this process."""
    setup_console(owns_process)
    shorten_spinning() # a settings file may import torch
    with report_user_errors(status=2), name_write_errors("standard output"): # for --help
        override(globals(), sys.argv[1:], check_settings, ALIASES, FOREIGN)
        globals().update(complete_settings(globals()))
    with report_user_errors():
        serve(load_gpt) or main() # only the first of torchrun's processes runs main
    if owns_process:
        hard_exit()


if __name__ == '__main__':
    command(owns_process=inspect.currentframe().f_back is None) # a notebook goes on
