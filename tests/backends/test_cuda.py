"""CUDABackend computes the logits of the plain model: on a CPU directly and as recorded graphs, and on a GPU."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engines import expected_ids
from models import make_gpt
from recorded_graphs import NEEDS_GPU, ON_GPU
from sampling.backends import cuda
from sampling.backends.cuda import CUDABackend
from sampling.backends.prepare import cast_linears
from sampling.generation.decode import Decoder
from sampling.sampler.row_streams import RunStream
from sampling.sampler.sampler import Sampler
from streams import decode, num_compiled_graphs, random_prompt

IDS = random_prompt(16, 3) # block_size is 16


@pytest.fixture(params=["direct", "recorded", ON_GPU])
def make_backend(request, monkeypatch):
    """make_backend(model) -> a CUDABackend whose steps attend to 4, 8, 12 or 16 positions. A message is a failure."""
    monkeypatch.setattr(cuda, "BUCKET", 4)
    if request.param == "recorded":
        request.getfixturevalue("recordings")

    def make(model):
        backend = CUDABackend(model.to("cuda" if request.param == "cuda" else "cpu"), log=pytest.fail)
        backend.checks.use_graphs = request.param != "direct"
        return backend
    return make


@pytest.fixture
def backend(make_backend):
    return make_backend(make_gpt())


@torch.no_grad()
def read(backend, cache, *ends, ids=IDS):
    """Let the backend read ids up to each of these ends. It must compute the plain model's logits of all positions."""
    ids = ids.to(backend.device)
    for end in ends:
        start = cache.seq_len
        found = backend.logits(ids[:, start:end], cache, num_positions=end - start)
        expected = backend.model(ids[:, :end], num_positions=end - start)[0].flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert cache.seq_len == end


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_steps_and_several_tokens_after_others_have_the_logits_of_the_plain_model(rows, backend):
    read(backend, backend.new_cache(rows, 16), 3, *range(4, 17), ids=IDS[:rows])
    read(backend, backend.new_cache(rows, 14), 5, 6, 10, 11, 14, ids=IDS[:rows])


def test_setting_seq_len_back_undoes_steps(backend):
    cache = backend.new_cache(3, 16)
    read(backend, cache, 5, *range(6, 15), ids=torch.cat([IDS[:, :5], IDS.flip(1)[:, 5:]], dim=1))
    cache.seq_len = 5
    read(backend, cache, *range(6, 11))


def test_rows_may_leave(backend):
    cache = backend.new_cache(3, 16)
    read(backend, cache, 5, 6, 7)
    cache.select_rows([2, 0])
    assert cache.num_rows == 2
    read(backend, cache, 8, 9, 10, ids=IDS[[2, 0]])


def test_a_text_with_nan_does_not_affect_the_next_one_in_the_same_cache(make_backend):
    model = make_gpt(tie_word_embeddings=False)
    with torch.no_grad():
        model.transformer.wte.weight[60] = torch.nan
    backend = make_backend(model)
    cache, bad = backend.new_cache(1, 16), torch.tensor([[1, 60, 2, 3, 4, 5, 6, 7]], device=backend.device)
    assert backend.logits(bad, cache).isnan().all()
    cache.seq_len = 0
    read(backend, cache, 2, 3, 4, 5, ids=IDS[:1].clamp(max=59))


@pytest.mark.parametrize("context_shift", [False, True])
@pytest.mark.parametrize("lengths", [(3, 5, 16, 30), (5, 5), (5,)]) # equal prompts are read once
def test_it_generates_the_text_of_the_plain_model_inside_the_window_and_past_it(lengths, context_shift, backend):
    prompts = [random_prompt(length, seed=length)[0].tolist() for length in lengths]
    expected = expected_ids(prompts, 30, device=str(backend.device), context_shift=context_shift, top_k=20)
    assert decode(backend, prompts, 30, context_shift=context_shift, top_k=20) == expected


def test_two_threads_get_their_own_texts(backend):
    """Inside the window and past it, also if each thread samples only after the other has computed its logits."""
    barrier, prompts = threading.Barrier(2, timeout=10), IDS[:2, :5].tolist()
    run = RunStream(3, backend.device, draws_per_sample=30, vocab_size=61)
    streams = [run.rows([run.state_for_sample(index)]) for index in range(2)]

    class WaitingSampler(Sampler):
        def __call__(self, *arguments):
            barrier.wait()
            return super().__call__(*arguments)

    def generate(index):
        steps = Decoder(backend, WaitingSampler()).decode([prompts[index]], streams[index], 30)
        return torch.cat([step.ids for step in steps], dim=1)[0].tolist()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(generate, range(2))) == expected_ids(prompts, 30, device=str(backend.device))


@pytest.mark.parametrize("vocab_size, num_rows", [(61, 64), (130, 192), (128, 128)])
def test_in_half_precision_the_head_is_padded_and_is_in_memory_once(vocab_size, num_rows, make_backend):
    backend = make_backend(cast_linears(make_gpt(vocab_size=vocab_size), torch.bfloat16))
    assert backend.head.shape == (num_rows, 24)
    assert backend.model.lm_head.weight.data_ptr() == backend.head.data_ptr()
    with torch.autocast(backend.device.type, torch.bfloat16), torch.no_grad():
        cache, ids = backend.new_cache(3, 16), IDS.to(backend.device)
        backend.logits(ids[:, :5], cache)
        found, expected = backend.logits(ids[:, 5:6], cache), backend.model(ids[:, :6])[0][:, -1]
    assert found.shape == (3, vocab_size)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    in_float32 = make_backend(make_gpt(vocab_size=vocab_size))
    assert in_float32.head is in_float32.model.lm_head.weight is in_float32.model.transformer.wte.weight


@torch.no_grad()
def test_a_step_never_synchronises_the_gpu(monkeypatch):
    """A capture would fail. On the meta device, tensors have no values, and code that needs one on the host raises."""
    for module in "model", "sampling.backends.cuda":
        monkeypatch.setattr(f"{module}.linear_dtype", lambda model: torch.float32) # autocast does not know "meta"
    backend = CUDABackend(make_gpt().to("meta"))
    assert backend.decode_step(backend.new_cache(2, 16), 8).shape == (2, 61)
    assert backend.forward(IDS.to("meta"))[0].shape == (3, 1, 61)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_settings")
@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_compiled_steps_give_the_same_text(device):
    backend = CUDABackend(make_gpt().to(device), compile=True, log=pytest.fail)
    prompts = IDS[:, :5].tolist()
    assert decode(backend, prompts, 20) == expected_ids(prompts, 20, device=device)
    assert num_compiled_graphs() > 0


@pytest.mark.parametrize("rows", [pytest.param(1, marks=NEEDS_GPU), pytest.param(3, marks=NEEDS_GPU)])
def test_on_a_gpu_graphs_with_128_positions_or_more_give_the_text_of_the_plain_model(rows):
    prompts, backend = random_prompt(5, rows).tolist(), CUDABackend(make_gpt(block_size=300).cuda(), log=pytest.fail)
    assert decode(backend, prompts, 330) == expected_ids(prompts, 330, block_size=300, device="cuda")
    assert backend.checks.use_graphs and backend.window.graphs.graphs
