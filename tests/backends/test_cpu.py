"""CPUBackend computes the logits of GPT.forward, and in int8 those of the rounded weights."""
import copy
import resource
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models import as_checkpoint, make_gpt, random_prompt
from project import RULE
from sampling import jit
from sampling.backends import backend as backends
from sampling.backends import cpu_kernels as kernels
from sampling.backends.cpu import CPUBackend, Linear
from sampling.checkpoints.checkpoint import quantize
from script_process import run_python

WIDE = dict(n_embd=128, n_head=4, n_layer=3, block_size=64)
SHAPES = {
    "odd widths": dict(n_embd=45, n_head=5, vocab_size=67, n_inner=77),
    "one of each": dict(n_embd=1, n_head=1, vocab_size=61, n_layer=1, n_inner=1),
    "no bias, three heads": dict(bias=False, n_head=3),
    "tanh": dict(gelu="tanh", layer_norm_epsilon=1e-3),
    "untied": dict(tie_word_embeddings=False, n_head=1),
    "wide": WIDE,
}


def make_backend(model, int8=False):
    return CPUBackend(model.config, as_checkpoint(model).state_dict, int8)


def all_logits(model, ids, int8=False):
    """The plain model's logits (B, T, V) after each of ids (B, T); int8: with rounded weights."""
    if int8:
        model = copy.deepcopy(model)
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "wpe" not in name:
                values, scales = quantize(weight.detach())
                weight.data = values * scales[:, None]
    return model(ids, targets=ids)[0].detach()


def assert_close(found, expected, atol=2e-5, rtol=1e-4):
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


@pytest.fixture(params=[False, True], ids=["float32", "int8"])
def int8(request):
    return request.param


@pytest.fixture(autouse=True, scope="module")
def one_set_of_types():
    """Each kernel is compiled once: an array of another layout would compile it again."""
    yield
    for kernel in kernels.layer_norm, kernels.attention, *kernels.LINEAR.values():
        assert len(kernel.signatures) <= 1


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("shape, has_onednn", [
    *((shape, False) for shape in SHAPES),
    pytest.param("odd widths", True, marks=pytest.mark.skipif(
        not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")),
])
def test_prompts_steps_and_windows_have_the_logits_of_the_model(
        shape, has_onednn, int8, monkeypatch):
    monkeypatch.setattr(backends, "uses_onednn", has_onednn) # whatever the processor is
    monkeypatch.setattr(backends, "MIN_ONEDNN_WORK", 0)
    model = make_gpt(**SHAPES[shape])
    backend = make_backend(model, int8)
    for num_rows in 1, 2, 6, 12, 33: # with 33, torch multiplies
        ids = random_prompt(16, num_rows, seed=num_rows)
        expected = all_logits(model, ids, int8)
        for prompt_length in 1, 15:
            cache = backend.new_cache(num_rows, 16)
            start = 0
            for end in range(prompt_length, 17):
                assert_close(backend.logits(ids[:, start:end], cache), expected[:, end - 1])
                start = end
            assert cache.seq_len == 16
        assert_close(backend.logits(ids, None), expected[:, -1])


OTHER_TILE = """
import platform
platform.machine = lambda: "arm64" # which has 32 registers
import torch
from sampling.backends.cpu import MAX_KERNEL_ROWS, Linear
from sampling.backends.cpu_kernels import OUTPUTS
assert OUTPUTS == 4
for num_outputs in 3, 67, 256:
    weight = torch.randn(num_outputs, 45)
    for num_rows in 1, 2, 6, 12, MAX_KERNEL_ROWS:
        x = torch.randn(num_rows, 45)
        found = torch.from_numpy(Linear(weight, torch.zeros(num_outputs))(x.numpy()))
        torch.testing.assert_close(found, x @ weight.T, atol=2e-5, rtol=1e-4)
"""


@pytest.mark.slow
def test_the_kernels_for_32_registers_compute_the_products_of_torch(tmp_path):
    run_python("-c", OTHER_TILE, NUMBA_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("length, num_positions", [(2, 2), (5, 5), (30, 1), (30, 4)])
def test_several_tokens_may_follow_the_cache_and_seq_len_may_be_set_back(
        length, num_positions, int8):
    """The cache has blocks of 64 positions, and some of the tokens lie in two of them."""
    model = make_gpt(**WIDE | {"block_size": 192})
    backend = make_backend(model, int8)
    ids = random_prompt(160, 3)
    cache = backend.new_cache(3, 160)
    expected = all_logits(model, ids, int8)
    backend.logits(ids[:, :126], cache)
    backend.logits(random_prompt(30, 3, seed=1), cache) # tokens that are undone
    for start in 126, 64, 50:
        end = start + length
        cache.seq_len = start
        found = backend.logits(ids[:, start:end], cache, num_positions)
        assert_close(found, expected[:, end - num_positions:end].flatten(0, 1))


# ---- weights

def test_float32_weights_are_used_where_they_lie():
    """There is no second copy: what happens to the checkpoint's tensors happens to the logits."""
    model = make_gpt(tie_word_embeddings=False)
    backend = make_backend(model)
    for weight in model.parameters():
        weight.data.mul_(0.5)
    ids = random_prompt(16, 2)
    assert_close(backend.logits(ids, None), all_logits(model, ids)[:, -1])


@pytest.mark.parametrize("value, gelu", [(torch.nan, "none"), (torch.inf, "tanh")])
@pytest.mark.parametrize("name", [
    "transformer.wte.weight",
    "transformer.h.0.attn.c_attn.weight", # the last number is of a value: queries may drop NaN
    "transformer.h.0.mlp.c_fc.weight",
    "transformer.h.1.mlp.c_proj.bias",
    "transformer.ln_f.weight",
])
def test_damaged_weights_give_logits_that_are_not_finite(name, value, gelu, int8):
    model = make_gpt(gelu=gelu)
    model.state_dict()[name].view(-1)[-1] = value
    backend = make_backend(model, int8)
    ids = torch.zeros(2, 6, dtype=torch.long)
    cache = backend.new_cache(2, 16)
    for past in cache, cache, None:
        assert not backend.logits(ids, past).isfinite().all(dim=1).any()


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_is_that_of_torch_for_every_number(form):
    extremes = torch.tensor([1e-30, -1e-8, 1e4, -1e4, 1e30, -1e30])
    x = torch.cat([torch.linspace(-30, 30, 4001), extremes])[None]
    linear = Linear(x.T, torch.zeros_like(x[0]))
    found = torch.from_numpy(linear(np.ones((1, 1), np.float32), gelu=form))
    assert_close(found, F.gelu(x, approximate=form), atol=2e-6, rtol=3e-7)


def test_attention_may_be_nearly_all_on_one_token():
    """Scores a hundred apart: the exponentials of most are below the smallest float32."""
    model = make_gpt(**WIDE)
    model.state_dict()["transformer.h.0.attn.c_attn.weight"][:2 * WIDE["n_embd"]] *= 20
    backend = make_backend(model)
    ids = random_prompt(40, 3)
    cache = backend.new_cache(3, 64)
    expected = all_logits(model, ids)
    for i in range(40):
        found = backend.logits(ids[:, i:i + 1], cache)
        assert_close(found, expected[:, i], atol=2e-3, rtol=1e-3)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("most", [1, 2])
def test_a_kernel_has_at_most_as_many_threads_as_torch_and_one_for_little_work(most):
    def num_threads():
        return [jit.launch(numba.get_num_threads, work) for work in (0, 10**12)]
    numba.get_num_threads() # starts its threads, which may change torch's number
    torch.set_num_threads(most)
    expected = [1, min(most, numba.config.NUMBA_NUM_THREADS)]
    assert num_threads() == expected
    # numba and torch have numbers of their own for each Python thread.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(num_threads).result() == expected


# ---- the files of numba's cache

def double(x):
    for i in numba.prange(len(x)):
        x[i] *= 2


@pytest.fixture
def is_compiled(tmp_path, monkeypatch, messages):
    """is_compiled() loads a new kernel, as a new process does. Returns whether it was compiled."""
    def load():
        messages.clear()
        jit.warn_unsaved.cache_clear()
        kernel = jit.parallel(double)
        x = np.ones(5)
        for _ in range(2): # the second call says nothing
            jit.load_kernels({kernel: (x,)})
        assert (x == 2).all()
        return [line[:17] for line in messages[:1]] == ["compiling kernels"]
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return load


# The index is empty, the code lacks a byte.
@pytest.mark.parametrize("pattern, kept", [("*.nbi", 0), ("*.nbc", -1)])
def test_a_kernel_is_compiled_once_and_again_if_its_files_are_damaged(
        is_compiled, tmp_path, pattern, kept):
    assert is_compiled()
    assert not is_compiled()
    path, = tmp_path.rglob(pattern)
    path.write_bytes(path.read_bytes()[:kept])
    assert is_compiled()
    assert not is_compiled()


def test_a_line_says_that_each_run_compiles_where_no_folder_can_be_written(
        is_compiled, monkeypatch, messages):
    assert is_compiled()
    first, = messages
    assert first.endswith(", about 4 seconds, in the first run only")
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert is_compiled()
    line, = messages
    assert ", in every run, because " in line
    assert "NUMBA_CACHE_DIR" in line


def test_a_second_python_loads_other_kernels_while_the_first_one_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    ran = tmp_path / "ran"
    statement = f"import project; print(project.RULE, file=open({str(ran)!r}, 'a'))"
    for _ in range(2): # the second time, nothing is compiled
        calls = {jit.parallel(double): (np.ones(5, dtype),) for dtype in (np.float32, float)}
        jit.load_kernels(calls, meanwhile=statement)
        assert ran.read_text() == f"{RULE}\n"


def test_kernels_that_a_full_disk_cannot_keep_are_used_and_the_folder_is_named(
        is_compiled, tmp_path, messages):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1])) # then writing fails
    try:
        assert is_compiled()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _, warning = messages
    assert f"cannot be saved in {tmp_path} (" in warning
    assert "NUMBA_CACHE_DIR" in warning
    assert is_compiled()
    assert not is_compiled()


# ---- products of many rows

@pytest.mark.parametrize("capability, name, expected", [
    ("AVX512", "AMD EPYC", True),
    ("AVX512", None, True), # torch 2.10
    ("AVX512", "Intel Xeon", False), # MKL is faster there
    ("AVX2", "AMD EPYC", False),
])
def test_onednn_multiplies_where_it_is_faster(monkeypatch, capability, name, expected):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if name:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name},
                            raising=False)
    else:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert backends.has_fast_onednn() == expected
