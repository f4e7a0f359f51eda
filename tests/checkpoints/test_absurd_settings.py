"""model_args and config.json with values that no model can have are refused."""
import json

import pytest

from attacks import needs_linux
from models import SHAPE, make_gpt, save_checkpoint

pytest_plugins = ["attacks"]
pytestmark = needs_linux

ABSURD = {
    "huge": 10**30, "long": 10**600, "negative": -1, "zero": 0, "float": 2.0, "text": "12", "long-text": "9" * 10**6, "escape-codes": "\x1b[31m\n\x07", "list": [12], "dict": {"a": 1}, "true": True,
    "large": 2**31 - 1, "infinite": float("inf"), "nan": float("nan"), "none": None, "surrogate": "\ud800",
}
ORDINARY = {"negative", "zero", "float", "text", "true", "list", "dict"} # quick tests of GPTConfig have them, as they need no limited process
ALLOWED = {("dropout", "zero"), ("dropout", "true"), ("bias", "true"), ("layer_norm_epsilon", "zero"), ("layer_norm_epsilon", "true"), ("n_inner", "none")}


def absurd_settings(names):
    """Every absurd value for every setting. The quick cases are each value that is not ORDINARY once, with alternating settings."""
    return [pytest.param(name, absurd, id=f"{name}-{absurd}", marks=() if j % len(names) == i and absurd not in ORDINARY else pytest.mark.slow)
            for i, name in enumerate(names) for j, absurd in enumerate(ABSURD) if (name, absurd) not in ALLOWED]


@pytest.mark.parametrize("name, absurd", [
    case for case in absurd_settings(["block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "gelu", "n_inner", "rope"])
    if case.values[1] != "none"]) # None means that the setting is not given
def test_absurd_model_args_are_refused(name, absurd, assert_refused, tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt(), model_args=SHAPE | {name: ABSURD[absurd]})
    assert_refused("out/ckpt.pt")


@pytest.mark.parametrize("name, absurd", absurd_settings(
    ["n_positions", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner", "layer_norm_epsilon", "activation_function", "model_type"]))
def test_absurd_config_json_is_refused(name, absurd, assert_refused, hf_copy):
    config = json.loads((hf_copy / "config.json").read_text())
    (hf_copy / "config.json").write_text(json.dumps(config | {name: ABSURD[absurd]}))
    assert_refused("out", "out")
