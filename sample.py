"""Sample from a GPT that nanoGPT trained, or from GPT-2.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --init_from=gpt2 --start="FILE:prompt.txt" --temperature=0.9
    python sample.py config/story.py --seed=42

The samples go to standard output, everything else to standard error. Arguments are taken in order:
settings files (Python that assigns settings) and --key=value, --key value, or a bare --key for True.
"""
import gc
import math
import os
import re
import signal
import sys
import time
from contextlib import suppress

from configurator import override

init_from = 'resume' # 'resume' reads out_dir; or GPT-2: 'gpt2', 'gpt2-xl', a Hugging Face id or folder of its kind
out_dir = 'out' # folder that holds ckpt.pt, or the path of such a file
start = "\n" # the prompt; "FILE:prompt.txt" reads it from a file, "FILE:-" from standard input
num_samples = 10 # how many samples to draw
max_new_tokens = 500 # how many tokens each sample adds to the prompt
temperature = 0.8 # lower is tamer, higher is wilder, 0 always takes the likeliest token
top_k: int | None = 200 # draw only from the top_k likeliest tokens; None or 0: from all
seed = 1337 # the same seed gives the same samples
device = 'auto' # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the best there is
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto: bfloat16 or else float16 on CUDA, float32 elsewhere
compile = False # compile the network first: a minute's wait for more speed after it on a GPU, for none on a CPU
context_shift = False # past block_size: drop the older half of the window and go on; much faster, other text
batch_size: int | None = None # how many samples to draw at once; None: what memory allows; the text stays the same


def main():
    """Load the network and its tokenizer, encode the prompt, then draw the samples and print them."""
    gc.disable() # while everything is loaded there is nothing to collect, and looking for it takes 0.15 s
    import torch  # not above: a mistake in the settings should not have to wait for it

    from packed import hold_memory, pack
    from sampler import RowDraws, initialisation_numbers
    from tokenizer import load_tokenizer

    began = time.perf_counter()
    text = read_prompt()
    place = choose_device()
    precision = choose_dtype(place)
    if place.type == 'cpu':
        hold_memory()
    model, table = load_model()
    # nanoGPT seeds before it builds its network, which draws numbers too; transformers' users seed after.
    drawn = initialisation_numbers(model) if init_from == 'resume' else 0
    draws = RowDraws(seed, place, drawn, steps=max_new_tokens, width=model.config.vocab_size)
    tokenizer = load_tokenizer(*table, model.config.vocab_size)
    ids = tokenizer.encode(text)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {place} in "
        f"{str(precision).removeprefix('torch.')}, loaded in {time.perf_counter() - began:.1f} s")
    generator = model.cast_linears(precision).to(place)
    if place.type == 'cpu' and not compile: # Inductor cannot see into packed weights
        pack(model)
    if place.type == 'cuda':
        from graphs import GraphedGPT
        torch.set_float32_matmul_precision('high') # TF32, as nanoGPT has it
        generator = GraphedGPT(model, compile)
    gc.freeze()
    gc.enable()

    with torch.autocast(place.type, precision, enabled=precision != torch.float32):
        context = torch.tensor([ids[-model.config.block_size:]], device=place) # what the network can see of the prompt
        at_once = min(num_samples, batch_size or batch_that_fits(model, len(ids) + max_new_tokens))
        if compile:
            compile_for(generator, context, {at_once, num_samples % at_once or at_once})
        began = time.perf_counter()
        for new in draw_samples(generator, context, draws, at_once):
            print(tokenizer.decode(ids + new), '---------------', sep='\n', flush=True)
    took, tokens = time.perf_counter() - began, num_samples * max_new_tokens
    say(f"{num_samples} samples, {tokens} tokens in {took:.1f} s: {tokens / took:.0f} tokens/s")


def draw_samples(generator, context, draws, at_once):
    """Yield the new ids of each sample in turn. Where memory does not suffice, half as many are drawn at once."""
    from packed import return_memory
    done = 0
    while done < num_samples:
        idx = context.expand(min(at_once, num_samples - done), -1)
        draws.for_samples(done, len(idx))
        try:
            samples = generator.generate(idx, max_new_tokens, temperature, top_k, draws, context_shift)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error) or len(idx) == 1:
                raise
            at_once = len(idx) // 2
            say(f"out of memory with {len(idx)} samples at once: going on with {at_once}")
        if at_once < len(idx): # not above, where the error still holds what was drawn
            return_memory()
            continue
        yield from samples[:, idx.size(1):].tolist()
        done += len(idx)


def check_settings():
    """Raise ValueError where a setting has a value that cannot work, whoever set it."""
    global top_k
    top_k = top_k or None
    must(init_from not in ('', 'scratch'), "init_from must be 'resume' or a Hugging Face id or folder", init_from)
    must(start, "start is empty, and a sample needs something to continue: a newline is --start='\"\\n\"'", start)
    must(1 <= num_samples <= 10**9, "num_samples must be at least 1, and at most a thousand million", num_samples)
    must(0 <= max_new_tokens <= 10**9, "max_new_tokens must be from 0 to a thousand million", max_new_tokens)
    must(0 <= temperature < math.inf, "temperature must be 0 (always the likeliest token) or more", temperature)
    must(top_k is None or top_k >= 1, "top_k must be at least 1, or None or 0 for every token", top_k)
    must(batch_size is None or 1 <= batch_size <= 10**5, "batch_size must be from 1 to 100000, or None", batch_size)
    must(-2**63 <= seed < 2**64, "seed must lie between -2**63 and 2**64 - 1", seed)
    must(re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device), "device must be auto, cpu, cuda, cuda:N or mps", device)
    must(dtype in ('auto', 'float32', 'bfloat16', 'float16'), "dtype must be auto, float32, bfloat16 or float16", dtype)


def must(holds, rule, value):
    """Raise ValueError with the rule and the value that broke it, unless it holds."""
    if not holds:
        raise ValueError(f"{rule}; got {value!r:.100}")


def read_prompt():
    """The text that start stands for; ValueError where there is none."""
    if not start.startswith('FILE:'):
        return start
    path = start[5:]
    try:
        with open(0 if path == '-' else path, encoding='utf-8', closefd=path != '-') as f:
            text = f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"the prompt file {path} is not UTF-8: {e}") from None
    except (OSError, ValueError) as e: # a path may not even be one
        raise ValueError(f"cannot read the prompt file {path!r:.200}: {getattr(e, 'strerror', e)}") from None
    if not text:
        raise ValueError(f"the prompt file {path} is empty: a sample needs something to continue")
    return text


def choose_device():
    """The torch.device to run on; ValueError where the one that was named is not there."""
    import torch
    there = ['cpu']
    if torch.backends.mps.is_available():
        there.insert(0, 'mps')
    if torch.cuda.is_available():
        there = ['cuda', *(f'cuda:{i}' for i in range(torch.cuda.device_count())), *there]
    if device not in ['auto', *there]:
        raise ValueError(f"device={device} is not there: this machine, as its torch sees it, has {', '.join(there)}")
    return torch.device(there[0] if device == 'auto' else device)


def choose_dtype(place):
    """The torch.dtype that the network computes in; ValueError where the device has not the one that was named."""
    import torch
    bfloat16 = place.type != 'cuda' or torch.cuda.is_bf16_supported()
    if dtype == 'bfloat16' and not bfloat16:
        raise ValueError("dtype=bfloat16 is not there: this GPU has float16 and float32")
    if dtype != 'auto':
        return getattr(torch, dtype)
    if place.type != 'cuda':
        return torch.float32
    return torch.bfloat16 if bfloat16 else torch.float16


def load_model():
    """The network that init_from and out_dir say, on the CPU, and where to look for its character table."""
    from model import GPT
    from weights import find_checkpoint, load_checkpoint, load_huggingface

    source = find_checkpoint(out_dir) if init_from == 'resume' else init_from
    try:
        if init_from == 'resume':
            model_args, state_dict, config = load_checkpoint(source)
            table = source.parent, config.get('dataset')
        else:
            model_args, state_dict = load_huggingface(source)
            table = None, None
        model = GPT.from_state_dict(model_args, state_dict)
    except (OSError, MemoryError):
        raise
    except Exception as e: # what is no network trips torch in many ways
        if out_of_memory(e):
            raise
        named = isinstance(e, ValueError) and str(source) in str(e)
        raise ValueError(str(e) if named else f"cannot load {source}: {e}") from None
    return model, table


def batch_that_fits(model, length):
    """How many samples of so many tokens to draw at once: what half of the free memory holds, within reason."""
    import torch
    place = model.lm_head.weight.device
    if place.type == 'cuda':
        free, most = torch.cuda.mem_get_info(place)[0], 128 # each row costs launches
    else:
        import psutil
        free, most = psutil.virtual_memory().available, 64 # more is hardly faster, and the first comes later
    return max(1, min(most, free // 2 // model.bytes_per_sample(length)))


def out_of_memory(error):
    """Whether that is what an exception, or the one it came of, means; torch and oneDNN have several for it."""
    words = r"MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive"
    return error is not None and (bool(re.search(words, f"{type(error).__name__} {error}"))
                                  or out_of_memory(error.__context__))


def compile_for(generator, context, batch_sizes):
    """Compile what generation will run, and say how long that took; ValueError where this machine cannot."""
    say("compiling ...")
    began = time.perf_counter()
    try:
        for rows in batch_sizes:
            generator.compile_generation(context.expand(rows, -1), max_new_tokens, context_shift)
    except Exception as e: # a missing compiler or driver shows in many ways
        raise ValueError(f"compile=True does not work here, leave it out ({type(e).__name__}: {e!s:.300})") from None
    say(f"compiled in {time.perf_counter() - began:.1f} s")


def say(text):
    """Tell the user what is no sample, where there is somebody to tell."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def fail(status, error):
    """End with one line that says why, whatever the error's text holds."""
    text = ''.join(char if char.isprintable() else ' ' for char in f"error: {error}")
    say(' '.join(text.split()))
    sys.exit(status)


def run():
    """The settings, then the samples; every mistake that a user can make ends in one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # At once, and without a traceback; importing torch would swallow a KeyboardInterrupt.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors='replace') # where it cannot show a character
    try:
        try:
            changed = override(globals(), sys.argv[1:], warn=say)
            check_settings()
        except ValueError as error:
            fail(2, error)
        if changed:
            say("settings: " + ', '.join(f"{name}={value!r:.100}" for name, value in changed.items()))
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(0) # torch's own end takes 0.3 s
    except BrokenPipeError: # the reader has had enough, as in: python sample.py | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        fail(1, error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        fail(1, f"out of memory: the network, or one sample of it, is too large ({str(error) or 'no more known':.200})")


if __name__ == '__main__':
    run()
