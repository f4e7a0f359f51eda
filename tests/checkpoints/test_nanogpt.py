"""Files of nanoGPT, its forks and build-nanogpt: how they are found, which load, and what their Checkpoint holds."""
import dataclasses
import os
import pathlib
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from models import SHAPE, make_gpt, nanogpt_args, same_model, save_checkpoint
from sampling.checkpoints.build import count_init_draws
from sampling.checkpoints.nanogpt import find_checkpoint, load_by_name, load_checkpoint
from sampling.sampler.mt19937 import advance_mt19937

SIZES = {name: SHAPE[name] for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}


@pytest.fixture
def gptconfig(monkeypatch):
    """The GPTConfig of build-nanogpt's module train_gpt2."""
    module = types.ModuleType("train_gpt2")
    module.GPTConfig = dataclasses.make_dataclass("GPTConfig", SHAPE | {})
    module.GPTConfig.__module__ = "train_gpt2"
    monkeypatch.setitem(sys.modules, "train_gpt2", module)
    return module.GPTConfig


def save_lesson(folder, model, config, /, **changes):
    """Write what build-nanogpt's training loop writes."""
    folder.mkdir(exist_ok=True)
    entries = {"model": model.state_dict(), "config": config, "step": 19072, "val_loss": 3.05} | changes
    torch.save({key: entry for key, entry in entries.items() if entry is not None}, folder / "model_19072.pt")
    return folder / "model_19072.pt"


def lesson_config(gptconfig):
    """Its five fields as an object."""
    config = gptconfig.__new__(gptconfig)
    config.__dict__ |= SIZES
    return config


# ---- finding the file


def test_the_error_for_a_missing_checkpoint_names_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"no checkpoint at {tmp_path / 'out'}; pass --out_dir="):
        find_checkpoint(tmp_path / "out")


def test_a_folder_of_snapshots_names_them_with_the_newest_first(tmp_path):
    names = ["ckpt-1000-1.3-1.5.pt", "2000_ckpt.pt", "best_model.pt", "a.pt", "b.pt", "model_00001.pt"]
    for i, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (i * 100,) * 2)
    newest = tmp_path / names[-1]
    with pytest.raises(FileNotFoundError) as error:
        load_checkpoint(tmp_path)
    listed = "model_00001.pt, b.pt, a.pt, best_model.pt, 2000_ckpt.pt, ..."
    assert f"{tmp_path} holds {listed}, but no ckpt.pt; pass --out_dir={newest}" in str(error.value)
    with pytest.raises(ValueError, match=f"neither config.json nor ckpt.pt, but .*--out_dir={newest}"):
        load_by_name(tmp_path)


# ---- what a Checkpoint holds

def test_fields_of_a_nanogpt_checkpoint(tmp_path):
    log, config = [], {"dataset": "shakespeare", "tokenizer": "tiktoken"}
    path = save_checkpoint(tmp_path / "out", make_gpt(vocab_size=70), config=config)
    checkpoint = load_checkpoint(tmp_path / "out", log=log.append)
    assert (checkpoint.path, checkpoint.folder, checkpoint.raw_config) == (str(path), path.parent, config)
    assert checkpoint.config == GPTConfig(**SHAPE | {"vocab_size": 70})
    assert (checkpoint.iter_num, checkpoint.val_loss, checkpoint.crc32) == (100, 1.5, None)
    assert log == [f"{path}: iteration 100, validation loss 1.5000"]


@pytest.mark.parametrize("changes, described", [
    ({"iter_num": None, "best_val_loss": None}, "loaded"), ({"best_val_loss": None}, "iteration 100"),
    ({"best_val_loss": float("nan")}, "iteration 100"),
    ({"iter_num": np.int64(7)}, "iteration 7, validation loss 1.5000"),
])
def test_the_line_says_what_the_checkpoint_has(changes, described, tmp_path):
    log, path = [], save_checkpoint(tmp_path, make_gpt(), **changes)
    load_checkpoint(path, log=log.append)
    assert log == [f"{path}: {described}"]


def test_fields_of_a_build_nanogpt_checkpoint(gptconfig, tmp_path):
    model = make_gpt()
    checkpoint = load_checkpoint(save_lesson(tmp_path, model, lesson_config(gptconfig)), log=lambda text: None)
    assert checkpoint.config == GPTConfig(**SIZES, gelu="tanh")
    assert (checkpoint.iter_num, checkpoint.val_loss) == (19072, 3.05)
    assert checkpoint.num_init_draws == count_init_draws(model.state_dict())


def test_crc32_depends_on_the_weights_but_not_on_their_order(tmp_path):
    model = make_gpt()
    paths = [save_checkpoint(tmp_path / "a", model), save_checkpoint(tmp_path / "c", make_gpt(seed=2)),
             save_checkpoint(tmp_path / "b", model, model=dict(reversed(model.state_dict().items())))]
    one, other, same = (load_checkpoint(path, with_crc32=True, log=print).crc32 for path in paths)
    assert one == same == "6fffcc38" != other, "a resumed run of an older version compares it"


@pytest.mark.parametrize("tie", [True, False])
def test_convert_gets_each_weight_once_and_its_result_stands_in_state_dict(tie, tmp_path):
    model, seen = make_gpt(tie_word_embeddings=tie), []
    path = save_checkpoint(tmp_path, model)
    found = load_checkpoint(path, lambda weight: seen.append(weight.clone()) or -weight, True, print)
    assert len(seen) == 2 * 4 + (1 if tie else 2) and found.crc32 == load_checkpoint(path, None, True, print).crc32
    for name, tensor in model.state_dict().items():
        is_weight = tensor.dim() == 2 and "wpe" not in name
        assert torch.equal(found.state_dict[name], -tensor if is_weight else tensor)
        assert not is_weight or any(torch.equal(weight, tensor) for weight in seen)


@pytest.mark.parametrize("shape", [
    dict(), dict(bias=False), dict(n_embd=7, n_head=1, vocab_size=33, block_size=10), dict(n_embd=4, vocab_size=3),
    dict(n_embd=3, n_head=3, block_size=3, vocab_size=17), dict(n_embd=1, n_head=1, block_size=5, vocab_size=7),
], ids=str)
def test_count_init_draws_equals_the_draws_of_the_initialisation(shape):
    model = make_gpt(**shape)
    torch.manual_seed(5)
    GPT(GPTConfig(**vars(model.config)))
    generator = torch.Generator().manual_seed(5)
    advance_mt19937(generator, count_init_draws(model.state_dict()))
    assert torch.equal(torch.empty(700).exponential_(generator=generator), torch.empty(700).exponential_())


# ---- files that load

def prefixed(prefix):
    return lambda model: {"model": {prefix + name: tensor for name, tensor in model.state_dict().items()}}


def without(name):
    return lambda model: {"model": {key: tensor for key, tensor in model.state_dict().items() if key != name}}


def with_tensors(**tensors):
    names = {"head": "lm_head.weight", "mask": "transformer.h.0.attn.bias",
             "masked": "transformer.h.1.attn.masked_bias"}
    return lambda model: {"model": model.state_dict() | {names[key]: make(model) for key, make in tensors.items()}}


FORMS = {
    "compiled": prefixed("_orig_mod."), "DDP": prefixed("module."), "both": prefixed("module._orig_mod."),
    "without-transformer": lambda model: {"model": {
        name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}},
    "masks": with_tensors(mask=lambda model: torch.ones(1, 1, 16, 16, dtype=torch.uint8),
                          masked=lambda model: torch.tensor(-1e4)),
    "head-copied": with_tensors(head=lambda model: model.lm_head.weight.detach().clone()),
    "head-in-float64": with_tensors(head=lambda model: model.lm_head.weight.detach().double()),
    "head-untied": lambda model: {"model": make_gpt(tie_word_embeddings=False).state_dict()},
    "no-head": without("lm_head.weight"), "no-embedding": without("transformer.wte.weight"),
    "views-of-one-record": lambda model: {"model": {
        name: torch.stack([t.detach(), t.detach()])[1] for name, t in model.state_dict().items()}},
    "no-bias-field": lambda model: {"model_args": {k: v for k, v in nanogpt_args(model.config).items() if k != "bias"}},
    "numpy-numbers": lambda model: {"model_args": SHAPE | {"n_embd": np.int64(24), "dropout": np.float64(0)}},
    "numpy-and-paths": lambda model: {"config": {"lr": np.dtype(">f4").type(0.1), "out": pathlib.Path("a/b")}},
    "parameters": lambda model: {"model": dict(model.named_parameters())}, "no-config": lambda model: {"config": None},
    "losses-and-sets": lambda model: {"losses": [i / 7 for i in range(100_000)], "x": {1, 2}},
}


@pytest.mark.parametrize("options", [{}, {"pickle_protocol": 4}], ids=["protocol-2", "protocol-4"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_checkpoints_load(form, options, tmp_path, monkeypatch):
    model = make_gpt(tie_word_embeddings=form != "head-untied")
    monkeypatch.setattr(torch, "save", partial(torch.save, **options))
    assert same_model(save_checkpoint(tmp_path, model, **FORMS[form](model)), model)


def test_a_file_of_torch_before_1_6_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", partial(torch.save, _use_new_zipfile_serialization=False))
    path = save_checkpoint(tmp_path, make_gpt())
    monkeypatch.undo()
    assert path.read_bytes()[:2] != b"PK" and same_model(path, make_gpt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_load_as_float32(dtype, tmp_path):
    model = make_gpt().to(dtype)
    assert same_model(save_checkpoint(tmp_path, model), model.float())


def test_a_file_without_checksums_loads(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save_checkpoint(tmp_path, make_gpt())
    finally:
        torch.serialization.set_crc32_options(True)
    assert same_model(path, make_gpt())


@pytest.mark.parametrize("change", [
    lambda model, config: {}, lambda model, config: {"config": dict(SIZES)},
    lambda model, config: {"model": None, "model_state_dict": model.state_dict()},
    lambda model, config: {"config": None, "model_args": config},
], ids=["object", "dict", "model_state_dict", "as-model_args"])
def test_build_nanogpts_files_load_with_the_tanh_gelu(change, gptconfig, tmp_path):
    model, config = make_gpt(gelu="tanh"), lesson_config(gptconfig)
    assert same_model(save_lesson(tmp_path, model, config, **change(model, config)), model)


def test_nanogpts_own_gptconfig_keeps_the_exact_gelu(gptconfig, tmp_path):
    for config in SHAPE, gptconfig(**SHAPE):
        assert same_model(save_lesson(tmp_path, make_gpt(), config), make_gpt())


# ---- fields of forks

@pytest.mark.parametrize("field", [
    {"rope": False}, {"n_kv_head": None}, {"flash": True}, {"device": "cuda"}, {"attn_pdrop": 0.1}])
def test_a_field_that_changes_no_arithmetic_is_ignored(field, tmp_path):
    assert same_model(save_checkpoint(tmp_path, make_gpt(), model_args=SHAPE | field), make_gpt())


@pytest.mark.parametrize("field", [{"rope": True}, {"n_kv_head": 1}, {"norm": "rms"}])
@pytest.mark.parametrize("key", ["model_args", "config"])
def test_a_field_that_is_on_is_named_and_the_advice_works(key, field, tmp_path):
    model, name = make_gpt(gelu="tanh"), next(iter(field))
    path = save_lesson(tmp_path, model, None, **{key: SIZES | field | {"gelu": "tanh"}})
    with pytest.raises(ValueError, match=f"its {key} has fields that a GPT does not have: {name};") as error:
        load_checkpoint(path)
    command = str(error.value).split("fields: ")[1].replace("ckpt.pt", str(tmp_path / "ckpt.pt"))
    exec(command, {"torch": torch, "model": model})
    assert same_model(tmp_path / "ckpt.pt", model)


# ---- files that are refused

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
        load_checkpoint(tmp_path / "ckpt.pt")
    assert message in str(error.value) and str(tmp_path / "ckpt.pt") in str(error.value)
