"""GPT and its KV cache: generation, logits, comparison with transformers, and loading."""
import dataclasses
from pathlib import Path

import pytest
import torch

from cases import cases
from model import GPT, GPTConfig, KVCache, window_length
from models import SHAPE, make_gpt, make_transformers_gpt2
from oracles import reference_generate, reference_generate_with_context_shift
from sampling.backends.cuda.cuda_graph_gpt import CUDAGraphGPT
from sampling.checkpoints.checkpoint import Checkpoint
from sampling.sampler.sample_token import TokenSampler
from streams import generate, random_prompt

# ---- generate

@pytest.mark.parametrize("length, rows, bias", cases([1, 5, 15, 16, 17, 40], [1, 3], [True, False], # block_size is 16
                         quick=lambda length, rows, bias: (rows, bias) == (3, True) or (length, rows, bias) == (17, 1, False)))
def test_generate_equals_the_reference_loop(length, rows, bias):
    model, idx = make_gpt(bias=bias), random_prompt(length, rows)
    before = idx.clone()
    torch.manual_seed(3)
    expected = reference_generate(model, idx, 30, temperature=0.8, top_k=20)
    torch.manual_seed(3)
    assert torch.equal(model.generate(idx, 30, temperature=0.8, top_k=20), expected)
    assert torch.equal(idx, before)


@pytest.mark.parametrize("length, block_size", cases([1, 15, 16, 17, 40], [1, 7, 16],
                         quick=lambda length, block_size: (length, block_size) in [(1, 7), (17, 1), (17, 7), (16, 16), (40, 7)]))
def test_context_shift_equals_its_reference_loop(length, block_size):
    model, idx = make_gpt(block_size=block_size), random_prompt(length, 2)
    torch.manual_seed(3)
    expected = reference_generate_with_context_shift(model, idx, 40, top_k=20)
    torch.manual_seed(3)
    assert torch.equal(model.generate(idx, 40, top_k=20, context_shift=True), expected)


@pytest.mark.parametrize("num_tokens, block_size, sliding, shifted", [
    (1, 16, 1, 1), (16, 16, 16, 16), (17, 16, 16, 8), (40, 16, 16, 8), (8, 7, 7, 4), (2, 1, 1, 1)])
def test_a_full_window_slides_or_shrinks_to_its_newer_half(num_tokens, block_size, sliding, shifted):
    assert window_length(num_tokens, block_size, context_shift=False) == sliding
    assert window_length(num_tokens, block_size, context_shift=True) == shifted


def test_a_shared_prompt_is_prefilled_once_and_samples_equal_the_reference_loop():
    model, idx, shapes = make_gpt(), random_prompt(9).repeat(4, 1), []
    model.transformer.h[0].register_forward_hook(lambda module, args, result: shapes.append(tuple(args[0].shape[:2])))
    torch.manual_seed(3)
    found = model.generate(idx, 20)
    assert shapes[:2] == [(1, 9), (4, 1)]
    torch.manual_seed(3)
    assert torch.equal(found, reference_generate(model, idx, 20))


def test_the_model_sees_each_token_once_until_the_window_slides():
    model, lengths = make_gpt(), []
    model.transformer.h[0].register_forward_hook(lambda module, args, result: lengths.append(args[0].size(1)))
    model.generate(random_prompt(10), 10)
    assert lengths == [10, 1, 1, 1, 1, 1, 1, 16, 16, 16], "no forward pass follows the last token"


def test_rows_can_be_dropped_from_a_stream():
    model, idx = make_gpt(), random_prompt(5, 3)
    expected = model.generate(idx, 30, temperature=0)[:, 5:] # past block_size, where there is no cache
    for leave_at in 3, 20:
        stream = model.generate_stream(idx, 30, TokenSampler(temperature=0))
        found = [next(stream) for _ in range(leave_at)]
        rest = [stream.send([2, 0]), *(next(stream) for _ in range(5))]
        assert torch.equal(torch.cat(found, dim=1), expected[:, :leave_at])
        assert torch.equal(torch.cat(rest, dim=1), expected[[2, 0], leave_at:leave_at + 6])
        with pytest.raises(StopIteration):
            stream.send([])


def test_an_empty_prompt_raises():
    with pytest.raises(ValueError, match="at least one token"):
        make_gpt().generate(torch.empty(1, 0, dtype=torch.long), 3)


def test_0_new_tokens_return_the_prompt():
    idx = random_prompt(4)
    assert torch.equal(make_gpt().generate(idx, 0), idx)


# ---- forward

@pytest.mark.parametrize("split", [[16], [1] * 16, [5, 1, 7, 3]], ids=str)
def test_logits_do_not_depend_on_how_the_cache_was_filled(split):
    model, idx = make_gpt(), random_prompt(16, rows=2)
    cache = KVCache(model.config, 2, 16)
    with torch.no_grad():
        for part in idx.split(split, dim=1):
            logits, loss = model(part, cache=cache)
        assert loss is None and cache.seq_len == 16
        torch.testing.assert_close(logits, model(idx)[0], atol=1e-5, rtol=1e-5)


def test_forward_returns_logits_and_loss():
    model, idx, targets = make_gpt(), random_prompt(9, 2), random_prompt(9, 2, seed=1)
    targets[0, :4] = -1
    logits, loss = model(idx, targets)
    assert logits.shape == (2, 9, SHAPE["vocab_size"])
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -logprobs[targets >= 0].mean())
    last, none = model(idx)
    assert last.shape == (2, 1, SHAPE["vocab_size"]) and none is None
    torch.testing.assert_close(last[:, 0], logits[:, -1])


def test_logits_do_not_depend_on_later_tokens():
    model, idx = make_gpt(), random_prompt(12)
    other = idx.clone()
    other[:, 8:] = (other[:, 8:] + 1) % SHAPE["vocab_size"]
    torch.testing.assert_close(model(idx, idx)[0][:, :8], model(other, other)[0][:, :8])


def test_more_than_block_size_tokens_raise():
    with pytest.raises(ValueError, match="17 tokens: block_size is 16"):
        make_gpt()(random_prompt(17))


# ---- transformers

@pytest.mark.parametrize("changes", [
    {}, dict(activation_function="gelu"), dict(activation_function="gelu_pytorch_tanh"), dict(n_inner=40),
    dict(layer_norm_epsilon=0.1), dict(scale_attn_weights=False), dict(scale_attn_by_inverse_layer_idx=True),
    dict(tie_word_embeddings=False),
], ids=str)
def test_logits_equal_transformers(changes, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300, **changes)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(str(tmp_path))
    idx = torch.randint(300, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(idx).logits
        assert expected.std() > 0.1
        assert (ours(idx, idx)[0] - expected).abs().max() < 1e-4


ALL_SETTINGS = dict(temperature=1.7, top_k=60, top_p=0.8, min_p=0.1, repetition_penalty=1.2)
EACH_SETTING = [dict(temperature=0.9, top_k=30), dict(top_p=0.9), dict(top_p=0.3, top_k=50), dict(min_p=0.9), dict(repetition_penalty=0.7)]


@pytest.mark.parametrize("settings, has_graphs", cases([
    *EACH_SETTING, ALL_SETTINGS, dict(top_p=1e-9), dict(top_p=1.0), dict(min_p=0.05), dict(min_p=0.0), dict(min_p=1.0), dict(repetition_penalty=1.3),
    dict(temperature=1.5, top_p=0.7, min_p=0.3)], [False, True],
    quick=lambda settings, has_graphs: settings == ALL_SETTINGS or (settings in EACH_SETTING and not has_graphs)))
def test_samples_equal_transformers(settings, has_graphs, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    idx = torch.randint(300, (1, 5), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(21)
    expected = [theirs.generate(idx, do_sample=True, max_new_tokens=40, eos_token_id=None, pad_token_id=0, **{"top_k": 0, **settings})
                for _ in range(3)]
    ours = GPT.from_pretrained(str(tmp_path))
    backend = CUDAGraphGPT(ours) if has_graphs else ours
    torch.manual_seed(21)
    for sample in expected:
        sampler = TokenSampler(**settings, allow_sync=not has_graphs)
        assert torch.equal(generate(backend, idx, 40, sampler), sample)


def test_greedy_samples_with_a_penalty_equal_transformers(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    idx = torch.randint(300, (3, 5), generator=torch.Generator().manual_seed(0))
    expected = theirs.generate(idx, do_sample=False, max_new_tokens=40, repetition_penalty=1.4, eos_token_id=None, pad_token_id=0)
    ours = GPT.from_pretrained(str(tmp_path))
    assert torch.equal(ours.generate(idx, 40, temperature=0, repetition_penalty=1.4), expected)


def test_from_pretrained_accepts_overrides(tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    assert GPT.from_pretrained(str(tmp_path)).config.dropout == 0.0
    assert GPT.from_pretrained(str(tmp_path), dict(dropout=0.25)).transformer.drop.p == 0.25
    with pytest.raises(ValueError, match="model_args has fields that GPT does not have: rope"):
        GPT.from_pretrained(str(tmp_path), dict(rope=True))


# ---- loading

@pytest.mark.parametrize("field, value", [
    ("n_head", 5), ("n_layer", 0), ("n_embd", 2.5), ("vocab_size", "65"), ("block_size", True), ("n_head", None),
    ("dropout", "0.1"), ("dropout", float("nan")), ("n_inner", 0), ("layer_norm_epsilon", None), ("gelu", "relu"),
])
def test_an_invalid_config_raises(field, value):
    with pytest.raises(ValueError, match=field):
        GPTConfig(**{**SHAPE, field: value})


def test_loading_copies_no_tensor_and_draws_no_random_numbers():
    model = make_gpt()
    state = torch.get_rng_state()
    loaded = GPT.from_state_dict(dataclasses.asdict(model.config), model.state_dict())
    assert torch.equal(torch.get_rng_state(), state) and not loaded.training
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("change, message", [
    (lambda tensors: tensors.pop("lm_head.weight"), "missing: lm_head.weight"),
    (lambda tensors: tensors.update(extra=torch.ones(1)), "unexpected: extra"),
    (lambda tensors: tensors.update({"lm_head.weight": torch.ones(2, 3)}), r"misshapen: lm_head.weight \(2, 3\) instead of"),
    (lambda tensors: [tensors.pop(name) for name in list(tensors)[:5]], "and 2 more"),
], ids=["missing", "unexpected", "misshapen", "many"])
def test_the_error_names_missing_unexpected_and_misshapen_tensors(change, message):
    model = make_gpt()
    tensors = model.state_dict()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        GPT.from_state_dict(dataclasses.asdict(model.config), tensors)


def checkpoint_of(model, **changes):
    state_dict = {**model.state_dict(), **changes}
    return Checkpoint("out/ckpt.pt", dataclasses.asdict(model.config), state_dict, model.config.vocab_size, Path("out"))


def test_loading_a_model_removes_the_tensors_from_its_checkpoint():
    """Otherwise a backend could not free the memory of a layer after packing it."""
    model = make_gpt()
    checkpoint = checkpoint_of(model)
    loaded = GPT.from_checkpoint(checkpoint)
    assert checkpoint.state_dict == {}
    assert loaded.transformer.wpe.weight.data_ptr() == model.transformer.wpe.weight.data_ptr()


def test_the_error_names_a_checkpoint_that_does_not_fit():
    with pytest.raises(ValueError, match=r"^cannot load out/ckpt.pt: .*unexpected: extra"):
        GPT.from_checkpoint(checkpoint_of(make_gpt(), extra=torch.ones(1)))
