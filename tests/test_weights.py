"""Checkpoints of every kind, written to disk and loaded."""
import datetime
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import weights
from weights import find_checkpoint, load_checkpoint, load_huggingface

from conftest import PROJECT, SHAPE, make_gpt, make_transformers_gpt2, nanogpt_args, save_checkpoint
from model import GPT


def same_network(path, model):
    """Whether the checkpoint at path holds the model: its own tensors, and the same logits."""
    model_args, state_dict, _ = load_checkpoint(path)
    loaded = GPT.from_state_dict(model_args, state_dict)
    assert all(tensor.dtype == torch.float32 for tensor in state_dict.values())
    idx = torch.arange(16)[None]
    with torch.no_grad():
        return torch.equal(loaded(idx, idx)[0], model(idx, idx)[0])


def test_a_path_that_is_not_utf_8_is_refused_as_such(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    save_checkpoint(folder, make_gpt())
    with pytest.raises(ValueError, match="not UTF-8"):
        find_checkpoint(folder)


def test_a_pickle_that_torch_cannot_read_is_not_called_damaged(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    torch.save(torch.load(path, weights_only=True), path, pickle_protocol=4)
    with pytest.raises(ValueError, match="torch reads no weights of pickle_protocol=4"):
        load_checkpoint(path)


def test_long_lists_of_losses(tmp_path):
    model = make_gpt()
    assert same_network(save_checkpoint(tmp_path, model, losses=[i / 7 for i in range(600_000)]), model)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_prefixes_of_compile_and_ddp(prefix, tmp_path):
    model = make_gpt()
    tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    assert same_network(save_checkpoint(tmp_path, model, model=tensors), model)


def test_mask_buffers_are_dropped(tmp_path):
    model = make_gpt()
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
             "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    assert same_network(save_checkpoint(tmp_path, model, model=model.state_dict() | masks), model)


@pytest.mark.parametrize("bias", [True, False])
def test_bias_is_what_the_tensors_show(bias, tmp_path):
    model = make_gpt(bias=bias)
    args = {name: value for name, value in nanogpt_args(model.config).items() if name != "bias"}
    assert same_network(save_checkpoint(tmp_path, model, model_args=args), model)


def test_no_config(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["config"]
    torch.save(checkpoint, path)
    assert load_checkpoint(path)[2] == {}


def test_a_separate_head(tmp_path):
    model = make_gpt(tied=False)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert same_network(save_checkpoint(tmp_path, model), model)


@pytest.mark.parametrize("change", [
    lambda tensors: tensors.pop("lm_head.weight"),
    lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].clone()}),
    lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].double()}),
], ids=["no-head", "equal-copies", "equal-in-another-precision"])
def test_a_tied_head_however_it_is_stored(change, tmp_path):
    model = make_gpt()
    tensors = model.state_dict()
    change(tensors)
    path = save_checkpoint(tmp_path, model, model=tensors)
    assert same_network(path, model)
    model_args, state_dict, _ = load_checkpoint(path)
    assert model_args["tied"] and state_dict["lm_head.weight"] is state_dict["transformer.wte.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype, tmp_path):
    model = make_gpt().to(dtype)
    assert same_network(save_checkpoint(tmp_path, model), model.float())


def test_old_files_that_are_no_zip(tmp_path):
    model = make_gpt()
    path = save_checkpoint(tmp_path, model)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert path.read_bytes()[:2] != b"PK"
    assert same_network(path, model)


def test_settings_with_numpy_numbers_and_paths(tmp_path):
    settings = {"a": np.float64(1.5), "b": np.int32(-7), "c": np.bool_(True), "d": np.float32(0.1), "e": np.dtype(">i4").type(3),
                "out_dir": pathlib.Path("/a/b"), "data": pathlib.PureWindowsPath("c:/d"), "best": torch.tensor(1.0)}
    model = make_gpt()
    path = save_checkpoint(tmp_path, model, config=settings)
    assert same_network(path, model)
    config = load_checkpoint(path)[2]
    assert [config[key] for key in "abce"] == [1.5, -7, True, 3] and abs(config["d"] - 0.1) < 1e-7
    assert config["out_dir"] == "/a/b" and type(config["a"]) is float


def test_sizes_as_numpy_numbers(tmp_path):
    model = make_gpt()
    args = nanogpt_args(model.config) | {"vocab_size": np.int64(SHAPE["vocab_size"]), "dropout": np.float64(0.0)}
    assert same_network(save_checkpoint(tmp_path, model, model_args=args), model)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_optimizer_state_is_never_read(tmp_path):
    path = save_checkpoint(tmp_path, make_gpt(), optimizer={"state": torch.ones(50_000_000)}) # 200 MB
    program = f"""
import re
import weights
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
before = peak()
weights.load_checkpoint({str(path)!r})
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50


def test_the_file_may_be_overwritten_once_it_is_loaded(tmp_path):
    """A training run does that to its ckpt.pt; a mapped tensor would change, or end the process."""
    path = save_checkpoint(tmp_path, make_gpt())
    _, state_dict, _ = load_checkpoint(path)
    before = {name: tensor.clone() for name, tensor in state_dict.items()}
    path.write_bytes(b"")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_dict.items())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("name", ["ckpt.pt", "a name\twith\r spaces.pt"])
def test_pages_that_were_read_are_let_go(name, tmp_path):
    path = tmp_path / name
    torch.save({"a": torch.arange(2**20)}, path)

    def held():
        lines = pathlib.Path("/proc/self/smaps").read_text().split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{weights.pages_of([mapped])[0][0]:x}-"))
        return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])

    mapped = weights.read_pickle(path)[0]["a"]
    assert mapped.sum() == 2**20 * (2**20 - 1) // 2 and held() >= 8192
    weights.let_go(weights.pages_of([mapped]))
    assert held() == 0 and mapped[12345] == 12345
    assert weights.pages_of([torch.ones(2**20)]) == [], "what is in no file would be lost"


def test_out_dir_may_be_the_file(tmp_path):
    path = save_checkpoint(tmp_path / "out", make_gpt())
    assert find_checkpoint(str(tmp_path / "out")) == find_checkpoint(str(path)) == path


def test_a_missing_checkpoint_names_what_lies_nearby(tmp_path):
    save_checkpoint(tmp_path / "out-a", make_gpt())
    save_checkpoint(tmp_path / "out-b", make_gpt())
    (tmp_path / "empty").mkdir()
    for missing in "out", "empty":
        with pytest.raises(FileNotFoundError) as error:
            find_checkpoint(str(tmp_path / missing))
        for said in str(tmp_path / missing / ""), "out-a", "out-b", "out-shakespeare-char":
            assert said.rstrip("/") in str(error.value)


class Runs:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("place", ["model", "model_args", "config", "optimizer"])
def test_a_hostile_checkpoint_runs_nothing(place, zipped, tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    checkpoint = torch.load(path, weights_only=True) | {place: {"x": Runs(tmp_path / "ran")}}
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"names posix\.system, which could run code"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False) # the attack itself works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("content, said", [
    ({"model": {}}, "must hold model and model_args, and holds 'model'"),
    ([1, 2], "holds a list"),
    ({"model": [], "model_args": {}}, "must hold tensors by name"),
    ({"model": {"a": 3}, "model_args": {}}, "holds 'a': int"),
    ({"model": {"a": torch.ones(2, dtype=torch.int8)}, "model_args": {}}, "only dense floating point"),
    ({"model": {"a": torch.ones(2).to_sparse()}, "model_args": {}}, "names torch._utils._rebuild_sparse_tensor"),
    ({"model": {"a": torch.ones(2)}, "model_args": 3}, "model_args that are no dict"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"n_layer": 10**12}}, "n_layer=1000000000000 and holds tensors of 0 layers"),
    ({"model": {"a": torch.ones(2)}, "model_args": {"x": datetime.date(2020, 1, 1)}}, "names datetime.date"),
], ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_what_is_no_checkpoint_is_refused(content, said, tmp_path):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError) as error:
        load_checkpoint(tmp_path / "ckpt.pt")
    assert said in str(error.value)


@pytest.mark.parametrize("damage", [
    lambda content: b"", lambda content: b"hello", lambda content: content[:len(content) // 2],
    lambda content: b"PK\3\4" + b"\0" * 100, lambda content: pickle.dumps({"a": 1}),
], ids=["empty", "text", "cut", "no-zip", "bare-pickle"])
def test_damaged_files_are_refused(damage, tmp_path):
    path = save_checkpoint(tmp_path, make_gpt())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"cannot read|is no checkpoint"):
        load_checkpoint(path)


# ---- Hugging Face

def same_as_transformers(folder, theirs):
    """Whether what lies in folder gives their logits."""
    ours, idx = GPT.from_pretrained(str(folder)), torch.arange(40)[None]
    with torch.no_grad():
        return (ours(idx, idx)[0] - theirs(idx).logits).abs().max() < 1e-4


def test_safetensors_in_one_file(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists() and same_as_transformers(tmp_path, theirs)


def test_safetensors_in_shards(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and same_as_transformers(tmp_path, theirs)


def test_pytorch_model_bin_in_one_file_and_in_shards(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.config.save_pretrained(tmp_path)
    tensors = theirs.state_dict()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    shards = {f"pytorch_model-0000{i}-of-00002.bin": names[i::2] for i in range(2)}
    for shard, held in shards.items():
        torch.save({name: tensors[name] for name in held}, tmp_path / shard)
    index = str({"weight_map": {name: shard for shard, held in shards.items() for name in held}}).replace("'", '"')
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert same_as_transformers(tmp_path, theirs)


def test_names_without_the_prefix_and_with_masks(tmp_path):
    """As the files of the hub's gpt2 have them."""
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.config.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)


def test_half_precision(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300).half()
    theirs.save_pretrained(tmp_path)
    assert same_as_transformers(tmp_path, theirs.float())


def test_the_hub_cache_is_used_offline(tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out, of a model that only has pytorch_model.bin."""
    theirs = make_transformers_gpt2(vocab_size=300)
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    theirs.config.save_pretrained(snapshot)
    torch.save(theirs.state_dict(), snapshot / "pytorch_model.bin")
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert same_as_transformers("someone/tiny", theirs)
    with pytest.raises(ValueError, match=r"could not get 'someone/other'.*hf download someone/other --local-dir"):
        load_huggingface("someone/other")


def test_an_id_that_is_none_is_refused():
    with pytest.raises(ValueError, match="neither 'resume', nor a folder here, nor a Hugging Face id"):
        load_huggingface("no/such/model")


@pytest.mark.parametrize("change, said", [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "must hold an object"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "model_type 'llama'; only gpt2"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2", "activation_function": "relu"}'), "'relu'"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), "n_layer=12 and holds tensors of 2 layers"),
    (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 50), "cannot read"),
    (lambda folder: shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin"), "cannot read"),
    (lambda folder: [(folder / "model.safetensors").unlink(), torch.save({"x": Runs(folder / "ran")}, folder / "pytorch_model.bin")],
     "names posix.system, which could run code"),
    (lambda folder: [(folder / "model.safetensors").unlink(),
                     (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../y.safetensors"}}')],
     "must name files of its own folder"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_broken_folders_are_refused(change, said, tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError) as error:
        load_huggingface(str(tmp_path))
    assert said in str(error.value)
    assert not (tmp_path / "ran").exists()
