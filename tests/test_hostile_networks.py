"""Tensors, settings of networks and names of files that somebody made to do harm."""
import json
import os
import pickle
import struct

import pytest
import torch

from attacks import TUPLES, call, needs_linux, nested, place, poison, tensor, value
from conftest import SHAPE, make_gpt, save_checkpoint, save_meta

pytest_plugins = ["attacks"]
pytestmark = needs_linux

# ---- tensors

WIDE = (2**25, 24) # of float32: 3.2 gigabytes
TENSORS = {
    "beyond-its-storage": tensor((99, 99), (99, 1)), "beyond-by-one": tensor((61 * 24 + 1,)), "beyond-by-an-offset": tensor((1,), (1,), 61 * 24),
    "beyond-by-a-stride": tensor((2,), (2**40,)), "storage-of-terabytes": tensor((2**40,), count=2**40), "storage-of-all": tensor((2**62, 2), count=2**63),
    "negative-offset": tensor((1,), (1,), -1), "negative-stride": tensor((2,), (-1,), 1), "negative-size": tensor((-1,)),
    "negative-storage": tensor((1,), count=-1), "overflowing-size": tensor((2**62, 4), (0, 0)), "overflowing-stride": tensor((2, 2), (2**63, 2**63)),
    "overflowing-offset": tensor((1,), (1,), 2**64), "expanded": tensor(WIDE, (0, 0)), "expanded-to-terabytes": tensor((2**31 - 1, 2**20), (0, 0)),
    "empty-of-terabytes": tensor((0, 2**62, 2**62), (1, 1, 1)), "no-strides": tensor((1, 1), (1,)), "1000-dimensions": tensor((1,) * 1000),
    "many-dimensions": tensor((1,) * 10**5), "text-as-size": tensor(value("abc"), (1,)), "nested-size": tensor(nested(TUPLES), (1,)),
    "floats-as-size": tensor(value((1.0,)), (1,)), "no-such-storage": tensor((1,), key="nowhere"), "storage-outside": tensor((1,), key="../../../etc/passwd"),
    "escape-codes-as-storage": tensor((1,), key="\x1b[31m\n\r"), "number-as-storage": tensor((1,), key=0), "no-storage-type": tensor((1,), kind="torch strided"),
    "nested-storage": call("torch._utils _rebuild_tensor_v2", b"(" + value("storage") + b"ctorch\nFloatStorage\n" + nested(TUPLES) + value("cpu") + b"K\x01tQ", b"K\x00", b")", b")"),
    "pickle-as-storage": tensor((9,), key="../data.pkl"), "wider-type": call("torch._utils _rebuild_tensor_v3", b"(" + value("storage") + b"ctorch.storage\nUntypedStorage\n"
        + value("0") + value("cpu") + value(10**6) + b"tQ", b"K\x00", value((10**6,)), value((1,)), value(False), b"N", b"ctorch\nfloat64\n"),
    "no-such-type": call("torch._utils _rebuild_tensor_v3", b"(" + value("storage") + b"ctorch.storage\nUntypedStorage\n" + value("0") + value("cpu") + b"K\x01tQ",
                         b"K\x00", value((1,)), value((1,)), value(False), b"N", value("float32")),
    "sparse": call("torch._utils _rebuild_sparse_tensor", b"N", b"(" + tensor((1, 1)) + tensor((1,)) + value((2**40,)) + b"t"),
    "on-no-device": call("torch._utils _rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", value((2**40,)), value((1,)), value(False)),
    "complex": tensor((1,), kind="torch ComplexFloatStorage"), "text": value("tensor"), "itself": b"]q\x07(h\x07e",
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_impossible_or_too_large_are_refused(name, zipped, refused, good, tmp_path):
    piece = TENSORS[name]
    model = b"}" + value("transformer.wpe.weight") + piece + b"s"
    args = value(SHAPE | {"block_size": 2**25})
    place("ckpt.pt", b"N", tmp_path, good)
    if zipped:
        content = poison(good, "model", model + value("model_args") + args)
    else:
        start = b"".join(pickle.dumps(part, 2) for part in (0x1950a86a20f9469cfc6c, 1001, {}))
        keys = ["0"] if b"Q" in piece else []
        content = start + b"\x80\x02}(" + value("model") + model.replace(b"tQ", b"NtQ") + value("model_args") + args + b"u." + pickle.dumps(keys, 2) + struct.pack("<qf", 1, 1.0)
    (tmp_path / "out" / "ckpt.pt").write_bytes(content)
    refused("claims tensors of" if name.startswith("expanded") else "out/ckpt.pt")


@pytest.mark.parametrize("size, stride", [((2**30 + 1,), (1,)), ((2**20, 2**10 + 1), (2**10, 1)), ((2,), (2**30,))])
def test_an_old_storage_is_not_made_longer(size, stride, refused, good, tmp_path):
    """As torch would, and copy it."""
    piece = tensor(size, stride, count=2**30, kind="torch ByteStorage").replace(b"tQ", b"NtQ")
    refused("reaches beyond what is stored", *place("old ckpt.pt", b"}" + value("model") + b"}" + value("a") + piece + b"ss", tmp_path, good))


def test_many_shards_take_no_longer_than_one(refused, good, hub_copy):
    (hub_copy / "model.safetensors").unlink()
    (hub_copy / "0.bin").write_bytes(poison(good, "x", b"](" + b"c__builtin__\nset\n)R" * 60_000 + b"e"))
    for i in range(1, 20):
        (hub_copy / f"{i}.bin").hardlink_to(hub_copy / "0.bin")
    (hub_copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {str(i): f"{i}.bin" for i in range(20)}}))
    refused("far more memory or time", "out", "")


@pytest.mark.parametrize("change", [
    {"transformer.wpe.weight": torch.ones(1, 1).expand(WIDE)},
    {"lm_head.weight": torch.ones(1, 1, dtype=torch.half).expand(WIDE), "transformer.wte.weight": torch.ones(1, 1, dtype=torch.half).expand(WIDE)},
    {f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)},
], ids=["expanded", "expanded-twice", "one-storage-under-many-names"])
def test_a_network_larger_than_its_file_is_refused(change, refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | change, optimizer=None)
    refused("claims tensors of")


def test_a_large_storage_under_many_names_is_summed_once(refused, tmp_path):
    model, large = make_gpt(), torch.zeros(2**23)
    views = {f"transformer.h.0.x{i}": large[i:i + 1] for i in range(6000)}
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | views, optimizer=None)
    refused("unexpected: transformer.h.0.x0")


def test_a_network_of_too_many_layers_is_refused(refused, tmp_path):
    """Each takes a millisecond to build."""
    model, one = make_gpt(), torch.ones(1)
    layers = {f"transformer.h.{i}.x": one for i in range(5000)}
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | layers, model_args=SHAPE | {"n_layer": 5000}, optimizer=None)
    refused("layers")


# ---- settings of networks

ABSURD = {
    "huge": 10**30, "long": 10**600, "negative": -1, "zero": 0, "float": 2.0, "text": "12", "long-text": "9" * 10**6, "escape-codes": "\x1b[31m\n\x07", "list": [12], "dict": {"a": 1}, "true": True,
    "large": 2**31 - 1, "infinite": float("inf"), "nan": float("nan"), "none": None, "surrogate": "\ud800",
}
MAY_BE = {("dropout", "zero"), ("dropout", "true"), ("bias", "true"), ("layer_norm_epsilon", "zero"), ("layer_norm_epsilon", "true"), ("n_inner", "none")}


@pytest.mark.parametrize("name, absurd", [
    (name, absurd) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "gelu", "n_inner", "rope") for absurd in ABSURD
    if (name, absurd) not in MAY_BE and absurd != "none"])
def test_absurd_model_args_are_refused(name, absurd, refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), model_args=SHAPE | {name: ABSURD[absurd]})
    refused("out/ckpt.pt")


@pytest.mark.parametrize("name, absurd", [
    (name, absurd) for name in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner", "layer_norm_epsilon", "activation_function", "model_type")
    for absurd in ABSURD if (name, absurd) not in MAY_BE])
def test_absurd_config_json_is_refused(name, absurd, refused, hub_copy):
    config = json.loads((hub_copy / "config.json").read_text())
    (hub_copy / "config.json").write_text(json.dumps(config | {name: ABSURD[absurd]}))
    refused("out", "out", "")


@pytest.mark.parametrize("content", [
    "[" * 10**6, '{"a":' * 10**6, '{"n_layer": ' + "9" * 10**6 + "}", '{"model_type": "gpt2", "n_layer": 1e999}', "null", "\0", '"\ud800"'.encode("utf-8", "surrogatepass"),
    b"\xff\xfe", "{" + " " * 2**25 + "}", '{"a": [' + "[]," * 10**7 + "1]}", '{"model_type": "\\u001b[31m\\u0007"}',
], ids=["deep-lists", "deep-dicts", "a-million-digits", "infinite", "null", "nul", "surrogate", "utf-16", "long", "many-lists", "escape-codes"])
def test_hostile_json_is_refused(content, refused, hub_copy):
    (hub_copy / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    refused("out", "out", "")


# ---- safetensors

def safetensors_file(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def test_a_long_header_is_not_read(refused, hub_copy):
    header = {f"{i:0100}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(60_000)}
    (hub_copy / "model.safetensors").write_bytes(safetensors_file(header))
    refused("a header of", "out", "")


def one_tensor(**changes):
    return {"transformer.wpe.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize("content", [
    safetensors_file(one_tensor(), bytes(4), 2**63), safetensors_file(one_tensor(), bytes(4), 2**40), safetensors_file(one_tensor(), bytes(4), 5), safetensors_file(b"", b"", 0),
    safetensors_file(one_tensor(shape=[2**40], data_offsets=[0, 2**42]), bytes(4)), safetensors_file(one_tensor(shape=[2**62, 4]), bytes(4)),
    safetensors_file(one_tensor(shape=[2]), bytes(4)), safetensors_file(one_tensor(data_offsets=[4, 8]), bytes(8)), safetensors_file(one_tensor(data_offsets=[4, 0]), bytes(4)),
    safetensors_file(one_tensor(data_offsets=[-4, 0]), bytes(4)), safetensors_file(one_tensor(shape=[-1]), bytes(4)), safetensors_file(one_tensor(dtype="F31"), bytes(4)),
    safetensors_file(one_tensor(dtype="I32"), bytes(4)), safetensors_file(one_tensor(shape=[0, 2**62], data_offsets=[0, 0])),
    safetensors_file({f"x{i}": one_tensor()["transformer.wpe.weight"] for i in range(1000)}, bytes(4)), safetensors_file(b"[" * 10**6), safetensors_file(one_tensor(), bytes(5)),
    safetensors_file(one_tensor(), b""), safetensors_file({"\x1b[31m\n\r" * 10**5: one_tensor()["transformer.wpe.weight"]}, bytes(4)), safetensors_file({}),
    safetensors_file({"__metadata__": {"x": 1}}), b"",
], ids=["header-of-all", "header-of-terabytes", "short-header", "no-header", "terabytes", "overflowing", "too-large", "a-hole", "backwards", "negative-offset", "negative-size",
        "no-type", "integers", "empty-of-terabytes", "overlapping", "deep", "too-long", "cut", "escape-codes", "nothing", "odd-metadata", "empty"])
def test_safetensors_that_lie_are_refused(content, refused, hub_copy):
    (hub_copy / "model.safetensors").write_bytes(content)
    refused("out", "out", "")


# ---- paths

@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\0b", "\x1b[31m", "x" * 10**5, 5, None, ["x"], "nowhere.safetensors"],
                         ids=lambda name: repr(name)[:20])
def test_an_index_names_files_of_its_folder_only(name, refused, hub_copy):
    (hub_copy / "sub").mkdir()
    for copy in hub_copy / "sub" / "x.safetensors", hub_copy.parent / "x.safetensors":
        copy.write_bytes((hub_copy / "model.safetensors").read_bytes())
    (hub_copy / "model.safetensors").unlink()
    (hub_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    refused("must name files of its own folder", "out", "")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "ckpt.pt", "meta.pkl"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/tty", "fifo", "folder", "nowhere", "/etc/passwd"])
def test_links_to_what_is_no_file_are_not_read(name, target, refused, hub_copy, good):
    os.mkfifo(hub_copy / "fifo")
    (hub_copy / "folder").mkdir()
    resume = name in ("ckpt.pt", "meta.pkl")
    if resume:
        (hub_copy / "ckpt.pt").write_bytes(good)
    (hub_copy / name).unlink(missing_ok=True)
    (hub_copy / name).symlink_to(target)
    refused("", *() if resume else ("out", ""))
    assert "root" not in (hub_copy.parent / "stderr").read_text()


@pytest.mark.parametrize("dataset", ["../elsewhere", "x/../../elsewhere", "absolute"])
def test_a_table_outside_of_data_is_refused(dataset, refused, tmp_path):
    dataset = str(tmp_path / "elsewhere") if dataset == "absolute" else dataset
    save_meta(tmp_path / "elsewhere" / "meta.pkl")
    (tmp_path / "data" / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / "out", make_gpt(), meta=False, config={"dataset": dataset})
    refused("outside of data/")


@pytest.mark.parametrize("dataset", ["a\0b", "\x1b[31m", "x" * 10**6, 5, ["x"], "", "."], ids=lambda name: repr(name)[:20])
def test_a_data_set_with_an_odd_name_has_no_table(dataset, refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), meta=False, config={"dataset": dataset})
    refused("GPT-2's encoding has 50257 tokens and the network 61")


@pytest.mark.parametrize("tensors", [{"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, {"\N{RIGHT-TO-LEFT OVERRIDE}x" * 10**5: torch.ones(1)}], ids=["escape-codes", "long"])
def test_names_of_tensors_move_no_cursor(tensors, refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | tensors)
    refused("out/ckpt.pt")
