"""Sample from a GPT that nanoGPT trained, or from GPT-2.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:"
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --temperature=0.9
    python sample.py config/story.py --seed=42

The samples go to standard output, everything else to standard error. Arguments apply from left to right:
settings files (Python that assigns settings) and --key=value, --key value, or a bare --key for True.
"""
import sys

from configurator import override
from sampling.backends.process import avoid_amx, pause_garbage_collection, resume_garbage_collection, shorten_spinning
from sampling.compatibility import ALIASES, training_settings
from sampling.generation.workers import Workers
from sampling.inputs.prompts import PromptSource
from sampling.outputs.console import hard_exit, is_tty, log, report_user_errors, setup_console
from sampling.outputs.outputs import Outputs, num_logprobs, open_outputs
from sampling.outputs.printer import Printer
from sampling.outputs.progress import Progress
from sampling.params import ModelOptions, SamplingParams, choose_seed
from sampling.validation import check_settings

# The model
init_from = 'resume' # 'resume': the checkpoint in out_dir; otherwise the Hugging Face id or the folder of a GPT-2 model
out_dir = 'out' # the folder that holds ckpt.pt, or the path of such a file

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
exact = False # run nanoGPT's own operations, one sample at a time: slower, but designed to give nanoGPT's text on a
              # GPU in any dtype
draft: str | None = None # speculative decoding: a draft model proposes tokens, and the model checks several in one
                         # pass; faster on a CPU for one sample at a time, with the same text in float32; int8: the
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


def main(settings):
    """Load the model, then generate, save and show samples. settings: the globals above, by name."""
    import torch  # imported here, so that errors in the settings are reported without waiting for torch

    from sampling.backends.devices import autocast, dtype_name
    from sampling.backends.memory import peak_memory
    from sampling.generation.engine import Engine
    from sampling.inputs.notices import warn_about_stop_texts

    workers = Workers().connect() # one process, unless torchrun started more
    settings = {**settings, "seed": workers.broadcast(choose_seed(seed, log))}
    params = SamplingParams.from_settings(settings, num_logprobs(settings))
    with workers.fail_together():
        if interactive and workers.world_size > 1:
            raise ValueError("interactive=True needs a single process: run it without torchrun")
        prompts = PromptSource(start, settings) if workers.is_main and not interactive else None
        torch_device, ptdtype, checkpoint, gpt, tokenizer = load_model(workers.local_rank)
        warn_about_stop_texts(params.stop_texts, tokenizer, log)
        requests, outputs, num_total, max_prompt_len = [], Outputs(), None, None
        if prompts:
            num_total, max_prompt_len = prompts.count_and_max_len(tokenizer, num_samples) # None for standard input
            outputs = open_outputs(settings, checkpoint, torch_device.type, dtype_name(ptdtype))
            requests = open_requests(prompts, outputs, tokenizer, gpt.config.block_size)
        model = prepare_backend(gpt, torch_device, ptdtype, num_total)
    num_total, max_prompt_len = workers.broadcast((num_total, max_prompt_len))
    resume_garbage_collection()

    with torch.no_grad(), autocast(torch_device, ptdtype):
        printer = Printer(tokenizer, show_probs)
        num_left = None if num_total is None else num_total - outputs.num_saved
        progress = Progress(num_left, max_new_tokens)
        engine = Engine(model, tokenizer, params, checkpoint.num_init_draws, log=log, on_tokens=progress.add_tokens,
                        stream=is_tty(sys.stdout) and out_file != "-", is_huggingface=checkpoint.is_huggingface)
        if interactive:
            from sampling.repl import run_repl
            run_repl(engine, printer, start)
        else:
            engine.batch_size = prepare_batches(model, workers, params, num_total, max_prompt_len)
            show_and_save(workers.imap(engine, requests), outputs, printer, progress)
    outputs.close()
    progress.close(peak_memory(torch_device))
    if draft:
        log(model.summary())


def load_model(local_rank):
    """Choose the device and dtype. Load the checkpoint, its GPT, and its tokenizer, or else GPT-2's encoding."""
    import torch

    from model import GPT
    from sampling.backends.devices import choose_device, choose_dtype
    from sampling.checkpoints.by_name import load_from_settings
    from sampling.checkpoints.state_dict import crc32_of
    from sampling.inputs.tokenizer import load_tokenizer
    torch_device = choose_device(device, local_rank)
    ptdtype = choose_dtype(torch_device, dtype)
    checkpoint = load_from_settings(init_from, out_dir, copy_weights=ptdtype != torch.int8)
    if out_file:
        checkpoint.crc32 = crc32_of(checkpoint.state_dict) # now, because GPT.from_checkpoint empties the state_dict
    return torch_device, ptdtype, checkpoint, GPT.from_checkpoint(checkpoint), load_tokenizer(checkpoint, log)


def prepare_backend(gpt, torch_device, ptdtype, num_total):
    """The backend that generates num_total samples, with its draft if there is one. Logs what runs where."""
    from sampling.backends.devices import dtype_name
    from sampling.generation.speculation import prepare_with_draft
    log(f"{gpt.num_params() / 1e6:.2f}M parameters on {torch_device} in {dtype_name(ptdtype)}")
    # With out_file, pack all layers now, so that a resumed run computes the same logits to the last bit. A run of one
    # sample need not: it cannot be resumed in the middle.
    options = ModelOptions(compile=compile, cuda_graphs=cuda_graphs, exact=exact, draft=draft,
                           pack_eagerly=bool(out_file) and num_total != 1)
    return prepare_with_draft(gpt, torch_device, ptdtype, options, log)


def open_requests(prompts, outputs, tokenizer, block_size):
    """The requests of the run. Those that an earlier run saved are marked. Logs the first prompt that is too long."""
    from sampling.inputs.notices import log_cropped
    return log_cropped(outputs.resume(prompts.requests(tokenizer, num_samples)), tokenizer, block_size, log)


def prepare_batches(backend, workers, params, num_total, max_prompt_len):
    """How many samples to generate at once. With compile=True, also compiles the model for batches of these sizes.

    num_total, max_prompt_len: of the run, in samples and in tokens; None if they are unknown.
    """
    from sampling.backends.memory import max_batch_size
    from sampling.backends.prepare import warm_up_compile
    length = (max_prompt_len or backend.config.block_size) + max_new_tokens
    size = batch_size or max_batch_size(backend, length, workers.local_world_size)
    if compile:
        warm_up_compile(backend, max_prompt_len, workers.batch_sizes(num_total, size), params, log)
    return size


def show_and_save(samples, outputs, printer, progress):
    """Save each finished sample, then show it. While streaming, samples come unfinished too."""
    for sample in samples:
        if sample.finish_reason:
            outputs.write(sample) # before it is shown: a resumed run does not show saved samples again
            progress.add_sample(sample)
        if not outputs.uses_stdout:
            printer.update(sample)


if __name__ == '__main__':
    setup_console(is_main=Workers().is_main)
    with report_user_errors(status=2):
        settings = override(globals(), sys.argv[1:], validate=check_settings, log=log, aliases=ALIASES,
                            ignore=training_settings)
    shorten_spinning() # this and the next call must run before torch is imported
    pause_garbage_collection()
    if settings["dtype"] != "bfloat16": # in bfloat16, AMX makes prefill and batches faster
        avoid_amx()
    with report_user_errors():
        main(settings)
    hard_exit()
