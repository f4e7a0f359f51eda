"""Files of nanoGPT, its forks and build-nanogpt: how they are found, which load, and what their Checkpoint holds."""
import os
import pathlib
import weakref
from functools import partial

import numpy as np
import pytest
import torch

import model as nanogpt
from models import SHAPE, make_gpt, same_model, save_checkpoint
from sampling.checkpoints.build import EMBEDDING, HEAD, count_init_draws
from sampling.checkpoints.nanogpt import load_by_name, load_nanogpt
from sampling.sampler.mt19937 import advance_mt19937

SIZES = {name: SHAPE[name] for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}


class GPTConfig:
    """build-nanogpt saves an object of its class of this name."""

    def __init__(self, fields):
        vars(self).update(fields)


# ---- finding the file

def test_a_folder_of_snapshots_names_them_with_the_newest_first(tmp_path):
    names = ["ckpt-1000-1.3-1.5.pt", "2000_ckpt.pt", "best_model.pt", "a.pt", "b.pt", "model_00001.pt"]
    for i, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (i * 100,) * 2)
    listed = "model_00001.pt, b.pt, a.pt, best_model.pt, 2000_ckpt.pt, ..."
    for load in load_nanogpt, load_by_name:
        with pytest.raises(FileNotFoundError) as error:
            load(tmp_path)
        assert str(error.value) == f"{tmp_path} holds {listed}, but no ckpt.pt; pass --out_dir={tmp_path / names[-1]}"


# ---- what a Checkpoint holds

@pytest.mark.parametrize("changes, described", [
    ({}, "iteration 100, validation loss 1.5000"), ({"iter_num": None, "best_val_loss": None}, "loaded"),
    ({"best_val_loss": float("nan")}, "iteration 100"),
    ({"iter_num": np.int64(7)}, "iteration 7, validation loss 1.5000"),
])
def test_fields_of_a_checkpoint_and_the_line_that_describes_it(changes, described, tmp_path):
    log, config = [], {"dataset": "shakespeare", "tokenizer": "tiktoken"}
    path = save_checkpoint(tmp_path, make_gpt(vocab_size=70), config=config, **changes)
    checkpoint = load_nanogpt(tmp_path, log=log.append)
    assert (checkpoint.path, checkpoint.folder, checkpoint.raw_config) == (str(path), tmp_path, config)
    assert checkpoint.config == nanogpt.GPTConfig(**SHAPE | {"vocab_size": 70}) and checkpoint.crc32 is None
    assert log == [f"{path}: {described}"]


def test_crc32_depends_on_the_weights_but_not_on_their_order(tmp_path):
    model = make_gpt()
    paths = [save_checkpoint(tmp_path / "a", model), save_checkpoint(tmp_path / "c", make_gpt(seed=2)),
             save_checkpoint(tmp_path / "b", model, model=dict(reversed(model.state_dict().items())))]
    one, other, same = (load_nanogpt(path, with_crc32=True, log=print).crc32 for path in paths)
    assert one == same == "6fffcc38" != other, "a resumed run of an older version compares it"


@pytest.mark.parametrize("tie", [True, False])
def test_convert_gets_each_weight_once_and_its_result_stands_in_state_dict(tie, tmp_path):
    model, references = make_gpt(tie_word_embeddings=tie), []
    path = save_checkpoint(tmp_path, model)

    def convert(weight):
        assert not any(reference() is not None for reference in references), "one weight in float32 at a time"
        references.append(weakref.ref(weight))
        return -weight
    found = load_nanogpt(path, convert, True, print)
    assert len(references) == 2 * 4 + (1 if tie else 2) and found.crc32 == load_nanogpt(path, None, True, print).crc32
    for name, tensor in model.state_dict().items():
        is_weight = tensor.dim() == 2 and "wpe" not in name
        assert torch.equal(found.state_dict[name], -tensor if is_weight else tensor)


@pytest.mark.parametrize("shape", [
    dict(), dict(bias=False), dict(n_embd=7, n_head=1, vocab_size=33, block_size=10), dict(n_embd=4, vocab_size=3),
    dict(n_embd=3, n_head=3, block_size=3, vocab_size=17), dict(n_embd=1, n_head=1, block_size=5, vocab_size=7),
], ids=str)
def test_count_init_draws_equals_the_draws_of_the_initialisation(shape):
    model = make_gpt(**shape)
    torch.manual_seed(5)
    nanogpt.GPT(nanogpt.GPTConfig(**vars(model.config)))
    generator = torch.Generator().manual_seed(5)
    advance_mt19937(generator, count_init_draws(model.state_dict()))
    assert torch.equal(torch.empty(700).exponential_(generator=generator), torch.empty(700).exponential_())


# ---- files that load

MASKS = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
         "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
WEIGHTS = { # what a file may have instead of these weights
    "as-they-are": lambda w: w, "untied": lambda w: w, "masks": lambda w: w | MASKS,
    "compiled": lambda w: {"_orig_mod." + name: tensor for name, tensor in w.items()},
    "compiled-DDP": lambda w: {"module._orig_mod." + name: tensor for name, tensor in w.items()},
    "DDP-compiled": lambda w: {"_orig_mod.module." + name: tensor for name, tensor in w.items()},
    "without-transformer": lambda w: {name.removeprefix("transformer."): tensor for name, tensor in w.items()},
    "head-copied": lambda w: w | {HEAD: w[HEAD].clone()}, "head-in-float64": lambda w: w | {HEAD: w[HEAD].double()},
    "no-head": lambda w: {name: tensor for name, tensor in w.items() if name != HEAD},
    "no-embedding": lambda w: {name: tensor for name, tensor in w.items() if name != EMBEDDING},
    "views-of-one-record": lambda w: {name: torch.stack([tensor, tensor])[1] for name, tensor in w.items()},
    "parameters": lambda w: {name: torch.nn.Parameter(tensor) for name, tensor in w.items()},
    **{str(dtype): lambda w, dtype=dtype: {name: tensor.to(dtype) for name, tensor in w.items()}
       for dtype in (torch.float16, torch.bfloat16, torch.float64)},
}
ENTRIES = {
    "no-bias-field": {"model_args": {name: value for name, value in SHAPE.items() if name != "bias"}},
    "fields-that-are-off-or-change-no-arithmetic": {"model_args": SHAPE | {
        "rope": False, "n_kv_head": None, "flash": True, "device": "cuda", "attn_pdrop": 0.1}},
    "numpy-numbers": {"model_args": SHAPE | {"n_embd": np.int64(24), "dropout": np.float64(0)}},
    "numpy-and-paths": {"config": {"lr": np.dtype(">f4").type(0.1), "out": pathlib.Path("a/b")}},
    "others": {"losses": [i / 7 for i in range(100_000)], "x": {1, 2}, "y": torch.ones(1, dtype=torch.uint16)},
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("form", [*WEIGHTS, *ENTRIES])
def test_forms_of_checkpoints_load(form, protocol, tmp_path, monkeypatch):
    model = make_gpt(tie_word_embeddings=form != "untied").half().bfloat16().float() # numbers that each dtype has
    weights = WEIGHTS.get(form, WEIGHTS["as-they-are"])(model.state_dict())
    monkeypatch.setattr(torch, "save", partial(torch.save, pickle_protocol=protocol))
    assert same_model(save_checkpoint(tmp_path, model, **{"model": weights} | ENTRIES.get(form, {})), model)


@pytest.mark.parametrize("name, changed", [
    ("torch.save", partial(torch.save, _use_new_zipfile_serialization=False)),
    ("torch.serialization.get_crc32_options", lambda: False),
], ids=["of-torch-before-1.6", "without-checksums"])
def test_files_of_other_formats_load(name, changed, tmp_path, monkeypatch):
    monkeypatch.setattr(name, changed)
    path = save_checkpoint(tmp_path, make_gpt())
    monkeypatch.undo()
    assert same_model(path, make_gpt())


@pytest.mark.parametrize("model_key, config_key, config, gelu", [
    ("model", "config", GPTConfig(SIZES), "tanh"), ("model_state_dict", "config", SIZES, "tanh"),
    ("model", "model_args", GPTConfig(SIZES), "tanh"), ("model", "config", SHAPE, "none"), # nanoGPT's fields
    ("model", "config", GPTConfig(SHAPE), "none"),
], ids=["object", "dict", "as-model_args", "nanoGPT", "nanoGPT's-object"])
def test_build_nanogpts_files_load_with_its_form_of_gelu(model_key, config_key, config, gelu, tmp_path):
    model, path = make_gpt(gelu=gelu), tmp_path / "model_19072.pt"
    torch.save({model_key: model.state_dict(), config_key: config, "step": 19072, "val_loss": 3.05}, path)
    checkpoint = load_nanogpt(path, log=lambda text: None)
    assert (checkpoint.iter_num, checkpoint.val_loss) == (19072, 3.05)
    assert checkpoint.num_init_draws == count_init_draws(model.state_dict()) and same_model(path, model)


# ---- files that are refused

@pytest.mark.parametrize("key", ["model_args", "config"])
def test_a_field_that_is_on_is_named_and_the_advice_works(key, tmp_path):
    model = make_gpt(gelu="tanh")
    fields = SIZES | {"rope": True, "norm": "rms", "gelu": "tanh"}
    torch.save({"model": model.state_dict(), key: fields}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=f"its {key} has fields that a GPT does not have: norm, rope;") as error:
        load_nanogpt(tmp_path)
    command = str(error.value).split("fields: ")[1].replace("ckpt.pt", str(tmp_path / "ckpt.pt"))
    exec(command, {"torch": torch, "model": model})
    assert same_model(tmp_path, model)


@pytest.mark.parametrize("content, message", [
    ({"model": {}}, "must hold model and model_args, or model and config, but holds 'model'"),
    ([1, 2], "but holds list"), ({"model": [], "model_args": {}}, "must hold tensors by name"),
    ({"model": {"a": torch.ones(2, dtype=torch.int8)}, "model_args": {}}, "only dense floating point"),
    ({"model": {"a": torch.ones(2).to_sparse()}, "model_args": {}}, "names torch._utils._rebuild_sparse_tensor"),
    ({"model": {"a": torch.ones(2)}, "model_args": 3}, "must be a dict, got int"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"n_layer": 10**12}}, "n_layer=1000000000000 but holds"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"x": [1, 2]}}, "must hold numbers and text, got 'x': list"),
], ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_a_file_that_is_not_a_checkpoint_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError) as error:
        load_nanogpt(tmp_path / "ckpt.pt")
    assert message in str(error.value) and str(tmp_path / "ckpt.pt") in str(error.value)
