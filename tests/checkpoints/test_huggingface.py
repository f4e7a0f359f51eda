"""GPT-2 loaded from files in Hugging Face's format, compared with transformers."""
import pytest
import torch

from model import GPT
from models import make_transformers_gpt2
from sampling.checkpoints.huggingface import load_gpt2


def same_as_transformers(folder, theirs):
    """Whether the model in this folder gives the same logits as theirs."""
    ours, idx = GPT.from_pretrained(str(folder)), torch.arange(40)[None]
    with torch.no_grad():
        return (ours(idx, idx)[0] - theirs(idx).logits).abs().max() < 1e-4


def test_safetensors_in_half_precision_and_in_shards_load(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300).half()
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and same_as_transformers(tmp_path, theirs.float())


def test_pytorch_model_bin_loads_from_one_file_and_from_shards(tmp_path):
    """The tensors of the hub's gpt2 have no prefix, and it holds mask buffers."""
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.config.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()
               if name != "lm_head.weight"}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    for i in 1, 2:
        torch.save({name: tensors[name] for name in names[i - 1::2]}, tmp_path / f"pytorch_model-0000{i}-of-00002.bin")
    assert same_as_transformers(tmp_path, theirs)


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
    assert log == [f"{tmp_path}: loaded"] and checkpoint.raw_config["model_type"] == "gpt2"
    assert (checkpoint.path, checkpoint.folder, checkpoint.is_huggingface) == (str(tmp_path), tmp_path, True)
    assert checkpoint.num_init_draws == 0, "transformers' users seed after the model is built"


def test_an_invalid_model_id_is_refused():
    with pytest.raises(ValueError, match=r"^'no/such/model' is neither a folder here nor a Hugging Face id"):
        load_gpt2("no/such/model")


@pytest.mark.parametrize("config, message", [
    ("{", "cannot read"), ("[1]", "must hold an object"),
    ('{"model_type": "llama"}', "model_type 'llama'; only gpt2"),
    ('{"model_type": "gpt2", "activation_function": "relu"}', "activation_function 'relu'; supported"),
    ('{"model_type": "gpt2"}', "n_layer=12 but holds tensors of 2")])
def test_a_config_of_another_model_is_refused(config, message, tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        load_gpt2(str(tmp_path))


def test_missing_weights_are_named(tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match="has only 1 of 00003 shards: download the model again"):
        load_gpt2(str(tmp_path))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_gpt2(str(tmp_path))
