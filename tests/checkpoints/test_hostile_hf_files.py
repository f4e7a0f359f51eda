"""Hostile files in Hugging Face's format, and symbolic links in place of files, are refused."""
import json
import os
import struct

import pytest

from attacks import named_cases, needs_linux
from sampling.checkpoints.huggingface import load_gpt2

pytest_plugins = ["attacks"]
pytestmark = needs_linux


@pytest.mark.parametrize("content", [
    "[" * 10**6, '{"a":' * 10**6, '{"n_layer": ' + "9" * 10**6 + "}", '{"model_type": "gpt2", "n_layer": 1e999}', "null", "\0", '"\ud800"'.encode("utf-8", "surrogatepass"),
    b"\xff\xfe", "{" + " " * 2**25 + "}", '{"a": [' + "[]," * 10**7 + "1]}", '{"model_type": "\\u001b[31m\\u0007"}',
], ids=["deep-lists", "deep-dicts", "a-million-digits", "infinite", "null", "nul", "surrogate", "utf-16", "long", "many-lists", "escape-codes"])
def test_hostile_json_is_refused(content, assert_refused, hf_copy):
    (hf_copy / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    assert_refused("out", "out")


# ---- safetensors

def safetensors_file(header, data=b"", length=None):
    """A safetensors file. length replaces the header length that the file states."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def test_a_long_header_is_not_read(assert_refused, hf_copy):
    header = {f"{i:0100}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(60_000)}
    (hf_copy / "model.safetensors").write_bytes(safetensors_file(header))
    assert_refused("a header of", "out")


def one_tensor(**changes):
    """The header of a file with one tensor."""
    return {"transformer.wpe.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


SAFETENSORS = {
    "header-of-all": safetensors_file(one_tensor(), bytes(4), 2**63), "header-of-terabytes": safetensors_file(one_tensor(), bytes(4), 2**40),
    "short-header": safetensors_file(one_tensor(), bytes(4), 5), "no-header": safetensors_file(b"", b"", 0),
    "terabytes": safetensors_file(one_tensor(shape=[2**40], data_offsets=[0, 2**42]), bytes(4)),
    "overflowing": safetensors_file(one_tensor(shape=[2**62, 4]), bytes(4)), "too-large": safetensors_file(one_tensor(shape=[2]), bytes(4)),
    "a-hole": safetensors_file(one_tensor(data_offsets=[4, 8]), bytes(8)), "backwards": safetensors_file(one_tensor(data_offsets=[4, 0]), bytes(4)),
    "negative-offset": safetensors_file(one_tensor(data_offsets=[-4, 0]), bytes(4)),
    "negative-size": safetensors_file(one_tensor(shape=[-1]), bytes(4)), "no-type": safetensors_file(one_tensor(dtype="F31"), bytes(4)),
    "integers": safetensors_file(one_tensor(dtype="I32"), bytes(4)),
    "empty-of-terabytes": safetensors_file(one_tensor(shape=[0, 2**62], data_offsets=[0, 0])),
    "overlapping": safetensors_file({f"x{i}": one_tensor()["transformer.wpe.weight"] for i in range(1000)}, bytes(4)),
    "deep": safetensors_file(b"[" * 10**6), "too-long": safetensors_file(one_tensor(), bytes(5)), "cut": safetensors_file(one_tensor(), b""),
    "escape-codes": safetensors_file({"\x1b[31m\n\r" * 10**5: one_tensor()["transformer.wpe.weight"]}, bytes(4)), "nothing": safetensors_file({}),
    "odd-metadata": safetensors_file({"__metadata__": {"x": 1}}), "empty": b"",
}


@pytest.mark.parametrize("content", named_cases(SAFETENSORS, quick=[
    "header-of-all", "short-header", "terabytes", "overflowing", "backwards", "negative-size", "no-type", "empty-of-terabytes", "deep", "escape-codes", "empty"]))
def test_invalid_safetensors_are_refused(content, assert_refused, hf_copy):
    (hf_copy / "model.safetensors").write_bytes(content)
    assert_refused("out", "out")


# ---- paths

@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\0b", "\x1b[31m", "x" * 10**5, 5, None, ["x"], "nowhere.safetensors"],
                         ids=lambda name: repr(name)[:20])
def test_an_index_may_only_name_files_in_its_folder(name, hf_copy):
    (hf_copy / "sub").mkdir()
    for copy in hf_copy / "sub" / "x.safetensors", hf_copy.parent / "x.safetensors":
        copy.write_bytes((hf_copy / "model.safetensors").read_bytes())
    (hf_copy / "model.safetensors").unlink()
    (hf_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="must name files in its own folder"):
        load_gpt2(str(hf_copy))


@pytest.mark.parametrize("name, target", [
    pytest.param(name, target, marks=() if i == j % 4 or target == "/etc/passwd" else pytest.mark.slow)
    for i, name in enumerate(["config.json", "model.safetensors", "ckpt.pt", "meta.pkl"])
    for j, target in enumerate(["/dev/zero", "/dev/tty", "fifo", "folder", "nowhere", "/etc/passwd"])])
def test_links_to_other_files_are_refused_and_their_content_is_not_printed(name, target, assert_refused, hf_copy, valid_checkpoint):
    os.mkfifo(hf_copy / "fifo")
    (hf_copy / "folder").mkdir()
    resume = name in ("ckpt.pt", "meta.pkl")
    if resume:
        (hf_copy / "ckpt.pt").write_bytes(valid_checkpoint)
    (hf_copy / name).unlink(missing_ok=True)
    (hf_copy / name).symlink_to(target)
    assert_refused("", "resume" if resume else "out")
    assert "root" not in (hf_copy.parent / "stderr").read_text()


