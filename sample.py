"""Sample from a GPT that nanoGPT trained, or from GPT-2.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --init_from=gpt2 --start="FILE:prompt.txt" --temperature=0.9
    python sample.py config/story.py --seed=42

The samples go to standard output, everything else to standard error. Arguments are taken in order:
settings files (Python that assigns settings) and --key=value, --key value, or a bare --key for True.
"""
import gc
import os
import sys
import time
from functools import partial
from itertools import count

import rules
from configurator import override
from console import Printer, Progress, leave, mistakes_told, on_terminal, prepare_console, say

init_from = 'resume' # 'resume' reads out_dir; or GPT-2: 'gpt2', 'gpt2-xl', a Hugging Face id or folder of its kind
out_dir = 'out' # folder that holds ckpt.pt, or the path of such a file
start = "\n" # the prompt; FILE:prompt.txt is a file's text, LINES:prompts.txt many, JSONL:prompts.jsonl too; -: stdin
num_samples = 10 # how many samples to draw of each prompt
max_new_tokens = 500 # how many tokens each sample adds to the prompt
temperature = 0.8 # lower is tamer, higher is wilder, 0 always takes the likeliest token
top_k: int | None = 200 # draw only from the top_k likeliest tokens; None or 0: from all
top_p: float | None = None # draw only from the fewest tokens that reach this probability together
min_p: float | None = None # draw only from tokens with at least this share of the likeliest one's probability
repetition_penalty = 1.0 # above 1: what the text holds already becomes less likely
stop: str | list | None = None # end a sample where this text begins, such as "<|endoftext|>"; in a file also a list
seed = 1337 # the same seed gives the same samples
device = 'auto' # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the best there is
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto: bfloat16 or else float16 on CUDA, float32 elsewhere
compile = False # compile the network first: a minute's wait for more speed after it on a GPU, for none on a CPU
context_shift = False # past block_size: drop the older half of the window and go on; much faster, other text
batch_size: int | None = None # how many samples to draw at once; None: what memory allows; float32 text stays the same
out_file: str | None = None # samples.jsonl: add every sample as a line of JSON; a run that was cut short is taken up
html_file: str | None = None # samples.html: a page that shows how likely each token was, and what else was
show_probs = False # colour each token on the terminal by how likely it was
interactive = False # ask for prompts and answer each with a sample


def main():
    """Load the network and its tokenizer, then draw the samples that the prompts ask for, show and save them."""
    gc.disable() # while everything is loaded there is nothing to collect, and looking for it takes 0.15 s
    import torch  # not above: a mistake in the settings should not have to wait for it

    from devices import choose_device, choose_dtype, compile_for, get_ready, peak_memory
    from distributed import Team
    from interactive import converse
    from loading import load
    from prompts import Prompts
    from sampler import RowDraws, initialisation_numbers

    began = time.perf_counter()
    team = Team().join()
    with team.together():
        if interactive and team.size > 1:
            raise ValueError("interactive=True takes one process, without torchrun")
        prompts = Prompts(start) if team.first and not interactive else []
        place = choose_device(device, team.process)
        precision = choose_dtype(place, dtype)
        model, tokenizer, source = load(init_from, out_dir)
        samples, outputs, kept = number(prompts, tokenizer), [], 0
        total = longest = None
        if prompts:
            total, longest = prompts.survey(tokenizer, num_samples)
            samples, outputs, kept = open_outputs(samples, model, source, place, precision)
    total, longest = team.told((total, longest))
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {place} in "
        f"{str(precision).removeprefix('torch.')}, loaded in {time.perf_counter() - began:.1f} s")
    # nanoGPT seeds before it builds its network, which draws numbers too; transformers' users seed after.
    drawn = initialisation_numbers(model) if init_from == 'resume' else 0
    # A run that is taken up is to make the sums of a batch as if it had never ended.
    generator = get_ready(model, place, precision, compile, now=bool(out_file))
    gc.freeze()
    gc.enable()
    stream = partial(RowDraws, device=place, initialisation=drawn, width=model.config.vocab_size)

    with torch.autocast(place.type, precision, enabled=precision != torch.float32):
        printer = Printer(tokenizer, tinted=show_probs)
        if interactive:
            return converse(globals(), partial(make_drawer, generator, tokenizer, stream), tokenizer, printer)
        at_once = batch_size or samples_at_once(model, longest, team)
        if compile:
            prompt, sizes = min(longest or 1, model.config.block_size), team.batch_sizes(total, at_once)
            compile_for(generator, place, prompt, sizes, max_new_tokens, context_shift, say)
        progress = Progress(total and total - kept, max_new_tokens)
        drawer = make_drawer(generator, tokenizer, stream, at_once=at_once, ragged=rules.many(start),
                             live=team.first and on_terminal(sys.stdout), say=say, tick=progress.tick)
        show_and_save(team.draw(samples, drawer), printer, outputs, progress)
    progress.close(peak_memory(place))


def show_and_save(samples, printer, outputs, progress):
    """Show the samples, those too that still grow, and save what has ended."""
    for sample in samples:
        if sample.ended:
            for output in outputs:
                output.add(sample)
            progress.count(sample)
        printer.show(sample)
    for output in outputs:
        output.close()


def number(prompts, tokenizer):
    """Yield the run's samples, still to be drawn: num_samples of every prompt."""
    from batches import Sample
    numbers = count()
    for prompt in prompts:
        ids = prompt.encode(tokenizer)
        for _ in range(num_samples):
            yield Sample(next(numbers), prompt, ids)


def samples_at_once(model, longest, team):
    """How many samples memory allows in a batch, the longest prompt having so many tokens; None: not known."""
    from devices import batch_that_fits
    block_size = model.config.block_size
    length = (longest or block_size) + max_new_tokens
    # Compiled steps have a cache of one size.
    return batch_that_fits(model, max(length, block_size) if compile else length, team.beside)


def open_outputs(samples, model, source, place, precision):
    """The samples, those marked that were saved before; the files that they go to; how many these hold."""
    settings = rules.of_text(globals())
    settings |= {'device': place.type, 'dtype': str(precision).removeprefix('torch.')}
    outputs, kept = [], 0
    if out_file:
        from saving import SampleFile
        from weights import checksum
        saved = SampleFile(out_file, {'path': str(source), 'crc32': checksum(model.parameters())}, settings)
        samples, kept = saved.take_up(samples), saved.count
        outputs.append(saved)
        if kept:
            say(f"{out_file} holds {kept} samples already: going on after them")
    if html_file:
        from page import Page
        name = out_dir if init_from == 'resume' else init_from
        outputs.insert(0, Page(html_file, {'model': name, 'start': start, **settings}, kept))
    return samples, outputs, kept


def make_drawer(generator, tokenizer, stream, **more):
    """What draws samples as the settings say now; stream(seed, steps=...) gives the random numbers."""
    from batches import Drawer
    how = {name: globals()[name] for name in ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty')}
    watch = 5 if html_file else 0 if out_file or show_probs else None
    return Drawer(generator, tokenizer, stream(seed, steps=max_new_tokens), how, max_new_tokens,
                  context_shift=context_shift, stops=rules.stops(stop), watch=watch, **more)


def share_cores():
    """Have OpenMP's threads, while they wait for each other, go to sleep after less than a millisecond; before torch.

    Else they keep their cores for up to 20 ms, and where another program wants one, the thread that is waited for may
    have none: such a run takes 4 to 6 times longer.
    """
    if not os.environ.keys() & {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'}:
        os.environ['GOMP_SPINCOUNT'] = '10000'


def run():
    """The settings, then the samples; every mistake that a user can make ends in one line."""
    prepare_console()
    with mistakes_told(status=2):
        changed = override(globals(), sys.argv[1:], warn=say)
        rules.check(globals())
    if changed:
        say("settings: " + ', '.join(f"{name}={value!r:.100}" for name, value in changed.items()))
    share_cores()
    with mistakes_told():
        main()
        leave()


if __name__ == '__main__':
    run()
