"""Hostile tensors are refused: impossible tensors, and tensors that claim more data than their file contains."""
import pickle
import struct

import pytest
import torch

from attacks import OLD_FILE_START, named_cases, needs_linux, poison, write_attack, write_checkpoint
from models import SHAPE, make_gpt, save_checkpoint
from pickle_code import TUPLES, call, nested, tensor, value
from sampling.checkpoints.pickle_scanner import check_pickle
from sampling.checkpoints.torch_files import ALLOWED_NAMES

pytest_plugins = ["attacks"]
pytestmark = needs_linux

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
    "complex": tensor((1,), kind="torch ComplexFloatStorage"), "text": value("tensor"), "itself": b"]q\0(h\0e",
}


PAST_THE_SCANNER = {"storage-of-terabytes", "storage-of-all", "overflowing-size", "expanded", "expanded-to-terabytes", "empty-of-terabytes",
                    "1000-dimensions", "many-dimensions", "wider-type", "no-such-type", "complex", "text"}


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in PAST_THE_SCANNER])
def test_the_scanner_refuses_it_before_torch_sees_it(name):
    with pytest.raises(ValueError):
        check_pickle(b"\x80\x02" + TENSORS[name] + b".", ALLOWED_NAMES)


@pytest.mark.parametrize("piece", named_cases(TENSORS, quick=PAST_THE_SCANNER - {"many-dimensions"}))
def test_impossible_tensors_are_refused(piece, assert_refused, valid_checkpoint, tmp_path):
    model = b"}" + value("transformer.wpe.weight") + piece + b"s"
    write_checkpoint(tmp_path, poison(valid_checkpoint, "model", model + value("model_args") + value(SHAPE | {"block_size": 2**25})))
    assert_refused(message_about(piece))


@pytest.mark.parametrize("piece", named_cases(TENSORS, quick={"storage-of-terabytes", "overflowing-size", "expanded", "1000-dimensions", "no-such-type"}))
def test_impossible_tensors_in_an_old_format_file_are_refused(piece, assert_refused, tmp_path):
    model = b"}" + value("transformer.wpe.weight") + piece.replace(b"tQ", b"NtQ") + b"s"
    content = b"\x80\x02}(" + value("model") + model + value("model_args") + value(SHAPE | {"block_size": 2**25}) + b"u."
    keys = ["0"] if b"Q" in piece else []
    write_checkpoint(tmp_path, OLD_FILE_START + content + pickle.dumps(keys, 2) + struct.pack("<qf", 1, 1.0))
    assert_refused(message_about(piece))


def message_about(piece):
    """The expected error message. An expanded tensor is possible, but too large."""
    return "claims tensors of" if piece in (TENSORS["expanded"], TENSORS["expanded-to-terabytes"]) else "out/ckpt.pt"


@pytest.mark.parametrize("size, stride", [((2**30 + 1,), (1,)), ((2**20, 2**10 + 1), (2**10, 1)), ((2,), (2**30,))])
def test_a_storage_of_an_old_format_file_is_not_enlarged(size, stride, assert_refused, valid_checkpoint, tmp_path):
    """torch.load would enlarge it, and copy it."""
    piece = tensor(size, stride, count=2**30, kind="torch ByteStorage").replace(b"tQ", b"NtQ")
    assert_refused("reaches beyond its storage", write_attack("old ckpt.pt", b"}" + value("model") + b"}" + value("a") + piece + b"ss", tmp_path, valid_checkpoint))


@pytest.mark.parametrize("change", [
    {"transformer.wpe.weight": torch.ones(1, 1).expand(WIDE)},
    {"lm_head.weight": torch.ones(1, 1, dtype=torch.half).expand(WIDE), "transformer.wte.weight": torch.ones(1, 1, dtype=torch.half).expand(WIDE)},
    {f"x{i}": view for i, view in enumerate([torch.ones(2**20)] * 1000)},
], ids=["expanded", "expanded-twice", "one-storage-under-many-names"])
def test_a_model_larger_than_its_file_is_refused(change, assert_refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | change, optimizer=None)
    assert_refused("claims tensors of")


@pytest.mark.parametrize("num_names", [1000, pytest.param(6000, marks=pytest.mark.slow)])
def test_the_checksum_of_a_storage_with_many_names_is_computed_once(num_names, assert_refused, tmp_path):
    model, large = make_gpt(), torch.zeros(2**24)
    views = {f"transformer.h.0.x{i}": large[i:i + 1] for i in range(num_names)}
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | views, optimizer=None)
    assert_refused("unexpected: transformer.h.0.x0")


def test_a_model_with_too_many_layers_is_refused(assert_refused, tmp_path):
    """Each layer takes a millisecond to build."""
    model, one = make_gpt(), torch.ones(1)
    layers = {f"transformer.h.{i}.x": one for i in range(5000)}
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | layers, model_args=SHAPE | {"n_layer": 5000}, optimizer=None)
    assert_refused("layers")


@pytest.mark.parametrize("tensors", [{"\x1b[31m\n\r\x07\x9b" * 9: torch.ones(1)}, {"\N{RIGHT-TO-LEFT OVERRIDE}x" * 10**5: torch.ones(1)}], ids=["escape-codes", "long"])
def test_control_characters_in_tensor_names_are_not_printed(tensors, assert_refused, tmp_path):
    model = make_gpt()
    save_checkpoint(tmp_path / "out", model, model=model.state_dict() | tensors)
    assert_refused("out/ckpt.pt")
