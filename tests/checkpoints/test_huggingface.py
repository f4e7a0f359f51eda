"""GPT-2 loaded from files in Hugging Face's format, compared with transformers."""
import json

import pytest
import torch

from attacks import write_settled
from model import GPT
from models import make_transformers_gpt2
from pickled_call import CreatesFile
from sampling.checkpoints.huggingface import load_gpt2


def same_as_transformers(folder, theirs):
    """Whether the model in this folder gives the same logits as theirs."""
    ours, idx = GPT.from_pretrained(str(folder)), torch.arange(40)[None]
    with torch.no_grad():
        return (ours(idx, idx)[0] - theirs(idx).logits).abs().max() < 1e-4


def test_safetensors_in_shards_load(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and same_as_transformers(tmp_path, theirs)


def test_pytorch_model_bin_loads_from_one_file_and_from_shards(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.config.save_pretrained(tmp_path)
    tensors = theirs.state_dict()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    shards = {f"pytorch_model-0000{i}-of-00002.bin": names[i::2] for i in range(2)}
    for shard, own_names in shards.items():
        torch.save({name: tensors[name] for name in own_names}, tmp_path / shard)
    index = json.dumps({"weight_map": {name: shard for shard, own_names in shards.items() for name in own_names}})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert same_as_transformers(tmp_path, theirs)


def test_tensor_names_without_the_prefix_and_mask_buffers_load(tmp_path):
    """The hub's gpt2 has such files."""
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.config.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()
               if name != "lm_head.weight"}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)


def test_half_precision_weights_load(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300).half()
    theirs.save_pretrained(tmp_path)
    assert same_as_transformers(tmp_path, theirs.float())


@pytest.mark.parametrize("changes", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False},
                                     {"activation_function": "gelu"}, {"n_inner": 40}, {"tie_word_embeddings": False}])
def test_settings_of_the_architecture_are_followed(changes, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300, **changes)
    theirs.save_pretrained(tmp_path)
    assert same_as_transformers(tmp_path, theirs)


def test_fields_of_a_hugging_face_checkpoint(tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    log = []
    checkpoint = load_gpt2(str(tmp_path), with_crc32=True, log=log.append)
    assert log == [f"{tmp_path}: loaded"] and len(checkpoint.crc32) == 8 and checkpoint.meta["model_type"] == "gpt2"
    assert (checkpoint.path, checkpoint.vocab_size) == (str(tmp_path), 300)
    assert (checkpoint.folder, checkpoint.dataset, checkpoint.is_huggingface) == (tmp_path, None, True)
    assert checkpoint.num_init_draws == 0, "transformers' users seed after the model is built"


def test_the_hub_cache_is_used_offline(tmp_path, monkeypatch):
    """A cache in huggingface_hub's layout, with a model that only has pytorch_model.bin."""
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
    with pytest.raises(ValueError, match=r"could not get 'someone/other'.*run 'hf download someone/other --local-dir"):
        load_gpt2("someone/other")


def test_an_invalid_model_id_is_refused():
    with pytest.raises(ValueError, match=r"^'no/such/model' is neither a folder here nor a Hugging Face id"):
        load_gpt2("no/such/model")


def replace(name, text):
    """A change of a folder: its weights make way for this file."""
    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).write_text(text)
    return change


@pytest.mark.parametrize("change, message", [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "must hold an object"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "model_type 'llama'; only gpt2"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2", "activation_function": "relu"}'),
     "activation_function 'relu'; supported are"),
    (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), "n_layer=12 but holds tensors of 2"),
    (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
    (lambda folder: write_settled(folder / "model.safetensors", b"\xff" * 50), "cannot read"),
    (lambda folder: [(folder / "model.safetensors").unlink(),
                     torch.save({"x": CreatesFile(folder / "ran")}, folder / "pytorch_model.bin")],
     "names posix.system, which could run code"),
    (replace("model.safetensors.index.json", '{"weight_map": {"x": "../y.safetensors"}}'), "files in its own folder"),
    (replace("model.safetensors.index.json", '{"weight_map": {"x": "y.safetensors"}}'),
     "must name files in its own folder, but 'y.safetensors' is not one: download the model again"),
    (replace("model.safetensors.index.json", '{"weight_map": {}}'), "files in its own folder, but names none"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_broken_folders_are_refused(change, message, tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError) as error:
        load_gpt2(str(tmp_path))
    assert message in str(error.value)
    assert not (tmp_path / "ran").exists()
