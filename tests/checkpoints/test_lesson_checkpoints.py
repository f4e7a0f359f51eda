"""Checkpoints of build-nanogpt, the GPT-2 lesson: model, config, step and val_loss in one file."""
import dataclasses
import pickle
import subprocess
import sys
import types

import pytest
import torch

from attacks import needs_linux, poison, write_checkpoint
from models import SHAPE, make_gpt, same_model
from pickle_code import call, tensor, value
from sampling.checkpoints.build import build_gpt
from sampling.checkpoints.init_draws import count_init_draws
from sampling.checkpoints.nanogpt import load_checkpoint
from sampling.checkpoints.pickle_scanner import MAX_PICKLE_STEPS

pytest_plugins = ["attacks"]

FIELDS = "block_size", "vocab_size", "n_layer", "n_head", "n_embd"
SIZES = {name: SHAPE[name] for name in FIELDS}
LESSON = '''
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
'''


@pytest.fixture
def lesson(monkeypatch):
    """The module train_gpt2, whose GPTConfig a file names."""
    module = types.ModuleType("train_gpt2")
    exec(LESSON, vars(module))
    monkeypatch.setitem(sys.modules, "train_gpt2", module)
    return module


def save_lesson(folder, model, /, config, name="model_19072.pt", **changes):
    """Write what the lesson's training loop writes. Changes replace entries; None leaves one out."""
    entries = {"model": model.state_dict(), "config": config, "step": 19072, "val_loss": 3.05, **changes}
    folder.mkdir(exist_ok=True)
    torch.save({key: entry for key, entry in entries.items() if entry is not None}, folder / name)
    return folder / name


def tanh_gpt():
    """A model whose samples the form of the GELU changes."""
    model = make_gpt(gelu="tanh")
    with torch.no_grad():
        idx = torch.arange(16)[None]
        assert not torch.equal(model(idx, idx)[0], make_gpt()(idx, idx)[0])
    return model


# ---- what loads

def test_the_lessons_file(lesson, tmp_path):
    model = tanh_gpt()
    path = save_lesson(tmp_path / "log", model, lesson.GPTConfig(**SIZES))
    assert b"train_gpt2\nGPTConfig" in path.read_bytes()
    assert same_model(path, model)


@pytest.mark.slow
def test_a_file_whose_config_is_of_main(tmp_path):
    model = tanh_gpt()
    torch.save(model.state_dict(), tmp_path / "weights")
    script = LESSON + f'''
torch.save({{"model": torch.load("weights"), "config": GPTConfig(**{SIZES}), "step": 1, "val_loss": 3.0}}, "model_00001.pt")
'''
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    assert b"__main__\nGPTConfig" in (tmp_path / "model_00001.pt").read_bytes()
    assert same_model(tmp_path / "model_00001.pt", model)


@pytest.mark.parametrize("change", [
    lambda model: {"config": dict(SIZES)},
    lambda model: {"model": None, "model_state_dict": model.state_dict()},
    lambda model: {"optimizer": torch.optim.AdamW(model.parameters()).state_dict(), "val_loss": torch.tensor(3.0)},
    lambda model: {"model": {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}},
    lambda model: {"model": model.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}},
    lambda model: {"config": dict(SIZES), "model": None, "model_state_dict": {
        f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}},
], ids=["dict", "model_state_dict", "optimizer", "compiled", "mask-buffer", "all-together"])
def test_variants_of_the_file_load(change, lesson, tmp_path):
    model = tanh_gpt()
    path = save_lesson(tmp_path, model, **{"config": lesson.GPTConfig(**SIZES)} | change(model))
    assert same_model(path, model)


def test_an_old_file_that_is_no_zip(lesson, tmp_path):
    model, path = tanh_gpt(), tmp_path / "model_00001.pt"
    content = {"model": model.state_dict(), "config": lesson.GPTConfig(**SIZES)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert same_model(path, model)


def test_out_dir_may_be_the_folder_if_the_file_is_its_ckpt_pt(lesson, tmp_path):
    model = tanh_gpt()
    save_lesson(tmp_path / "log", model, lesson.GPTConfig(**SIZES), name="ckpt.pt")
    assert same_model(tmp_path / "log", model)


@pytest.mark.parametrize("entry", ["config", "model_args"])
@pytest.mark.parametrize("as_dict", [True, False], ids=["dict", "GPTConfig"])
def test_nanogpts_own_gptconfig_keeps_the_exact_gelu(entry, as_dict, tmp_path, monkeypatch):
    module = types.ModuleType("model_of_nanogpt")
    module.GPTConfig = dataclasses.make_dataclass("GPTConfig", SHAPE)
    module.GPTConfig.__module__ = "model_of_nanogpt"
    monkeypatch.setitem(sys.modules, "model_of_nanogpt", module)
    model, config = make_gpt(), SHAPE if as_dict else module.GPTConfig(**SHAPE)
    assert same_model(save_lesson(tmp_path, model, **{"config": None, entry: config}), model)


@pytest.mark.parametrize("config", [SIZES | {"gelu": "none"}, SHAPE | {"gelu": "tanh"}], ids=["five-fields", "all-fields"])
def test_a_config_may_say_which_gelu(config, tmp_path):
    assert same_model(save_lesson(tmp_path, make_gpt(gelu=config["gelu"]), config), make_gpt(gelu=config["gelu"]))


def test_model_args_come_before_config(tmp_path):
    """nanoGPT's own files hold both: config is train.py's settings there."""
    model = make_gpt()
    assert same_model(save_lesson(tmp_path, model, config=SIZES | {"n_head": 1}, model_args=SHAPE), model)


def test_fields_of_a_build_nanogpt_checkpoint(lesson, tmp_path):
    model = make_gpt()
    checkpoint = load_checkpoint(save_lesson(tmp_path, model, lesson.GPTConfig(**SIZES)))
    assert checkpoint.model_args == SIZES | {"gelu": "tanh", "bias": True, "tie_word_embeddings": True}
    assert (checkpoint.dataset, checkpoint.vocab_size) == (None, SIZES["vocab_size"])
    assert checkpoint.num_init_draws == count_init_draws(model.state_dict())


# ---- what does not

@pytest.mark.parametrize("config, message", [
    ({name: SIZES[name] for name in FIELDS[1:]}, "must hold model and model_args"),
    (SIZES | {"rope": True, "n_kv_head": 1}, "has fields that a GPT does not have: n_kv_head, rope; if the model is a GPT, save only a GPT's fields"),
    (SIZES | {"n_head": [2]}, "numbers and text, got 'n_head': list"),
    (SIZES | {"n_head": 5}, "n_embd must be a multiple of n_head"),
    (SIZES | {"n_layer": 3}, "n_layer=3 but holds tensors of 2 layers"),
], ids=["no-block_size", "other-fields", "a-list", "wrong-n_head", "wrong-n_layer"])
def test_a_config_of_another_architecture_is_refused(config, message, tmp_path):
    path = save_lesson(tmp_path, make_gpt(), config)
    with pytest.raises(ValueError) as error:
        build_gpt(load_checkpoint(path))
    assert message in str(error.value) and str(path) in str(error.value)


def test_the_advice_for_other_fields_works(lesson, tmp_path):
    model = make_gpt(gelu="tanh")
    with pytest.raises(ValueError, match="fields that a GPT does not have: rope") as error:
        load_checkpoint(save_lesson(tmp_path, model, SIZES | {"rope": False, "gelu": "tanh"}))
    model.config.rope = False
    command = str(error.value).split("fields: ")[1].replace("ckpt.pt", str(tmp_path / "ckpt.pt"))
    exec(command, {"torch": torch, "model": model})
    assert same_model(tmp_path / "ckpt.pt", model)


@pytest.mark.parametrize("field", [{"n_layer": torch.ones(1)}, {"n_layer": [2]}, {"n_layer": {"a": 1}}, {"n_layer": torch.float32}],
                         ids=["tensor", "list", "dict", "dtype"])
def test_a_gptconfig_holds_flat_values(field, lesson, tmp_path):
    path = save_lesson(tmp_path, make_gpt(), lesson.GPTConfig(**SIZES | field))
    with pytest.raises(ValueError, match="its GPTConfig must hold numbers and text"):
        load_checkpoint(path)


CONFIG = b"ctrain_gpt2\nGPTConfig\n"
MAKE = CONFIG + b")\x81"
NAME, OBJECT, CALL, FIELDS_MESSAGE, MUCH = ("which could run code", "it creates an object that torch.save does not write", "it makes a call that torch.save does not write",
                                            "its GPTConfig must hold numbers and text by name", "its GPTConfig holds too much")
ATTACKS = {
    "with-arguments": (CONFIG + value((1,)) + b"\x81", OBJECT), "text-for-a-class": (value("train_gpt2 GPTConfig") + b")\x81", OBJECT),
    "another-class": (b"ccollections\nOrderedDict\n)\x81", OBJECT), "an-object-for-a-class": (MAKE + b")\x81", OBJECT),
    "called": (CONFIG + b")R", CALL), "called-with-a-tensor": (CONFIG + tensor((1,)) + b"\x85R", CALL),
    "a-class-of-python": (b"cbuiltins\nobject\n)\x81", NAME), "a-parameter": (b"ctorch.nn.parameter\nParameter\n)\x81", NAME),
    "an-attribute": (b"cos\npath.GPTConfig\n)\x81", NAME), "an-attribute-of-it": (b"ctrain_gpt2\nGPTConfig.x\n)\x81", NAME),
    "a-method-called": (call("train_gpt2 GPTConfig.__setstate__", value({})), NAME), "no-module": (b"c\nGPTConfig\n)\x81", NAME),
    "module-of-no-identifiers": (b"c../x\nGPTConfig\n)\x81", NAME), "escape-codes": (b"cx\x1b[31m\nGPTConfig\n)\x81", NAME),
    "long-module": (b"c" + b"x" * 10**6 + b"\nGPTConfig\n)\x81", NAME),
    "many-modules": (b"](" + b"".join(b"cm%d\nGPTConfig\n" % i for i in range(10)) + b"e", "it names too many different GPTConfigs"),
    "state-of-text": (MAKE + value("abc") + b"b", FIELDS_MESSAGE), "state-of-a-pair": (MAKE + value(("a", "b")) + b"b", FIELDS_MESSAGE),
    "state-of-a-list": (MAKE + value(["a"]) + b"b", FIELDS_MESSAGE), "keys-of-numbers": (MAKE + value({1: 1}) + b"b", FIELDS_MESSAGE),
    "a-record-in-a-record": (MAKE + b"}" + value("a") + MAKE + b"sb", FIELDS_MESSAGE), "a-class-as-a-value": (MAKE + b"}" + value("a") + CONFIG + b"sb", FIELDS_MESSAGE),
    "filled-twice": (MAKE + value({"n_layer": 1}) + b"b}" + value("__class__") + b"cbuiltins\nset\nsb", FIELDS_MESSAGE),
    "many-fields": (MAKE + value({f"x{i}": i for i in range(100)}) + b"b", MUCH), "long-text": (MAKE + value({"n_layer": "9" * 10**6}) + b"b", MUCH),
    "wide-integer": (MAKE + value({"n_layer": 10**600}) + b"b", MUCH), "as-a-key": (b"}" + MAKE + b"Ns", "it has keys that are neither text nor numbers"),
    "an-item-set": (MAKE + value("a") + b"K\1s", "cannot read out/ckpt.pt"), "state-of-the-class": (CONFIG + value({"a": 1}) + b"b", "it sets attributes"),
    "as-a-storage": (b"(" + value("storage") + CONFIG + value("0") + value("cpu") + b"K\x01tQ", "cannot read out/ckpt.pt"),
    "no-fields": (MAKE, "says n_layer=None"), "the-class": (CONFIG, "model_args in out/ckpt.pt must be a dict, got type"),
}
QUICK = {"with-arguments", "another-class", "called", "an-attribute", "module-of-no-identifiers", "many-modules", "state-of-a-pair", "many-fields",
         "a-record-in-a-record", "a-class-as-a-value", "no-fields"}


@needs_linux
@pytest.mark.parametrize("payload, message", [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
                                              for name, case in ATTACKS.items()])
def test_hostile_configs_are_refused(payload, message, assert_refused, valid_checkpoint, tmp_path):
    write_checkpoint(tmp_path, poison(valid_checkpoint, "model_args", payload))
    assert_refused(message)


@needs_linux
def test_many_configs_take_little_memory_and_time(assert_refused, valid_checkpoint, tmp_path):
    count = MAX_PICKLE_STEPS // 400
    pieces = b"](" + MAKE.replace(CONFIG, CONFIG + b"q\1") + (b"h\1)\x81" + value({f"x{i}": i for i in range(60)}) + b"b") * count + b"e"
    write_checkpoint(tmp_path, poison(valid_checkpoint, "model_args", pieces))
    assert_refused("out/ckpt.pt")


@needs_linux
def test_a_vocabulary_holds_no_config(assert_refused, valid_checkpoint, tmp_path):
    write_checkpoint(tmp_path, valid_checkpoint)
    (tmp_path / "out" / "meta.pkl").write_bytes(b"\x80\x04" + MAKE + value({"a": 1}) + b"b.")
    assert_refused("names train_gpt2.GPTConfig, which could run code")


def test_the_module_of_a_config_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("import os\nos.mkdir('ran')\nclass GPTConfig: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = types.ModuleType("evil_module")
    exec(LESSON, vars(module))
    monkeypatch.setitem(sys.modules, "evil_module", module)
    path = save_lesson(tmp_path, make_gpt(), module.GPTConfig(**SIZES))
    monkeypatch.delitem(sys.modules, "evil_module")
    assert load_checkpoint(path).model_args["n_layer"] == 2 and not (tmp_path / "ran").exists()
    pickle.loads(b"\x80\x02cevil_module\nGPTConfig\n.") # the attack itself works
    assert (tmp_path / "ran").exists()
