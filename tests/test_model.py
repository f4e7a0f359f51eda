"""The network, its cache and generate."""
import dataclasses

import pytest
import torch
from conftest import SHAPE, make_gpt, make_transformers_gpt2, plain_generate, plain_shifting_generate

from graphs import GraphedGPT
from model import GPT, GPTConfig, KVCache


def prompt_of(length, rows=1, seed=0):
    return torch.randint(SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("rows", [1, 3], ids=["1-row", "3-rows"])
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 40], ids=lambda n: f"{n}-tokens") # its block_size is 16
def test_generate_equals_the_plain_loop(length, rows, bias):
    model, idx = make_gpt(bias=bias), prompt_of(length, rows)
    before = idx.clone()
    torch.manual_seed(3)
    expected = plain_generate(model, idx, 30, temperature=0.8, top_k=20)
    torch.manual_seed(3)
    assert torch.equal(model.generate(idx, 30, temperature=0.8, top_k=20), expected)
    assert torch.equal(idx, before)


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40], ids=lambda n: f"{n}-tokens")
def test_context_shift_equals_the_plain_loop_of_its_rule(length, block_size):
    model, idx = make_gpt(block_size=block_size), prompt_of(length, 2)
    torch.manual_seed(3)
    expected = plain_shifting_generate(model, idx, 40, top_k=20)
    torch.manual_seed(3)
    assert torch.equal(model.generate(idx, 40, top_k=20, context_shift=True), expected)


def test_rows_that_share_a_prompt_are_read_once_and_equal_the_plain_loop():
    model, idx, widths = make_gpt(), prompt_of(9).repeat(4, 1), []
    model.transformer.h[0].register_forward_hook(lambda module, given, result: widths.append(tuple(given[0].shape[:2])))
    torch.manual_seed(3)
    found = model.generate(idx, 20)
    assert widths[:2] == [(1, 9), (4, 1)]
    torch.manual_seed(3)
    assert torch.equal(found, plain_generate(model, idx, 20))


def test_each_token_is_read_once_until_the_window_slides():
    model, seen = make_gpt(), []
    model.transformer.h[0].register_forward_hook(lambda module, given, result: seen.append(given[0].size(1)))
    model.generate(prompt_of(10), 10)
    assert seen == [10, 1, 1, 1, 1, 1, 1, 16, 16, 16] # and nothing after the last token


@pytest.mark.parametrize("split", [[16], [1] * 16, [5, 1, 7, 3]], ids=str)
def test_logits_do_not_depend_on_how_the_cache_was_filled(split):
    model, idx = make_gpt(), prompt_of(16, rows=2)
    cache = KVCache(model.config, 2, 16)
    with torch.no_grad():
        for part in idx.split(split, dim=1):
            logits, loss = model(part, cache=cache)
        assert loss is None and cache.size == 16
        torch.testing.assert_close(logits, model(idx)[0], atol=1e-5, rtol=1e-5)


def test_forward_returns_logits_and_loss():
    model, idx, targets = make_gpt(), prompt_of(9, 2), prompt_of(9, 2, seed=1)
    targets[0, :4] = -1
    logits, loss = model(idx, targets)
    assert logits.shape == (2, 9, SHAPE["vocab_size"])
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -chosen[targets >= 0].mean())
    last, none = model(idx)
    assert last.shape == (2, 1, SHAPE["vocab_size"]) and none is None
    torch.testing.assert_close(last[:, 0], logits[:, -1])


def test_the_future_is_not_read():
    model, idx = make_gpt(), prompt_of(12)
    other = idx.clone()
    other[:, 8:] = (other[:, 8:] + 1) % SHAPE["vocab_size"]
    torch.testing.assert_close(model(idx, idx)[0][:, :8], model(other, other)[0][:, :8])


def test_more_than_block_size_is_refused():
    with pytest.raises(ValueError, match="17 tokens: block_size is 16"):
        make_gpt()(prompt_of(17))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        make_gpt().generate(torch.empty(1, 0, dtype=torch.long), 3)


def test_no_new_tokens_is_the_prompt():
    idx = prompt_of(4)
    assert torch.equal(make_gpt().generate(idx, 0), idx)


def test_a_cast_network_equals_autocast():
    """Linears cast once give the logits that autocast gives when it casts them at every step."""
    idx = prompt_of(14, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = make_gpt()(idx)[0]
        model = make_gpt().cast_linears(torch.bfloat16)
        assert torch.equal(model(idx)[0], expected)
        assert model.compute_dtype() == torch.bfloat16
        torch.testing.assert_close(model.generate(idx, 10, top_k=1)[:, :15], plain_generate(make_gpt(), idx, 1, top_k=1))
    assert make_gpt().cast_linears(torch.float32).lm_head.weight.dtype == torch.float32


def test_float32_keeps_the_head_tied():
    """One parameter, or each would be moved to a GPU by itself."""
    model = make_gpt().cast_linears(torch.float32)
    assert model.lm_head.weight is model.transformer.wte.weight


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


@pytest.mark.parametrize("kind", [lambda model: model, GraphedGPT], ids=["plain", "graphs"])
@pytest.mark.parametrize("how", [
    dict(temperature=0.9, top_k=30), dict(top_p=0.9), dict(top_p=0.3, top_k=50), dict(top_p=1e-9), dict(top_p=1.0),
    dict(min_p=0.05), dict(min_p=0.9), dict(min_p=0.0), dict(min_p=1.0), dict(repetition_penalty=1.3), dict(repetition_penalty=0.7),
    dict(temperature=1.7, top_k=60, top_p=0.8, min_p=0.1, repetition_penalty=1.2), dict(temperature=1.5, top_p=0.7, min_p=0.3),
], ids=str)
def test_samples_equal_transformers(how, kind, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    idx = torch.randint(300, (1, 5), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(21)
    expected = [theirs.generate(idx, do_sample=True, max_new_tokens=40, eos_token_id=None, pad_token_id=0, **{"top_k": 0, **how})
                for _ in range(3)]
    ours = kind(GPT.from_pretrained(str(tmp_path)))
    torch.manual_seed(21)
    assert [ours.generate(idx, 40, **how).tolist() for _ in range(3)] == [sample.tolist() for sample in expected]


def test_greedy_with_a_penalty_equals_transformers(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    idx = torch.randint(300, (3, 5), generator=torch.Generator().manual_seed(0))
    expected = theirs.generate(idx, do_sample=False, max_new_tokens=40, repetition_penalty=1.4, eos_token_id=None, pad_token_id=0)
    ours = GPT.from_pretrained(str(tmp_path))
    assert torch.equal(ours.generate(idx, 40, temperature=0, repetition_penalty=1.4), expected)


def test_from_pretrained_takes_overrides(tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    assert GPT.from_pretrained(str(tmp_path)).config.dropout == 0.0
    assert GPT.from_pretrained(str(tmp_path), dict(dropout=0.25)).transformer.drop.p == 0.25
    with pytest.raises(ValueError, match="model_args holds what GPT does not have: rope"):
        GPT.from_pretrained(str(tmp_path), dict(rope=True))


@pytest.mark.parametrize("field, value", [
    ("n_head", 5), ("n_layer", 0), ("n_embd", 2.5), ("vocab_size", "65"), ("block_size", True), ("n_head", None),
    ("dropout", "0.1"), ("dropout", float("nan")), ("n_inner", 0), ("layer_norm_epsilon", None), ("gelu", "relu"),
])
def test_absurd_shapes_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        GPTConfig(**{**SHAPE, field: value})


def test_loading_makes_no_copy_and_draws_nothing():
    model = make_gpt()
    state = torch.get_rng_state()
    loaded = GPT.from_state_dict(dataclasses.asdict(model.config), model.state_dict())
    assert torch.equal(torch.get_rng_state(), state) and not loaded.training
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("change, said", [
    (lambda tensors: tensors.pop("lm_head.weight"), "missing: lm_head.weight"),
    (lambda tensors: tensors.update(extra=torch.ones(1)), "unexpected: extra"),
    (lambda tensors: tensors.update({"lm_head.weight": torch.ones(2, 3)}), r"misshapen: lm_head.weight \(2, 3\) instead of"),
    (lambda tensors: [tensors.pop(name) for name in list(tensors)[:5]], "and 2 more"),
], ids=["missing", "unexpected", "misshapen", "many"])
def test_tensors_that_do_not_fit_are_named(change, said):
    model = make_gpt()
    tensors = model.state_dict()
    change(tensors)
    with pytest.raises(ValueError, match=said):
        GPT.from_state_dict(dataclasses.asdict(model.config), tensors)


@pytest.mark.filterwarnings("ignore") # torch's compiler warns about torch
def test_compiled_generation_gives_the_same_tokens():
    model, idx = make_gpt(), prompt_of(5, 2)
    torch.manual_seed(3)
    expected = model.generate(idx, 20)
    model.compile_generation(idx, 20)
    calls = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert calls > 0
    torch.manual_seed(3)
    assert torch.equal(model.generate(idx, 20), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == calls # all that runs had been compiled
