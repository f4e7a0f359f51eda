"""Sample from a GPT that nanoGPT trained, or from GPT-2.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:"
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --temperature=0.9
    python sample.py config/story.py --seed=42

The samples go to standard output, everything else to standard error. Arguments apply from left to right:
settings files (Python that assigns settings) and --key=value, --key value, or a bare --key for True.
"""
import gc
import inspect
import logging
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__))) # for runpy and for pip's command: Python does it itself

from configurator import override
from sampling.generation.workers import RANK, WORLD_SIZE, Workers
from sampling.inputs.prompts import PromptSource, log_notices, make_samples, warn_about_stop_texts
from sampling.inputs.tokenizer import load_tokenizer
from sampling.messages import ALIASES, training_settings
from sampling.outputs.console import hard_exit, is_tty, report_user_errors, setup_console
from sampling.outputs.outputs import Outputs, num_logprobs
from sampling.outputs.printer import Printer, Progress
from sampling.params import ModelOptions, SamplingParams, check_settings, choose_seed
from sampling.process import peak_memory, return_freed_memory, shorten_spinning

# The model
init_from = 'resume' # 'resume': the checkpoint in out_dir; otherwise the Hugging Face id or the folder of a GPT-2 model
out_dir = 'out' # the folder that holds ckpt.pt, or the path of such a file
tokenizer: str | None = None # an encoding of tiktoken (gpt2, r50k_base, p50k_base, cl100k_base, o200k_base), a
                             # tokenizer.json or its folder, or a meta.pkl; None: the one that is found with the model

# The samples
start = "\n" # the prompt; FILE:path: the text of a file; LINES:path, JSONL:path: a file of many prompts; FILE:-: stdin;
             # quotes around all of it are removed, as in Python: '"\n"' is a newline
num_samples = 10 # how many samples to generate for each prompt
max_new_tokens = 500 # how many tokens each sample adds to the prompt

# How tokens are chosen
temperature = 0.8 # lower: more predictable; higher: more random; 0: always the most likely token
top_k: int | None = 200 # sample only from the top_k most likely tokens; None or 0: from all
top_p: float | None = None # nucleus sampling: only from the most likely tokens whose probabilities add up to top_p
min_p: float | None = None # sample only from tokens at least min_p times as likely as the most likely token
repetition_penalty = 1.0 # above 1: tokens that are already in the text become less likely
stop: str | list | None = None # end a sample before this text, or before one of a list such as ["\n\n", "KING:"]
seed: int | str = 1337 # the same seed gives the same samples; random: a new seed, which is printed

# How the model runs
device = 'auto' # 'cpu', 'cuda', 'cuda:1' or 'mps'; auto: CUDA, else MPS, else the CPU
dtype = 'auto' # 'float32', 'bfloat16' or 'float16'; auto: on CUDA bfloat16, or float16 if the GPU lacks it; elsewhere
               # float32; 'int8', on a CPU: int8 weights, for speed and less memory; changes the text
compile = False # compile the model with torch.compile first, which takes about a minute: not faster on a CPU, not
                # measured on a GPU
cuda_graphs = True # on a GPU, run each decode step as a CUDA graph, if graphs work there; False is slower, with the
                   # same text
context_shift = False # past block_size: drop the older half of a full window; much faster, but not nanoGPT's text
exact = False # run nanoGPT's own operations, one sample at a time: slower, but designed to give nanoGPT's text on
              # CUDA in any dtype
draft: str | None = None # speculative decoding: a draft model proposes tokens, and the model checks several in one
                         # pass; only on a CPU, for one sample at a time, with the same text in float32; int8: the
                         # model itself in int8; otherwise the name, folder or file of a smaller model with the same
                         # vocabulary
batch_size: int | None = None # how many samples to generate at once; None: as many as memory allows

# Where samples go
out_file: str | None = None # append each sample as a line of JSON to this file; the same command resumes a run;
                            # - prints the lines instead of the samples
logprobs: int | None = None # save the log-probability of each token in out_file, with this many of the most likely ones
html_file: str | None = None # write a page that shows how likely each token was, and the alternatives
overwrite = False # replace out_file and html_file, instead of resuming the run
show_probs = False # colour each token on the terminal by its probability
interactive = False # ask for prompts and answer each with a sample
watch = False # when the samples are done, wait until train.py saves a new ckpt.pt, and sample from it too; Ctrl-C ends


def main(settings):
    """Load the model, then generate, save and show samples. settings: the values of the settings above, by name."""

    from sampling.checkpoints.nanogpt import wait_for_saves

    workers = Workers(settings.interactive or settings.watch) # mostly one process
    settings.seed = choose_seed(settings.seed)
    params = SamplingParams.from_settings(vars(settings), num_logprobs(vars(settings)))
    if settings.interactive:
        from sampling.repl import run_repl
        return run_repl(lambda: load(settings, params)[0], params, settings.show_probs, settings.start)
    if RANK:
        return workers.serve(load(settings, params)[0])
    prompts = PromptSource(settings.start, settings.watch)
    outputs = Outputs(vars(settings))
    for _ in wait_for_saves(settings.out_dir, logger.info) if settings.watch else [None]:
        model, num_total = load(settings, params, prompts)
        samples = outputs.open(model, make_samples(prompts, model.tokenizer, settings.num_samples))
        samples = log_notices(samples, model.tokenizer, model.backend.config.block_size, logger.info)
        printer = Printer(model.tokenizer, settings.show_probs)
        progress = Progress(num_total and num_total - outputs.num_saved, settings.max_new_tokens)
        for sample, pieces in workers.run(model, samples, params, settings.batch_size, is_tty(sys.stdout)):
            sample.num_emittable_chars += sum(len(piece.text) for piece in pieces)
            if sample.finish_reason: # while streaming, samples come unfinished too
                outputs.write(sample) # before it is shown: a resumed run does not show saved samples again
                progress.add_tokens(sample.num_tokens)
                progress.add_sample(sample)
            if not outputs.uses_stdout and (sample.finish_reason or is_tty(sys.stdout)):
                printer.update(sample)
        outputs.write_page()
        progress.close(peak_memory(model.backend.device))
        del model # its memory must be free before the next model is loaded


def load(settings, params, prompts=None):
    """Load the model with its tokenizer. Returns (model, number of samples or None if unknown, batch size)."""
    from sampling.backends.prepare import choose_device, choose_dtype, count_steps, weight_converter
    from sampling.checkpoints.huggingface import load_huggingface
    from sampling.checkpoints.nanogpt import load_nanogpt
    from sampling.text_generator import TextGenerator
    return_freed_memory() # of the model before this one
    device = choose_device(settings.device)
    dtype = choose_dtype(device, settings.dtype, settings.exact)
    load_options = dict(convert=weight_converter(dtype), with_crc32=bool(settings.out_file), log=logger.info)
    if settings.init_from == 'resume': # the ckpt.pt that train.py wrote
        checkpoint = load_nanogpt(settings.out_dir, **load_options)
    else: # GPT-2
        checkpoint = load_huggingface(settings.init_from, **load_options)
    tokenizer = load_tokenizer(checkpoint, logger.info, settings.tokenizer)
    warn_about_stop_texts(params.stop_texts, tokenizer, logger.warning)
    num_total = prompts and prompts.count_and_max_len(tokenizer, settings.num_samples)[0]
    num_steps = count_steps(num_total, settings.max_new_tokens, settings.batch_size)
    options = ModelOptions(settings.compile, settings.cuda_graphs, settings.exact, settings.draft)
    return TextGenerator(checkpoint, tokenizer, device, dtype, options, None if WORLD_SIZE > 1 else num_steps), num_total


logger = logging.getLogger("sampling") # below the settings, because it is none


def command(owns_process=True):
    """Run with the command line's arguments. owns_process: nothing else runs in this process; it may end at once."""
    setup_console(RANK == 0, owns_process)
    with report_user_errors(status=2):
        settings = override(globals(), sys.argv[1:], check_settings, logger.info, ALIASES, training_settings)
    if owns_process:
        shorten_spinning() # before torch is imported
        gc.set_threshold(1_000_000) # looking for garbage more often takes 0.15 s while torch is loaded, and finds none
    with report_user_errors():
        main(SimpleNamespace(**settings))
    if owns_process:
        hard_exit()


if __name__ == '__main__':
    command(owns_process=inspect.currentframe().f_back is None) # a notebook's %run and runpy call this file, and go on
