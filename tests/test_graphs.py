"""Steps that read and write in place, for CUDA graphs, give what GPT.generate gives; here mostly without graphs."""
import graphs
import pytest
import torch
from batches import Chooser
from graphs import GraphedGPT, Steps

from conftest import make_gpt, plain_generate
from model import KVCache
from sampler import RowDraws, exponentials


def prompt_of(length, rows=1):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(0))


def likeliest(logits, ids):
    return logits.argmax(dim=-1, keepdim=True)


@pytest.fixture(params=[4, 128], ids=["buckets", "one-bucket"])
def bucket(request, monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", request.param)


@pytest.mark.parametrize("settings", [dict(), dict(top_k=5), dict(temperature=0), dict(temperature=0.7, top_k=99),
                                      dict(temperature=1e-45), dict(context_shift=True), dict(context_shift=True, top_k=5)], ids=str)
@pytest.mark.parametrize("length, new", [(1, 15), (5, 40), (16, 20), (30, 3), (5, 1), (5, 0)]) # its block_size is 16
@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_tokens_as_generate(settings, length, new, rows, bucket):
    model, idx = make_gpt(), prompt_of(length, rows)
    torch.manual_seed(3)
    expected = model.generate(idx, new, **settings)
    torch.manual_seed(3)
    assert torch.equal(GraphedGPT(model).generate(idx, new, **settings), expected)


def test_batches_follow_one_another_on_the_rows_own_streams():
    model, steps = make_gpt(), 30
    torch.manual_seed(5)
    expected = [plain_generate(model, prompt_of(3), steps, top_k=20)[0].tolist() for _ in range(5)]
    gpt, draws, found = GraphedGPT(model), RowDraws(5, steps=steps, width=61), []
    places = [draws.place_of(sample) for sample in range(5)]
    for rows in places[:2], places[2:4], places[4:]:
        idx = prompt_of(3).expand(len(rows), -1)
        batch = gpt.generate(idx, steps, 1.0, 20, draw=draws.for_rows(rows)).tolist()
        assert gpt.generate(idx, steps, 1.0, 20, draw=draws.for_rows(rows)).tolist() == batch
        found += batch
    assert found == expected


def test_streams_may_run_side_by_side_and_be_abandoned():
    gpt, one, other = GraphedGPT(make_gpt()), prompt_of(5), prompt_of(5).flip(1)
    expected = [make_gpt().generate(idx, 20, 0)[:, 5:] for idx in (one, other)]
    list(gpt.stream(one, 20, likeliest)) # whose steps one of them takes over
    streams = [gpt.stream(idx, 20, likeliest) for idx in (one, other)]
    for tokens in zip(*(gpt.stream(idx, 20, likeliest) for idx in (one, other)), strict=True):
        for stream, token in zip(streams, tokens, strict=True):
            assert torch.equal(next(stream), token)
    next(gpt.stream(one, 20, likeliest))
    assert [gpt.generate(idx, 20, 0)[:, 5:].tolist() for idx in (one, other)] == [tokens.tolist() for tokens in expected]


@pytest.mark.parametrize("idx, new", [(prompt_of(3), 0), (prompt_of(3)[:, :0], 4)])
def test_nothing_to_do_is_what_generate_makes_of_it(idx, new):
    try:
        expected = make_gpt().generate(idx, new)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            GraphedGPT(make_gpt()).generate(idx, new)
    else:
        assert torch.equal(GraphedGPT(make_gpt()).generate(idx, new), expected)


def test_a_window_of_one_token():
    model = make_gpt(block_size=1)
    assert torch.equal(GraphedGPT(model).generate(prompt_of(1), 9, 0), model.generate(prompt_of(1), 9, 0))


def test_a_run_of_bad_numbers_does_not_spoil_the_next():
    model = make_gpt(tied=False)
    with torch.no_grad():
        model.transformer.wte.weight[5] = torch.nan
    gpt, good, bad = GraphedGPT(model), torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 3]])
    with pytest.raises(ValueError, match="NaN or infinite"):
        gpt.generate(bad, 4, 0)
    assert torch.equal(gpt.generate(good, 1, 0), model.generate(good, 1, 0))


def test_what_the_last_batch_left_in_the_cache_is_not_seen():
    gpt, one, other = GraphedGPT(make_gpt()), prompt_of(12), prompt_of(12).flip(1)
    expected = [GraphedGPT(make_gpt()).generate(idx, 9, 0).tolist() for idx in (one, other)]
    assert [gpt.generate(idx, 9, 0).tolist() for idx in (one, other)] == expected


@pytest.mark.parametrize("new", [1, 8, 30])
@pytest.mark.parametrize("context_shift", [True, False])
def test_logits_that_are_no_numbers_raise_at_the_end(new, context_shift):
    model = make_gpt()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        GraphedGPT(model).generate(prompt_of(3), new, context_shift=context_shift)


def test_a_step_in_bfloat16_is_as_near_to_float32_as_autocast():
    idx = prompt_of(15, 2)

    def logits(model, last):
        cache = KVCache(model.config, 2, 16, dtype=model.compute_dtype())
        for layer in cache.layers:
            layer.zero_()
        model(idx[:, :14], cache=cache)
        return last(model, cache).float()

    def step(model, cache):
        return GraphedGPT(model).decode(cache.layers, idx[:, 14:], torch.tensor([14]), 16)

    def forward(model, cache):
        return model(idx[:, 14:], cache=cache)[0]

    with torch.no_grad():
        exact = logits(make_gpt(), forward)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = logits(make_gpt(), forward)
            stepped = logits(make_gpt().cast_linears(torch.bfloat16), step)
    assert 0 < (stepped - exact).abs().mean() <= 1.2 * (autocast - exact).abs().mean()


@pytest.mark.parametrize("settings", [dict(), dict(top_k=5), dict(top_k=9, repetition_penalty=1.3), dict(context_shift=True)],
                         ids=str)
@pytest.mark.parametrize("length, new", [(1, 15), (5, 40), (16, 20)]) # its block_size is 16
def test_what_was_recorded_once_gives_the_same_tokens(settings, length, new, bucket, recorded):
    """Whatever a step does in Python is done when it is recorded, not when that is replayed."""
    model, idx = make_gpt(), prompt_of(length)
    expected, draws = [], RowDraws(5, steps=new, width=61)
    for sample in range(4):
        torch.manual_seed(5)
        expected.append(model.generate(idx, new, draw=draws.for_rows([draws.place_of(sample)]), **settings)[0].tolist())
    gpt, draws, found = GraphedGPT(model), RowDraws(5, steps=new, width=61), []
    places = [draws.place_of(sample) for sample in range(4)]
    for rows in places[:2], places[2:]:
        found += gpt.generate(idx.expand(2, -1), new, draw=draws.for_rows(rows), **settings).tolist()
    assert found == expected and recorded


@pytest.mark.parametrize("watch", [None, 0, 3])
@pytest.mark.parametrize("how", [dict(), dict(temperature=0), dict(top_k=5), dict(top_p=0.9, min_p=0.1, repetition_penalty=1.2)],
                         ids=str)
def test_a_step_looks_at_no_number(how, watch):
    """A graph cannot: it would have to wait for the GPU. On the meta device there are none, and whoever looks raises."""
    gpt = GraphedGPT(make_gpt().to("meta"))
    gpt.model.compute_dtype = lambda: torch.float32 # there is no autocast to ask
    choose = Chooser(gpt.next_token, exponentials, how, watch)
    choose.given = torch.empty(2, 1, dtype=torch.long, device="meta")
    if watch is not None:
        choose.look = [torch.empty(2, n, device="meta") for n in (1, watch, watch)]
    steps = Steps(gpt, 2, 16, choose)
    steps.read_token(8)
    steps.move_window()
    with pytest.raises(RuntimeError, match="meta"):
        steps.sum.item()


@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
def test_compiled_steps_give_the_same_tokens():
    torch._inductor.config.freezing = False # GPT.compile_generation's: it would make every layer a graph
    model, idx = make_gpt(), prompt_of(5, 2)
    torch.manual_seed(3)
    expected = model.generate(idx, 20)
    torch._dynamo.config.recompile_limit = 1
    gpt = GraphedGPT(model, compile=True)
    none = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gpt.compile_generation(prompt_of(5, 3), 20)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before - none == 2, "a layer, which is as good as the others, and a window"
    gpt.compile_generation(prompt_of(5, 2), 20)
    calls = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert calls > before, "another batch size is compiled too"
    torch.manual_seed(3)
    assert torch.equal(gpt.generate(idx, 20), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == calls


cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


class TestCuda:
    pytestmark = cuda

    @pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
    @pytest.mark.parametrize("new", [12, 300, 700]) # its block_size is 512
    @pytest.mark.parametrize("compile", [False, True])
    def test_float32_gives_the_plain_loops_tokens_sample_after_sample(self, new, compile):
        torch.set_float32_matmul_precision("highest")
        model = make_gpt(block_size=512).cuda()
        idx = prompt_of(5).cuda()
        torch.manual_seed(11)
        expected = [plain_generate(model, idx, new, temperature=0.8, top_k=20)[0].tolist() for _ in range(6)]
        gpt, draws, found = GraphedGPT(model, compile), RowDraws(11, "cuda", steps=new, width=61), []
        places = [draws.place_of(i) for i in range(6)]
        for rows in places[:3], places[3:]:
            found += gpt.generate(idx.expand(3, -1), new, 0.8, 20, draw=draws.for_rows(rows)).tolist()
        assert found == expected

    def test_steps_are_graphs(self):
        gpt = GraphedGPT(make_gpt(block_size=512).cuda())
        gpt.generate(prompt_of(5).cuda(), 600)
        assert sorted(map(str, gpt.steps.graphs)) == ["128", "256", "384", "512", "window"]
        assert all(isinstance(graph, torch.cuda.CUDAGraph) for graph in gpt.steps.graphs.values())

    def test_the_script_prints_the_same_from_any_batch(self, sample, letters):
        how = (f"--out_dir={letters}", "--start=ROMEO", "--device=cuda", "--dtype=float32", "--num_samples=3", "--max_new_tokens=12")
        exact = dict(CUDA_VISIBLE_DEVICES="0", NVIDIA_TF32_OVERRIDE="0")
        done, alone = sample(*how, **exact), sample(*how, "--batch_size=1", **exact)
        assert done.returncode == 0 and done.stdout == alone.stdout
