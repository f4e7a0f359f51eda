"""Samples drawn many at once: prompts of any length together, stop texts, and what is seen on the way."""
import random
from itertools import pairwise

import head
import pytest
import torch
from batches import PAUSE, Chooser, Drawer, Reader, Sample
from graphs import GraphedGPT
from packed import pack
from prompts import Prompt
from tokenizer import CharTokenizer, GPT2Tokenizer

from conftest import CHARS, make_gpt, plain_generate, plain_shifting_generate, save_meta
from model import KVCache
from sampler import RowDraws, next_token

PROMPTS = ["The ", "O", "What is it?", "a" * 15, "b" * 16, "And then they all went home. ", "x", "yes, "] # its block_size is 16


@pytest.fixture(params=["plain", "packed", "sketched", "graphs", "recorded graphs"])
def kind(request, monkeypatch):
    """What makes of a GPT what draws, None if it is the GPT itself."""
    if request.param == "recorded graphs":
        request.getfixturevalue("recorded")
    if request.param == "sketched":
        monkeypatch.setattr(head, "LARGE", 1)
        monkeypatch.setattr(head, "WIDE", 1)
        monkeypatch.setattr(head, "SHARE", 1)
    return {"plain": None, "packed": pack, "sketched": pack}.get(request.param, GraphedGPT)


@pytest.fixture(scope="module")
def letters_table(tmp_path_factory):
    save_meta(path := tmp_path_factory.mktemp("table") / "meta.pkl")
    return CharTokenizer(path)


def samples_of(tokenizer, prompts, each=1, first=0):
    ids = [(prompt, tokenizer.encode(prompt)) for prompt in prompts for _ in range(each)]
    return [Sample(first + i, Prompt(text), ids) for i, (text, ids) in enumerate(ids)]


def drawn(model, tokenizer, samples, new=20, *, kind=None, seed=3, how=None, **settings):
    """What a Drawer makes of these samples; as whole samples, in the order that they came."""
    how = dict(temperature=0.9, top_k=30) if how is None else how
    generator = (kind or (lambda model: model))(model)
    draws = RowDraws(seed, steps=new, width=model.config.vocab_size)
    drawer = Drawer(generator, tokenizer, draws, how, new, ragged=True, say=lambda text: None, **settings)
    if kind is GraphedGPT and not drawer.live:
        drawer.patience = PAUSE # as on a GPU
    return [sample for sample in drawer.draw(samples) if sample.ended]


def one_by_one(model, samples, new=20, shift=False):
    """The oracle: nanoGPT's loop, prompt after prompt, from one stream."""
    torch.manual_seed(3)
    plain = (lambda idx: plain_shifting_generate(model, idx, new, top_k=30)) if shift else (
        lambda idx: plain_generate(model, idx, new, temperature=0.9, top_k=30))
    return [plain(torch.tensor([sample.ids]))[0, len(sample.ids):].tolist() for sample in samples]


@pytest.mark.parametrize("each, at_once", [(1, 8), (3, 5), (2, 1), (1, 3)])
def test_prompts_of_all_lengths_share_batches_and_each_has_its_own_text(letters_table, kind, each, at_once):
    samples = samples_of(letters_table, PROMPTS, each)
    expected = one_by_one(make_gpt(), samples)
    found = drawn(make_gpt(), letters_table, samples, kind=kind, at_once=at_once)
    assert [sample.number for sample in found] == list(range(len(samples)))
    assert [sample.new for sample in found] == expected
    assert [sample.text for sample in found] == [letters_table.decode(ids) for ids in expected]


def test_context_shift_of_prompts_of_all_lengths(letters_table, kind):
    samples = samples_of(letters_table, PROMPTS)
    expected = one_by_one(make_gpt(), samples, 40, shift=True)
    found = drawn(make_gpt(), letters_table, samples, 40, kind=kind, how=dict(top_k=30), at_once=8, context_shift=True)
    assert [sample.new for sample in found] == expected


@pytest.mark.parametrize("new", [0, 1, 2])
def test_few_new_tokens(letters_table, new):
    samples = samples_of(letters_table, PROMPTS)
    assert [sample.new for sample in drawn(make_gpt(), letters_table, samples, new, at_once=8)] == one_by_one(make_gpt(), samples, new)


@pytest.mark.parametrize("first", [1, 7, 8, 20])
def test_a_run_may_begin_at_any_sample(letters_table, first):
    samples = samples_of(letters_table, PROMPTS, 3)
    expected = one_by_one(make_gpt(), samples)
    found = drawn(make_gpt(), letters_table, samples[first:], at_once=4)
    assert [sample.new for sample in found] == expected[first:]


def test_memory_does_not_grow_with_the_number_of_prompts(letters_table):
    """No more samples are asked for than are drawn together."""
    asked_for = []

    def endless():
        for i in range(10**9):
            asked_for.append(i)
            yield Sample(i, Prompt("The "), letters_table.encode("The "))
    draws = RowDraws(3, steps=2, width=61)
    drawer = Drawer(make_gpt(), letters_table, draws, {}, 2, at_once=4, ragged=True)
    for sample in drawer.draw(endless()):
        if sample.number == 100:
            break
    assert len(asked_for) <= 100 + 4 * 8 + 1


@pytest.mark.parametrize("new", [1, 20])
def test_no_more_is_withheld_than_a_batch(letters_table, new):
    """Whatever the prompts' lengths, what has been drawn comes out before the next batch is begun."""
    samples, begun = samples_of(letters_table, random.Random(1).choices(PROMPTS, k=40)), set()
    drawer = Drawer(make_gpt(), letters_table, RowDraws(3, steps=new, width=61), {}, new, at_once=6, ragged=True)
    march = drawer.march
    drawer.march = lambda batch, places: begun.update(sample.number for sample in batch) or march(batch, places)
    for sample in drawer.draw(samples):
        assert max(begun) < sample.number - sample.number % 6 + 6


def test_prompts_of_very_different_lengths_march_apart(letters_table):
    steps = []
    model = make_gpt(block_size=256)
    model.transformer.h[0].register_forward_hook(lambda module, given, result: steps.append(tuple(given[0].shape[:2])))
    drawn(model, letters_table, samples_of(letters_table, ["a", "b" * 200, "cc", "d" * 201]), 10, at_once=4)
    assert len(steps) == 2 * 11 and steps[0][1] == 1 and steps[11][1] == 200


@pytest.mark.parametrize("kept", [1, 3, 4, 6, 7, 11])
def test_what_is_kept_is_not_given_again_and_the_rest_stays_the_same_to_the_last_bit(letters_table, kept):
    samples = [samples_of(letters_table, PROMPTS * 2) for _ in range(2)]
    for sample in samples[1][:kept]:
        sample.kept = True
    whole, rest = (drawn(make_gpt(n_embd=256, n_head=8), letters_table, given, 20, at_once=4, watch=2, stops=["e"]) for given in samples)
    assert [sample.number for sample in rest] == list(range(kept, 16))
    for sample, again in zip(whole[kept:], rest, strict=True):
        assert again.new == sample.new and again.looks == sample.looks


# ---- stop texts

def cut(text, stops):
    return text[:min([at for stop in stops if (at := text.find(stop)) >= 0], default=len(text))]


@pytest.mark.parametrize("live", [True, False])
def test_a_sample_ends_where_a_stop_text_begins(letters_table, kind, live):
    full = [letters_table.decode(ids) for ids in one_by_one(make_gpt(), samples_of(letters_table, PROMPTS, 2), 30)]
    rng = random.Random(1)
    for _ in range(10):
        texts = rng.choices(full, k=3)
        stops = [text[at:at + rng.randint(1, 4)] for text in texts for at in [rng.randrange(25)]]
        samples = samples_of(letters_table, PROMPTS, 2)
        found = drawn(make_gpt(), letters_table, samples, 30, kind=kind, at_once=6, stops=stops, live=live)
        assert [sample.text for sample in found] == [cut(text, stops) for text in full]
        for sample, text in zip(found, full, strict=True):
            assert sample.ended == ("stop" if cut(text, stops) != text else "length")
            assert letters_table.decode(sample.new).startswith(sample.text) and len(sample.pieces) == len(sample.new)
            assert sample.ready == len(sample.text)


def test_rows_that_have_ended_are_computed_no_more(letters_table):
    model, rows = make_gpt(), []
    full = [letters_table.decode(ids) for ids in one_by_one(make_gpt(), samples_of(letters_table, ["O"], 6), 12)]
    stop = max("".join(full), key="".join(full).count)
    ends = sorted(min(12, len(cut(text, [stop])) + 1) for text in full)
    assert len(set(ends)) > 1
    model.transformer.h[0].register_forward_hook(lambda module, given, result: rows.append(given[0].size(0)))
    drawn(model, letters_table, samples_of(letters_table, ["O"], 6), 12, at_once=6, stops=[stop])
    assert rows[1:] == [sum(end > step for end in ends) for step in range(1, ends[-1])] # the first is read as one


def test_what_may_be_shown_never_changes(letters_table):
    """Of a growing sample only as much is called ready as is sure to stay, whatever stop text may come."""
    full = letters_table.decode(one_by_one(make_gpt(), samples_of(letters_table, ["O"]), 40)[0])
    stops = [full[20:25], full[30:33] + "\n\n", full[5:8] + "!"]
    shown = []
    draws = RowDraws(3, steps=40, width=61)
    drawer = Drawer(make_gpt(), letters_table, draws, dict(temperature=0.9, top_k=30), 40, stops=stops, live=True)
    for sample in drawer.draw(samples_of(letters_table, ["O"])):
        shown.append(sample.text[:sample.ready])
    assert shown[-1] == cut(full, stops) == full[:full.index(stops[0])]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert len(set(shown)) > 10


@pytest.mark.parametrize("text", ["naïve 🙂 café — 日本語", "e\N{COMBINING ACUTE ACCENT}", "plain"])
def test_characters_of_several_tokens_are_never_shown_broken(gpt2_encoding, text):
    tokenizer = GPT2Tokenizer()
    decode, ids = tokenizer.decoder(), tokenizer.encode(text)
    pieces = [decode(i, last=i is ids[-1]) for i in ids]
    assert "".join(pieces) == text
    for i in range(len(ids)): # an end within a character is the whole's too
        decode = tokenizer.decoder()
        assert "".join(decode(token, last=j == i) for j, token in enumerate(ids[:i + 1])) == tokenizer.decode(ids[:i + 1])


@pytest.mark.parametrize("stops", [[], ["語"], ["\N{REPLACEMENT CHARACTER}"]], ids=ascii)
def test_what_is_ready_ends_between_characters(gpt2_encoding, stops):
    tokenizer, text = GPT2Tokenizer(), "naïve 🙂 — 日本語 x"
    ids, seen = tokenizer.encode(text), []
    sample = Sample(0, Prompt("a"), [64])
    reader = Reader(sample, tokenizer, len(ids), stops, piecewise=True)
    for i in ids:
        reader.take([i], [None])
        seen.append(sample.text[:sample.ready])
    assert sample.text == cut(text, stops) and all(text.startswith(part) for part in seen)


def test_a_stop_text_inside_a_token_and_across_tokens(gpt2_encoding):
    tokenizer = GPT2Tokenizer()
    model = make_gpt(vocab_size=50257, n_embd=8, block_size=64)
    full = tokenizer.decode(drawn(model, tokenizer, samples_of(tokenizer, ["Hi"]), 30, at_once=1)[0].new)
    for begin in range(0, len(full) - 6, 5):
        stop = full[begin:begin + 6]
        sample, = drawn(model, tokenizer, samples_of(tokenizer, ["Hi"]), 30, at_once=1, stops=[stop])
        assert sample.text == cut(full, [stop]) and sample.ended == "stop"


# ---- what is seen of the choice

def test_probabilities_are_the_networks_own(letters_table, kind):
    model = make_gpt()
    samples = drawn(make_gpt(), letters_table, samples_of(letters_table, PROMPTS), 20, kind=kind, at_once=3, watch=4,
                    how=dict(temperature=0.5, top_k=9, repetition_penalty=1.3))
    for sample in samples:
        ids, total = list(sample.ids), 0
        for token, (logprob, likeliest) in zip(sample.new, sample.looks, strict=True):
            values, likeliest = [value for _, value in likeliest], [CHARS.index(text) for text, _ in likeliest]
            window = torch.tensor([ids[-16:]])
            with torch.no_grad():
                expected = model(window)[0][0, -1].log_softmax(-1)
            assert logprob == pytest.approx(expected[token].item(), abs=1e-4)
            assert values == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
            assert values == pytest.approx(expected[likeliest].tolist(), abs=1e-4)
            ids.append(token)
            total += logprob
        assert sample.logprob == pytest.approx(total)
        assert sample.text == letters_table.decode(sample.new)


def test_a_penalty_sees_the_window(letters_table):
    """What repeats in the prompt or the sample is penalised, in a batch of all lengths as alone."""
    how = dict(temperature=0, repetition_penalty=1.5)
    found = drawn(make_gpt(), letters_table, samples_of(letters_table, PROMPTS), 30, how=how, at_once=8)
    alone = [drawn(make_gpt(), letters_table, samples_of(letters_table, [prompt]), 30, how=how)[0].new for prompt in PROMPTS]
    assert [sample.new for sample in found] == alone
    graphs = drawn(make_gpt(), letters_table, samples_of(letters_table, PROMPTS), 30, how=how, at_once=8, kind=GraphedGPT)
    assert [sample.new for sample in graphs] == alone
    assert alone != [drawn(make_gpt(), letters_table, samples_of(letters_table, [prompt]), 30, how=dict(temperature=0))[0].new
                     for prompt in PROMPTS]


# ---- memory that runs out

def test_where_memory_runs_out_half_as_many_are_drawn_and_nothing_changes(letters_table, monkeypatch):
    model, said, real = make_gpt(), [], KVCache.__init__

    def little(self, config, batch_size, *rest):
        if batch_size > 2:
            raise MemoryError
        real(self, config, batch_size, *rest)
    samples = samples_of(letters_table, PROMPTS)
    monkeypatch.setattr(KVCache, "__init__", little)
    draws = RowDraws(3, steps=20, width=61)
    drawer = Drawer(model, letters_table, draws, dict(temperature=0.9, top_k=30), 20, at_once=8, ragged=True, live=True, say=said.append)
    found = [sample for sample in drawer.draw(samples) if sample.ended]
    monkeypatch.undo()
    assert [sample.new for sample in found] == one_by_one(make_gpt(), samples)
    assert said == ["out of memory with 8 samples at once: going on with 4", "out of memory with 4 samples at once: going on with 2"]


@pytest.mark.parametrize("live", [False, True])
def test_what_has_ended_before_memory_runs_out_is_not_drawn_again(letters_table, monkeypatch, live):
    samples, ticks, choose, sizes = samples_of(letters_table, ["The "], 4), [], Chooser.__call__, []
    texts = [letters_table.decode(ids) for ids in one_by_one(make_gpt(), samples)]
    stops = [texts[2][3:6]]

    def little(self, logits, ids):
        sizes.append(len(logits))
        if len(sizes) == 12:
            raise MemoryError
        return choose(self, logits, ids)
    monkeypatch.setattr(Chooser, "__call__", little)
    found = drawn(make_gpt(), letters_table, samples, at_once=4, stops=stops, live=live, tick=ticks.append)
    expected = [cut(text, stops) for text in texts]
    assert [sample.text for sample in found] == expected and len(expected[2]) == 3
    assert sizes[11] < 4 and sizes.count(4) <= 6, "nothing has ended by then"
    assert sum(ticks) == sum(len(sample.new) for sample in found)


def test_graphs_of_before_memory_ran_out_are_not_used_after_it(letters_table, recorded, monkeypatch):
    samples, said, begin = samples_of(letters_table, ["O", "x", "a" * 15, "b" * 15, "P", "y", "Q", "z"]), [], Chooser.begin

    def little(self, prompts, *rest):
        begin(self, prompts, *rest)
        if len(prompts) > 2:
            raise MemoryError
    monkeypatch.setattr(Chooser, "begin", little)
    drawer = Drawer(GraphedGPT(make_gpt()), letters_table, RowDraws(3, steps=9, width=61), dict(temperature=0.9, top_k=30), 9,
                    at_once=4, ragged=True, say=said.append)
    found = [sample.new for sample in drawer.draw(samples) if sample.ended]
    assert said and found == one_by_one(make_gpt(), samples, 9)


def test_without_chance_no_random_numbers_are_drawn(letters_table, kind, monkeypatch):
    monkeypatch.setattr(RowDraws, "ahead", None)
    assert len(drawn(make_gpt(), letters_table, samples_of(letters_table, PROMPTS), kind=kind, how=dict(temperature=0))) == 8


@pytest.mark.parametrize("settings", [dict(), dict(live=True), dict(watch=2), dict(stops=["never so"])], ids=str)
def test_nothing_is_handed_out_that_came_of_no_numbers(letters_table, kind, settings):
    model, seen = make_gpt(), []
    with torch.no_grad():
        model.transformer.wpe.weight[9] = torch.nan # positions of which only the longer prompts have one
    generator = (kind or (lambda model: model))(model)
    drawer = Drawer(generator, letters_table, RowDraws(3, steps=4, width=61), {}, 4, at_once=2, ragged=True, **settings)
    with pytest.raises(ValueError, match="NaN or infinite"):
        seen += (sample.number for sample in drawer.draw(samples_of(letters_table, ["The ", "O", "What is it?"])))
    assert set(seen) == {0, 1}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("stops", [[], ["e", "t"]], ids=["whole", "stopped"])
def test_on_cuda_each_has_its_own_text_too(letters_table, stops):
    torch.set_float32_matmul_precision("highest")
    model, samples = make_gpt(block_size=256).cuda(), samples_of(letters_table, PROMPTS, 3)
    torch.manual_seed(3)
    expected = [plain_generate(model, torch.tensor([sample.ids]).cuda(), 300, temperature=0.9, top_k=30)[0, len(sample.ids):].tolist()
                for sample in samples]
    draws = RowDraws(3, "cuda", steps=300, width=61)
    drawer = Drawer(GraphedGPT(model), letters_table, draws, dict(temperature=0.9, top_k=30), 300, at_once=8, ragged=True, stops=stops,
                    watch=3)
    found = list(drawer.draw(samples))
    assert [sample.text for sample in found] == [cut(letters_table.decode(ids), stops) for ids in expected]
    assert all(len(sample.looks) == len(sample.new) for sample in found)


@pytest.mark.parametrize("watch", [0, 3])
def test_probabilities_take_all_logits(watch):
    how = dict(temperature=0.8, top_k=20)
    assert Chooser(next_token, None, how).enough == 20
    assert Chooser(next_token, None, how, watch).enough is None
