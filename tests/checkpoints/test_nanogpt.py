"""Files of nanoGPT, its forks and build-nanogpt: how they are found, which load, and what their
Checkpoint holds.
"""
import collections
import math
import os
import pathlib
import random
import re
import shlex
import sys
import weakref
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sampling
from attacks import write_settled
from models import SHAPE, make_gpt, make_transformers_gpt2, same_model, save_checkpoint
from project import PROJECT
from sampling import model as nanogpt
from sampling.checkpoints.checkpoint import EMBEDDING, HEAD, quantize
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.sampler.mt19937 import advance_mt19937
from sampling.sampler.row_streams import count_init_draws
from sampling.settings import ModelOptions
from sampling.text_generator import load_model

SIZES = {name: SHAPE[name] for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}


class GPTConfig(Namespace):
    """build-nanogpt saves an object of its class of this name."""


class DictConfig(Namespace):
    """Stands for OmegaConf's class, where pickle finds it."""
    __module__ = "omegaconf"


sys.modules.setdefault("omegaconf", SimpleNamespace(DictConfig=DictConfig))


class Slots:
    __slots__ = tuple(SHAPE)
    __init__ = Namespace.__init__


class OnTPU:
    """A tensor that was on a TPU, as torch.save writes it."""
    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (self.tensor, self.tensor.dtype, "xla:0", False)


class Mapping(dict):
    """A subclass of dict, such as those that give items as attributes."""


# ---- finding the file

THREE = "a/ckpt.pt words/ckpt.pt z/ckpt.pt"
RUNS = ("r/checkpoint-1000/config.json r/checkpoint-1000/model.safetensors "
        "r/checkpoint-500/config.json r/checkpoint-500/pytorch_model.bin "
        "r/checkpoint-2000/config.json r/training_args.bin")
HUB = "models--a--b/snapshots/1f"
HUB_FILES = f"{HUB}/config.json {HUB}/model.safetensors.index.json"
SHARDS = "x/config.json x/model-00001-of-00002.safetensors"
NO_INDEX = f"{SHARDS.split()[1]} is a shard, but model.safetensors.index.json, which"
ADVICE = [ # what is there, older files first; the setting; a part of the line
    ("", "out_dir=out",
     "there is no checkpoint at out/ckpt.pt; pass out_dir=FOLDER_OR_FILE; for GPT-2, pass "
     "init_from=gpt2"),
    (THREE, "out_dir=wrds/ckpt.pt", "found words, z, a; pass out_dir=words"),
    ("a/ckpt.pt runs/x/ckpt.pt b/ckpt.pt", "out_dir=runs", "found runs/x; pass out_dir=runs/x"),
    ("out/ckpt.pt out/log/x", "out_dir=out/log", "found out; pass out_dir=out"),
    ("out/ckpt.pt", "init_from=out", "found out; pass out_dir=out;"),
    ("out/ckpt.pt", "init_from=out/ckpt.pt", "found out/ckpt.pt; pass out_dir=out/ckpt.pt"),
    ("x/ckpt.pt o/best.ckpt o/best.bin o/train.bin", "out_dir=o",
     "found o/best.bin, o/best.ckpt; pass"),
    ("o/1.pt o/2.pt o/3.pt o/4.pt o/5.pt o/6.pt", "out_dir=o",
     "found o/6.pt, o/5.pt, o/4.pt, o/3.pt, o/2.pt, ...;"),
    ("gpt2/x", "init_from=gpt2", "for GPT-2, pass init_from=openai-community/gpt2; for the hub's"),
    ("gpt2", "out_dir=out", "for GPT-2, pass init_from=openai-community/gpt2"),
    (SHARDS, "init_from=x", NO_INDEX),
    (SHARDS, f"init_from={SHARDS.split()[1]}", NO_INDEX),
    (SHARDS, "out_dir=x", NO_INDEX),
    (f"{SHARDS} x/model.safetensors>/gone", "out_dir=x", "x/model.safetensors is a link to /gone"),
    ("gpt2>/gone", "init_from=gpt2", "gpt2 is a link to /gone, which is not there"),
    ("out/ckpt.pt/x", "out_dir=out",
     "there is no checkpoint at out/ckpt.pt, which is a folder; pass"),
    (RUNS, "init_from=r",
     "found r/checkpoint-1000, r/checkpoint-500; pass init_from=r/checkpoint-1000"),
    (HUB_FILES, "init_from=.", f"found {HUB}; pass init_from={HUB}"),
    ("gpt/config.json gpt/model.safetensors", "out_dir=gpt",
     "found gpt; pass init_from=gpt"),
    ("a'b/config.json a'b/model.safetensors", "out_dir=a'b/ckpt.pt",
     """pass init_from='a'"'"'b'"""),
    ("gpt/model.safetensors", "init_from=gpt/model.safetensors",
     "gpt/model.safetensors lacks its config.json: copy that"),
    ("x/config.json x/a.gguf", "init_from=x/a.gguf", "x/a.gguf is llama.cpp's: docs/usage.md"),
    ("x/adapter_model.safetensors", "out_dir=x", "x/adapter_model.safetensors is an adapter, "),
    ("model.fp16.safetensors", "out_dir=.", "model.fp16.safetensors is a variant of the weights: "),
    ("x/data.pkl", "out_dir=x", "x/data.pkl is a part of an unpacked ckpt.pt: docs/usage.md"),
    ("x/__0_0.distcp", "init_from=x", "x/__0_0.distcp is torch.distributed.checkpoint's, "),
]


def error_for(setting):
    """The error line of loading what a setting names."""
    name, _, value = setting.partition("=")
    load = {"out_dir": load_nanogpt, "init_from": load_huggingface}[name]
    with pytest.raises((OSError, ValueError)) as error:
        load(value)
    return str(error.value)


def make_files(names):
    """Write files, of which each is newer than the one before. a>b is a link from a to b."""
    for i, name in enumerate(names.split()):
        name, _, target = name.partition(">")
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if target:
            path.symlink_to(target)
            continue
        path.write_text('{"model_type": "gpt2"}' if path.name == "config.json" else "")
        os.utime(path, (i * 100, i * 100))


@pytest.mark.parametrize("files, setting, line", ADVICE)
def test_the_line_says_what_is_there_and_a_setting_that_does_not_lead_back(
        files, setting, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_files(files)
    error = error_for(setting)
    assert line in error
    for advised in re.findall(r"; pass (\w+=[^ ,;]+)", error):
        if "FOLDER_OR_FILE" in advised:
            continue
        next_error = error_for(shlex.split(advised)[0])
        assert "there is no" not in next_error
        assert " is no Hugging" not in next_error


def load_out_dir(path):
    return load_model("out_dir", path, ModelOptions("cpu"))


@pytest.mark.parametrize("load", [load_out_dir, load_huggingface, sampling.load])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_file_of_a_hugging_face_model_means_its_folder(load, name, tmp_path, gpt2_encoding):
    model = make_transformers_gpt2()
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    path = str(tmp_path / name)
    if name == "pytorch_model.bin": # otherwise, the folder's weights would be others
        with pytest.raises((OSError, ValueError), match=f"pass (name|init_from)={tmp_path}"):
            load(path)
        assert load_huggingface(str(tmp_path)).folder == tmp_path # what the error says
        (tmp_path / "model.safetensors").unlink()
    loaded = load(path)
    assert getattr(loaded, "checkpoint", loaded).folder == tmp_path


# ---- what a Checkpoint holds

@pytest.mark.parametrize("changes, described", [
    ({}, "iteration 100, validation loss 1.5000"),
    ({"iter_num": None, "best_val_loss": None}, "loaded"),
    ({"best_val_loss": math.nan, "iter_num": np.int64(7)}, "iteration 7"),
    ({"iter_num": None, "config": Namespace(dataset="letters")}, "validation loss 1.5000"),
])
def test_fields_of_a_checkpoint_and_the_line_that_describes_it(
        changes, described, tmp_path, messages):
    path = save_checkpoint(tmp_path, make_gpt(), **changes)
    checkpoint = load_nanogpt(tmp_path)
    assert checkpoint.folder == tmp_path
    assert checkpoint.config == nanogpt.GPTConfig(**SHAPE)
    assert checkpoint.raw_config == {"dataset": "letters"} # of train.py
    assert messages == [f"{path}: {described}"]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_the_checksum_is_of_the_weights_whatever_the_file(has_checksums, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.serialization.get_crc32_options", lambda: has_checksums)

    def crc32(weights):
        path = save_checkpoint(tmp_path, make_gpt(), model=weights)
        return load_nanogpt(path).crc32
    weights = make_gpt().state_dict()
    assert crc32(weights) == crc32(dict(reversed(weights.items()))) == "64ab2a54"
    assert same_model(tmp_path, make_gpt())
    weights["transformer.ln_f.weight"][5] += 1e-3
    assert crc32(weights) != "64ab2a54"


@pytest.mark.parametrize("tie", [True, False])
def test_in_int8_each_weight_is_quantized_as_soon_as_it_is_read(tie, tmp_path, monkeypatch):
    model = make_gpt(tie_word_embeddings=tie)
    path = save_checkpoint(tmp_path, model)
    in_float32 = weakref.WeakSet()

    def quantize_and_note(weight):
        assert not in_float32, "one at a time"
        in_float32.add(weight)
        return quantize(weight)
    monkeypatch.setattr("sampling.checkpoints.checkpoint.quantize", quantize_and_note)
    found = load_nanogpt(path, torch.int8)
    assert found.crc32 == load_nanogpt(path).crc32
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 2 and "wpe" not in name:
            tensor = quantize(tensor)
        torch.testing.assert_close(found.state_dict[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [
    dict(bias=False),
    dict(n_embd=7, n_head=1, vocab_size=33, block_size=10),
    dict(n_embd=4, vocab_size=3),
    dict(n_embd=1, n_head=1, block_size=5, vocab_size=7),
])
def test_count_init_draws_equals_the_draws_of_the_initialisation(shape):
    model = make_gpt(**shape)
    torch.manual_seed(5)
    nanogpt.GPT(model.config)
    generator = torch.Generator().manual_seed(5)
    advance_mt19937(generator, count_init_draws(model.state_dict()))
    found = torch.empty(700).exponential_(generator=generator)
    assert torch.equal(found, torch.empty(700).exponential_())


# ---- files that load

def renamed(pattern, new):
    """A change of the names of weights."""
    return lambda weights: {re.sub(pattern, new, name): w for name, w in weights.items()}


def each(change):
    """A change of each of the weights."""
    return lambda weights: {name: change(w) for name, w in weights.items()}


def without(left_out):
    return lambda weights: {name: w for name, w in weights.items() if name != left_out}


MASKS = {f"transformer.h.0.attn.{name}": torch.ones(1, dtype=torch.uint8)
         for name in ("bias", "masked_bias")}
LAYER = r"(h\.\d\.)(mlp\.)?"
WEIGHTS = { # what a file may have instead of these weights
    "untied": dict,
    "masks": lambda weights: weights | MASKS,
    "wrapped-and-compiled": renamed("^", "_orig_mod.gpt.model."),
    "layers-compiled": renamed(LAYER, r"module.\1\2_orig_mod."),
    "layers-in-fsdp": renamed(LAYER, r"_fsdp_wrapped_module.\1_checkpoint_wrapped_module.\2"),
    "without-transformer": renamed(r"^transformer\.", ""),
    "head-in-float64": lambda weights: weights | {HEAD: weights[HEAD].double()},
    "no-head": without(HEAD),
    "no-embedding": without(EMBEDDING),
    "views-of-one-record": each(lambda weight: torch.stack([weight, weight])[1]),
    "parameters": each(torch.nn.Parameter),
    "on-a-tpu": each(OnTPU),
    "a-subclass-of-dict": Mapping,
    "float16": each(torch.Tensor.half),
    "bfloat16": each(torch.Tensor.bfloat16),
}
# No such part.
OFF = {"rope": False, "n_kv_head": None, "moe": "", "qk_norm": 0, "parallel_attn": False,
       "bidirectional": False}
NO_ARITHMETIC = {"flash": True, "device": torch.device("cuda"), "dtype": torch.float16}
NUMPY = {"n_embd": np.int64(24), "dropout": np.float64(0), "bias": np.bool_(True)}
ENTRIES = { # what a file may have instead of these entries, and beside them
    "fields-that-are-off-or-change-no-arithmetic": {"model_args": SHAPE | OFF | NO_ARITHMETIC},
    "numpy-numbers": {"model_args": SHAPE | NUMPY},
    "model_args-with-slots": {"model_args": Slots(**SHAPE)},
    "model_args-of-a-subclass": {"model_args": Mapping(SHAPE)},
    "config-that-cannot-be-read": {"config": Namespace},
    "a-long-text": {"train_data": "a" * 2**23},
    "many-numbers": {"losses": [i / 7 for i in range(100_000)]},
    "collections": {"values": [
        {(1, 2): 3, (b"a", None): 4}, {Namespace: 2}, collections.Counter("aab"),
        collections.defaultdict(list, a=[1]), collections.deque([1.0, 2.0], maxlen=5),
        {"a", ("b", 1)}, frozenset([1]),
    ]},
    "objects": {"values": [
        random.getstate(), np.random.get_state(), np.random.default_rng(1), np.longdouble(1), 1j,
        Namespace(lr=1), pathlib.Path("a/b"), partial(print, 1), torch.nn.Linear(1, 1),
        math.sqrt, Namespace().__init__, Namespace, int, torch.optim.SGD,
    ]},
    "tensors": {"values": [
        torch.get_rng_state(), torch.ones(1, dtype=torch.uint16), torch.eye(2).to_sparse(),
        torch._neg_view(torch.ones(2)), torch.float8_e5m2, torch.Size([2]),
    ]},
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("form", [*WEIGHTS, *ENTRIES])
@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_forms_of_checkpoints_load(form, protocol, tmp_path, monkeypatch):
    model = make_gpt(tie_word_embeddings=form != "untied")
    model.half().bfloat16().float() # numbers that each dtype has
    entries = {"model": model.state_dict()} | ENTRIES.get(form, {})
    if form in WEIGHTS:
        entries["model"] = WEIGHTS[form](entries["model"])
    monkeypatch.setattr(torch, "save", partial(torch.save, pickle_protocol=protocol))
    assert same_model(save_checkpoint(tmp_path, model, **entries), model)


def test_a_checkpoint_without_layers_loads(tmp_path):
    save_checkpoint(tmp_path, make_gpt(n_layer=0))
    assert same_model(tmp_path, make_gpt(n_layer=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_head_that_differs_counts_for_the_embedding_too_as_in_nanogpt(dtype, tmp_path, messages):
    model = make_gpt()
    weights = dict(reversed(model.state_dict().items()))
    tied = load_nanogpt(save_checkpoint(tmp_path / "tied", model, model=weights), dtype)
    weights[EMBEDDING] = weights[HEAD] / 2
    found = load_nanogpt(save_checkpoint(tmp_path, model, model=weights), dtype)
    assert messages[1].startswith(f"{tmp_path}/ckpt.pt: its lm_head.weight and transformer.wte")
    assert found.crc32 == tied.crc32
    assert found.num_init_draws == tied.num_init_draws == count_init_draws(model.state_dict())
    assert found.config == model.config
    torch.testing.assert_close(found.state_dict, tied.state_dict, rtol=0, atol=0)


@pytest.mark.parametrize("model_key", ["model_state_dict", "state_dict"])
@pytest.mark.parametrize("key, config, gelu", [
    ("config", SIZES, "tanh"),
    ("model_args", GPTConfig(**SIZES), "tanh"),
    ("config", GPTConfig(**SHAPE), "none"), # nanoGPT's fields
    ("model_args", Namespace(**SIZES), "none"),
])
def test_build_nanogpts_files_load_with_its_form_of_gelu(
        key, config, gelu, model_key, tmp_path):
    model = make_gpt(gelu=gelu)
    path = tmp_path / "model_19072.pt"
    facts = {"step": 19072, "val_loss": 3.05}
    torch.save({model_key: model.state_dict(), key: config, **facts}, path)
    checkpoint = load_nanogpt(path)
    assert checkpoint.iter_num == 19072
    assert checkpoint.val_loss == 3.05
    assert same_model(path, model)


# ---- files that are refused

def test_the_advice_for_tensors_without_sizes_works(tmp_path):
    model = make_gpt(gelu="tanh")
    path = tmp_path / "model.safetensors" # whatever its format is
    torch.save(model.state_dict(), path)
    error = error_for(f"out_dir={path}")
    assert re.search(r"it lacks model, and holds .*; docs/usage\.md", error)
    assert len(error) <= 300 + len(str(path))
    usage = (PROJECT / "docs/usage.md").read_text()
    command, = re.findall(r"`(torch\.save\([^`]*)`", usage)
    command = command.replace("ckpt.pt", str(tmp_path / "ckpt.pt"))
    command = command.replace("model_args", "config")
    for name in SIZES:
        command = command.replace(f"{name}=?", f"{name}={SHAPE[name]}")
    exec(command, {"torch": torch, "state_dict": model.state_dict()})
    assert same_model(tmp_path, model)


def assert_refused(path, message):
    error = error_for(f"out_dir={path}")
    assert str(path) in error
    assert message in error


@pytest.mark.parametrize("content, message", [
    (b"GGUF" + bytes(4000), "it is not a checkpoint: neither torch.save nor safetensors wrote it"),
    (b"version https://git-lfs.github.com/spec/v1\n", "only a pointer of Git LFS"),
    # From before torch 1.6.
    (b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
     "torch.save(torch.load(path, weights_only=True), path)"),
    (b"", "it is empty"),
    (bytes(4000), "it holds only zeros"),
])
def test_a_file_of_another_program_is_refused(content, message, tmp_path):
    path = tmp_path / "ckpt.pt"
    write_settled(path, content)
    assert_refused(path, message)


ONES = torch.ones(2)
ONE = {"a": ONES}
REFUSED = [
    ({"epoch": 9, "state_dict": ONE},
     "it lacks block_size, n_embd, n_head, n_layer, vocab_size in model_args or config, and holds"),
    ({"epoch": 9}, "it lacks model, and holds 'epoch'; docs/usage.md"),
    ({"model": {}, "config": {"n_layer": 2, "learning_rate": 1}},
     "lacks block_size, n_embd, n_head, vocab_size in model_args or config, and holds 'model', 'c"),
    ({"model": {}, "config": DictConfig(**SHAPE)}, "OmegaConf.to_container(checkpoint['config'])"),
]
REFUSED_MODELS = [ # model, model_args, a part of the line
    ({"a": ONES.to(torch.int8)}, {}, "only dense floating point"),
    ({"a": torch._neg_view(ONES)}, {}, "'a': a tensor whose metadata changes its values"),
    ({"module.h.x": ONES, "h._orig_mod.x": ONES}, {},
     "two of its tensors are called 'transformer.h.x'"),
    (ONE, {"n_embd": 4, "n_layer": 1},
     "its model_args, of the type dict, lacks block_size, n_head, vocab_size; docs/usage.md says"),
    (ONE, print, "with fields, got __builtin__.print"),
    (ONE, {"rope": True, "norm": "rms", "gelu": "tanh"},
     "its model_args has fields that may make it another model than nanoGPT's: norm='rms', "
     "rope=True;"),
    (ONE, Namespace(n_layer=2, n_embd=4),
     "its model_args, of the type argparse.Namespace, lacks block_size, n_head, vocab_size"),
    (ONE, {"n_layer": [1, 2]}, "numbers and text, got n_layer: list"),
    (ONE, {"n_head": 5}, "n_head must divide n_embd; got 5 and 24"),
    (ONE, {"n_layer": True}, "n_layer must be a whole number, at least 0"),
    (ONE, {"dropout": math.nan}, "dropout must be a number between 0 and 1;"),
    (ONE, {"layer_norm_epsilon": True}, "layer_norm_epsilon must be a number between 0 and 1;"),
    (ONE, {"gelu": "relu"}, "gelu must be 'none' or 'tanh'; got 'relu'"),
    (ONE, {"gelu": None}, "gelu must be 'none' or 'tanh'; got None"),
    (make_gpt().state_dict(), SHAPE | {"n_inner": 4},
     "do not fit the model with n_inner=4, the width of its MLP, ("),
]
for field in [{"use_gelu": False}, {"act_fn": None}, {"is_causal": 0}, {"use_residual": False},
              {"pre_ln": False}, {"layerNorm": ""}, {"tie_weights": False}, {"pos_emb": None},
              {"scale_attn": 0}, {"use_mlp": False}]: # nanoGPT has these on
    text, = (f"{name}={value!r};" for name, value in field.items())
    REFUSED_MODELS.append((ONE, field, text))
for model, args, message in REFUSED_MODELS:
    if isinstance(args, dict) and "lacks" not in message:
        args = SIZES | args
    REFUSED.append(({"model": model, "model_args": args}, message))


@pytest.mark.parametrize("content, message", REFUSED)
def test_a_checkpoint_of_no_gpt_is_refused(content, message, tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save(content, path)
    assert_refused(path, message)


def test_a_save_that_no_model_py_can_load_gets_no_advice_to_pass_one(tmp_path):
    names = "the state_dict() of a module, the full_tensor() of a DTensor, nothing quantized"
    for model, found in [
            (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
            ({"a": Namespace()}, "'a': argparse.Namespace"), # such as a DTensor
            ({"_packed_params.dtype": torch.qint8}, "'_packed_params.dtype': torch.qint8")]:
        path = tmp_path / "ckpt.pt"
        torch.save({"model": model, "model_args": SHAPE}, path)
        error = error_for(f"out_dir={path}")
        assert f"({names}), but holds {found}" in error
        assert "--model_file" not in error
