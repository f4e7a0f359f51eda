"""Sample from a GPT that nanoGPT trained, or from GPT-2.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --init_from=gpt2 --start="FILE:prompt.txt" --temperature=0.9
    python sample.py config/story.py --seed=42

The samples go to standard output, everything else to standard error. Arguments are taken in order:
settings files (Python that assigns settings) and --key=value, --key value, or a bare --key for True.
"""
import math
import os
import re
import sys
import time

from configurator import override

init_from = 'resume' # 'resume' reads out_dir; or GPT-2: 'gpt2', 'gpt2-xl', any Hugging Face id or folder of its architecture
out_dir = 'out' # folder that holds ckpt.pt, or the path of such a file
start = "\n" # the prompt; "FILE:prompt.txt" reads it from a file, "FILE:-" from standard input
num_samples = 10 # how many samples to draw
max_new_tokens = 500 # how many tokens each sample adds to the prompt
temperature = 0.8 # lower is tamer, higher is wilder, 0 always takes the likeliest token
top_k: int | None = 200 # draw only from the top_k likeliest tokens; None or 0: from all
seed = 1337 # the same seed gives the same samples
device = 'auto' # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the best there is
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto: bfloat16 or else float16 on CUDA, float32 elsewhere
compile = False # compile the network first: a minute's wait for more speed after it
batch_size: int | None = None # how many samples are drawn at once; None: what memory allows. The text stays the same


def check_settings():
    """Raise ValueError where a setting has a value that cannot work, whoever set it."""
    global top_k
    top_k = top_k or None
    must(num_samples >= 1, "num_samples must be at least 1", num_samples)
    must(max_new_tokens >= 0, "max_new_tokens must not be negative", max_new_tokens)
    must(0 <= temperature < math.inf, "temperature must be a number from 0 (always the likeliest token) up", temperature)
    must(top_k is None or top_k >= 1, "top_k must be at least 1; None or 0 keeps every token", top_k)
    must(batch_size is None or batch_size >= 1, "batch_size must be at least 1; None lets memory decide", batch_size)
    must(-2**63 <= seed < 2**64, "seed must lie between -2**63 and 2**64 - 1", seed)
    must(re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device), "device must be auto, cpu, cuda, cuda:N or mps", device)
    must(dtype in ("auto", "float32", "bfloat16", "float16"), "dtype must be auto, float32, bfloat16 or float16", dtype)
    must(start, "start is empty: a sample needs something to continue, such as a newline (the default) or "
                "\"<|endoftext|>\" with GPT-2's encoding", start)


def main():
    """Load the network and its tokenizer, encode the prompt, draw the samples and print them."""
    import torch # here, so that a mistake in the settings does not wait for it
    from model import GPT
    from sampler import RowDraws, initialisation_numbers
    from tokenizer import load_tokenizer
    from weights import find_checkpoint, load_checkpoint, load_huggingface

    began = time.perf_counter()
    text = read_prompt()
    place = torch.device(choose_device(torch))
    number = getattr(torch, choose_dtype(torch, place))
    if place.type == 'cuda':
        torch.set_float32_matmul_precision('high') # TF32

    if init_from == 'resume':
        path = find_checkpoint(out_dir)
        model_args, state_dict, config = load_checkpoint(path)
        folder, dataset = path.parent, config.get('dataset')
    else:
        model_args, state_dict = load_huggingface(init_from)
        folder, dataset = None, None
    model = GPT.from_state_dict(model_args, state_dict)
    tokenizer = load_tokenizer(folder, dataset, model.config.vocab_size)
    prompt = torch.tensor([tokenizer.encode(text)], device=place)
    # nanoGPT seeds before it builds its network, which draws numbers too; transformers seeds after.
    drawn = initialisation_numbers(model) if init_from == 'resume' else 0
    draws = RowDraws(seed, place, drawn, steps=max_new_tokens, width=model.config.vocab_size)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {place}, {str(number).removeprefix('torch.')}, "
        f"loaded in {time.perf_counter() - began:.1f} s")
    model.cast_linears(number).to(place)

    with torch.autocast(place.type, number, enabled=number != torch.float32):
        rows = min(num_samples, batch_size or batch_that_fits(torch, model, prompt.size(1) + max_new_tokens))
        if compile:
            say("compiling ...")
            began = time.perf_counter()
            compiled(model, prompt.expand(rows, -1))
            say(f"compiled in {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        for first in range(0, num_samples, rows):
            count = min(rows, num_samples - first)
            samples = model.generate(prompt.expand(count, -1), max_new_tokens, temperature, top_k, draws.next_rows(count))
            for ids in samples.tolist():
                print(tokenizer.decode(ids))
                print('---------------', flush=True)
    took = time.perf_counter() - began
    tokens = num_samples * max_new_tokens
    say(f"{num_samples} samples, {tokens} tokens in {took:.1f} s: {tokens / took:.0f} tokens/s")


def read_prompt():
    """The text that start stands for; ValueError or OSError where it has none to give."""
    if not start.startswith('FILE:'):
        return start
    path = start[5:]
    try:
        with open(sys.stdin.fileno() if path == '-' else path, encoding='utf-8', closefd=path != '-') as f:
            text = f.read()
    except UnicodeDecodeError as e:
        raise ValueError(f"the prompt file {path} is not UTF-8 text at byte {e.start + 1}") from None
    must(text, f"the prompt file {path} is empty: a sample needs something to continue", text)
    return text


def choose_device(torch):
    """The device to use; ValueError where the one that was named is not there."""
    there = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available(), 'cpu': True}
    if device == 'auto':
        return next(name for name in there if there[name])
    name, _, number = device.partition(':')
    must(there[name], f"this machine, or its torch, has no {name}; leave device=auto or pass --device=cpu", device)
    must(not number or int(number) < torch.cuda.device_count(), f"this machine has {torch.cuda.device_count()} CUDA devices", device)
    return device


def choose_dtype(torch, place):
    """The dtype to compute in; ValueError where the device cannot use the one that was named."""
    if dtype == 'auto':
        return 'float32' if place.type != 'cuda' else 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
    return dtype


def batch_that_fits(torch, model, length):
    """How many samples of length tokens to draw at once: what half of the free memory holds, within reason."""
    place = model.lm_head.weight.device
    if place.type == 'cuda':
        free, most = torch.cuda.mem_get_info(place)[0], 512
    else:
        import psutil
        free, most = psutil.virtual_memory().available, 64 # more is hardly faster, and the first comes later
    return max(1, min(most, free // 2 // model.bytes_per_sample(length)))


def compiled(model, prompt):
    """Compile what generation runs; ValueError where this machine cannot."""
    try:
        model.compile_generation(prompt, max_new_tokens)
    except Exception as e: # a compiler or a driver that is missing shows in many ways
        raise ValueError(f"compile=True does not work here: {type(e).__name__}: {str(e).strip().splitlines()[0]}; leave it out") from None


def must(holds, rule, value):
    """Raise ValueError with the rule and the value that broke it, unless it holds."""
    if not holds:
        raise ValueError(f"{rule}; got {value!r:.100}")


def say(text):
    """Tell the user something that is no sample."""
    print(text, file=sys.stderr, flush=True)


def fail(status, error):
    """End with one line that says why."""
    text = ''.join(char if char.isprintable() else ' ' for char in f"error: {error}")
    say(' '.join(text.split()))
    sys.exit(status)


if __name__ == '__main__':
    try:
        override(globals(), sys.argv[1:])
        check_settings()
    except ValueError as error:
        fail(2, error)
    try:
        main()
    except BrokenPipeError: # the reader has had enough, as in: python sample.py | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, MemoryError) as error:
        fail(1, error)
    except KeyboardInterrupt:
        sys.exit(130)
