"""ckpt.pt files of nanoGPT's train.py: how they are found, which ones load, and the fields of their Checkpoint."""
import datetime
import os
import pathlib
import pickle
import sys

import numpy as np
import pytest
import torch

from models import SHAPE, make_gpt, nanogpt_args, same_model, save_checkpoint
from pickled_call import CreatesFile
from sampling.checkpoints.nanogpt import find_checkpoint, load_checkpoint
from sampling.checkpoints.state_dict import crc32_of

# ---- finding the file

def test_out_dir_may_be_the_checkpoint_file(tmp_path):
    path = save_checkpoint(tmp_path / "out", make_gpt())
    assert find_checkpoint(str(tmp_path / "out")) == find_checkpoint(str(path)) == path


def test_the_error_for_a_missing_checkpoint_lists_others_nearby(tmp_path):
    save_checkpoint(tmp_path / "out-a", make_gpt())
    save_checkpoint(tmp_path / "out-b", make_gpt())
    (tmp_path / "empty").mkdir()
    for missing in "out", "empty":
        with pytest.raises(FileNotFoundError) as error:
            find_checkpoint(str(tmp_path / missing))
        for name in str(tmp_path / missing / ""), "out-a", "out-b", "out-shakespeare-char":
            assert name.rstrip("/") in str(error.value)


def test_the_error_lists_the_projects_own_checkpoint_once_from_any_folder(tmp_path, monkeypatch):
    for folder in tmp_path, pathlib.Path(load_checkpoint.__code__.co_filename).parents[2]:
        monkeypatch.chdir(folder)
        with pytest.raises(FileNotFoundError) as error:
            find_checkpoint("nowhere")
        assert str(error.value).count("out-shakespeare-char") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such paths")
def test_a_path_that_is_not_utf_8_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    save_checkpoint(folder, make_gpt())
    with pytest.raises(ValueError, match="not valid UTF-8"):
        find_checkpoint(folder)


# ---- fields of a Checkpoint

def test_fields_of_a_nanogpt_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path / "out", make_gpt(vocab_size=70), config={"dataset": "shakespeare"})
    checkpoint = load_checkpoint(tmp_path / "out")
    assert (checkpoint.path, checkpoint.folder, checkpoint.dataset) == (str(path), path.parent, "shakespeare")
    assert checkpoint.vocab_size == checkpoint.model_args["vocab_size"] == 70
    assert checkpoint.num_init_draws > sum(tensor.numel() for tensor in checkpoint.state_dict.values() if tensor.dim() == 2)


def test_crc32_depends_on_the_weights_but_not_on_their_order(tmp_path):
    model = make_gpt()
    reversed_tensors = dict(reversed(model.state_dict().items()))
    paths = [save_checkpoint(tmp_path / "a", model), save_checkpoint(tmp_path / "b", model, model=reversed_tensors),
             save_checkpoint(tmp_path / "c", make_gpt(seed=2))]
    one, same, other = (crc32_of(load_checkpoint(path).state_dict) for path in paths)
    assert one == same != other and len(one) == 8 and int(one, 16) >= 0
    assert load_checkpoint(paths[0]).crc32 is None


def test_a_checkpoint_without_config_has_no_dataset(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    content = torch.load(path, weights_only=True)
    del content["config"]
    torch.save(content, path)
    assert load_checkpoint(path).dataset is None


# ---- files that load

@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_prefixes_of_compile_and_ddp_are_removed(prefix, tmp_path):
    model = make_gpt()
    tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    assert same_model(save_checkpoint(tmp_path, model, model=tensors), model)


def test_mask_buffers_are_dropped(tmp_path):
    model = make_gpt()
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
             "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    assert same_model(save_checkpoint(tmp_path, model, model=model.state_dict() | masks), model)


@pytest.mark.parametrize("bias", [True, False])
def test_bias_is_inferred_from_the_tensors(bias, tmp_path):
    model = make_gpt(bias=bias)
    args = {name: value for name, value in nanogpt_args(model.config).items() if name != "bias"}
    assert same_model(save_checkpoint(tmp_path, model, model_args=args), model)


def test_an_untied_head_loads(tmp_path):
    model = make_gpt(tie_word_embeddings=False)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert same_model(save_checkpoint(tmp_path, model), model)


@pytest.mark.parametrize("change", [
    lambda tensors: tensors.pop("lm_head.weight"),
    lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].clone()}),
    lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].double()}),
], ids=["no-head", "equal-copies", "equal-in-another-precision"])
def test_a_tied_head_is_recognised_in_every_form(change, tmp_path):
    model = make_gpt()
    tensors = model.state_dict()
    change(tensors)
    path = save_checkpoint(tmp_path, model, model=tensors)
    assert same_model(path, model)
    checkpoint = load_checkpoint(path)
    assert checkpoint.model_args["tie_word_embeddings"]
    assert checkpoint.state_dict["lm_head.weight"] is checkpoint.state_dict["transformer.wte.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_load_as_float32(dtype, tmp_path):
    model = make_gpt().to(dtype)
    assert same_model(save_checkpoint(tmp_path, model), model.float())


def test_old_format_files_load(tmp_path):
    model = make_gpt()
    path = save_checkpoint(tmp_path, model)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert path.read_bytes()[:2] != b"PK"
    assert same_model(path, model)


def test_model_args_may_be_numpy_numbers(tmp_path):
    model = make_gpt()
    args = nanogpt_args(model.config) | {"vocab_size": np.int64(SHAPE["vocab_size"]), "dropout": np.float64(0.0)}
    assert same_model(save_checkpoint(tmp_path, model, model_args=args), model)


@pytest.mark.parametrize("count", [100_000, pytest.param(600_000, marks=pytest.mark.slow)])
def test_a_checkpoint_with_a_long_list_of_losses_loads(count, tmp_path):
    model = make_gpt()
    assert same_model(save_checkpoint(tmp_path, model, losses=[i / 7 for i in range(count)]), model)


def test_overwriting_the_file_does_not_change_the_loaded_tensors(tmp_path):
    """A training run overwrites its ckpt.pt. A tensor that is still mapped would change, or crash the process."""
    path = save_checkpoint(tmp_path, make_gpt())
    state_dict = load_checkpoint(path).state_dict
    before = {name: tensor.clone() for name, tensor in state_dict.items()}
    path.write_bytes(b"")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_dict.items())


# ---- files that are refused

@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("entry", ["model", "model_args", "config", "optimizer"])
def test_a_hostile_checkpoint_runs_no_code(entry, zipped, tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    content = torch.load(path, weights_only=True) | {entry: {"x": CreatesFile(tmp_path / "ran")}}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"names (posix|nt)\.system, which could run code"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False) # the attack itself works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("content, message", [
    ({"model": {}}, "must hold model and model_args, or model and config, but holds 'model'"),
    ([1, 2], "but holds list"),
    ({"model": [], "model_args": {}}, "must hold tensors by name"),
    ({"model": {"a": 3}, "model_args": {}}, "holds 'a': int"),
    ({"model": {"a": torch.ones(2, dtype=torch.int8)}, "model_args": {}}, "only dense floating point"),
    ({"model": {"a": torch.ones(2).to_sparse()}, "model_args": {}}, "names torch._utils._rebuild_sparse_tensor"),
    ({"model": {"a": torch.ones(2)}, "model_args": 3}, "must be a dict, got int"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"n_layer": 10**12}}, "n_layer=1000000000000 but holds tensors of 0 layers"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"x": [1, 2]}}, "must hold numbers and text, got 'x': list"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"x": datetime.date(2020, 1, 1)}}, "names datetime.date"),
], ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_a_file_that_is_not_a_checkpoint_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError) as error:
        load_checkpoint(tmp_path / "ckpt.pt")
    assert message in str(error.value) and str(tmp_path / "ckpt.pt") in str(error.value)


@pytest.mark.parametrize("damage", [
    lambda content: b"", lambda content: b"hello", lambda content: content[:len(content) // 2],
    lambda content: b"PK\3\4" + b"\0" * 100, lambda content: pickle.dumps({"a": 1}),
], ids=["empty", "text", "cut", "no-zip", "bare-pickle"])
def test_damaged_files_are_refused(damage, tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="cannot read"):
        load_checkpoint(path)


def test_the_error_names_a_pickle_protocol_that_torch_cannot_read(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    torch.save(torch.load(path, weights_only=True), path, pickle_protocol=4)
    with pytest.raises(ValueError, match="torch cannot read weights saved with pickle_protocol=4"):
        load_checkpoint(path)
