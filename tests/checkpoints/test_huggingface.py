"""GPT-2 in Hugging Face's format: its files, compared with transformers, and downloads from a small server."""
import hashlib
import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from hf_tokenizers import gpt2_tokenizer_json, save_tokenizer
from models import make_transformers_gpt2
from project import PROJECT
from sampling.checkpoints.huggingface import load_huggingface
from sampling.model import GPT


def same_as_transformers(folder, theirs):
    """Whether the model in this folder gives the same logits as theirs."""
    ours, idx = GPT.from_pretrained(str(folder), dict(dropout=0.25)), torch.arange(40)[None]
    with torch.no_grad():
        expected = theirs(idx).logits
        return ours.transformer.drop.p == 0.25 and expected.std() > 0.1 and torch.allclose(
            ours(idx, idx)[0], expected, rtol=0, atol=1e-4)


def test_pytorch_model_bin_loads_from_one_file_and_from_shards(tmp_path):
    """Of 2019: the config has no model_type, the tensors have no prefix, and mask buffers are among them."""
    theirs = make_transformers_gpt2(vocab_size=300)
    fields = "n_embd", "n_head", "n_layer", "n_positions", "vocab_size"
    (tmp_path / "config.json").write_text(json.dumps({name: getattr(theirs.config, name) for name in fields}))
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()
               if name != "lm_head.weight"}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.bool)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)
    (tmp_path / "pytorch_model.bin").unlink()
    for i in 1, 2:
        torch.save({name: tensors[name] for name in [*tensors][i - 1::2]},
                   tmp_path / f"pytorch_model-0000{i}-of-00002.bin")
    assert same_as_transformers(tmp_path, theirs)


@pytest.mark.parametrize("changes", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False},
                                     {"activation_function": "gelu"}, {"n_inner": 40}, {"tie_word_embeddings": False}])
def test_settings_of_the_architecture_are_followed_also_in_half_precision_and_in_shards(changes, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300, **changes).half()
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and same_as_transformers(tmp_path, theirs.float())
    theirs.config.tie_word_embeddings = True # which may be wrong: a head of its own is used all the same
    theirs.config.save_pretrained(tmp_path)
    assert same_as_transformers(tmp_path, theirs)


@pytest.mark.parametrize("config, message", [
    ("[1]", "must hold an object"), ('{"model_type": "llama"}', "model_type 'llama'; only gpt2"),
    ('{"model_type": "gpt2", "activation_function": "relu"}', "activation_function 'relu'; supported"),
    ('{"model_type": "gpt2"}', "n_layer=12 but holds tensors of 2")])
def test_a_config_of_another_model_is_refused(config, message, tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        load_huggingface(str(tmp_path))


def test_missing_weights_are_named(tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path, max_shard_size="30KB")
    min(tmp_path.glob("model-*-of-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"the tensors do not fit the model: .*nothing instead of \("):
        load_huggingface(str(tmp_path))
    for path in tmp_path.glob("model-*-of-*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_huggingface(str(tmp_path))


# ---- downloads

COMMIT = "0123456789abcdef" * 2 + "01234567"
ARGUMENTS = "--init_from=someone/tiny", "--start=Hello", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"


class Hub(SimpleHTTPRequestHandler):
    """Answers as the hub does, with the files of a folder."""

    def end_headers(self):
        etag = hashlib.sha1(self.path.encode()).hexdigest()
        for name, value in ("ETag", f'"{etag}"'), ("X-Repo-Commit", COMMIT):
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args):
        self.server.asked_for.append(self.path.rpartition("/")[2])


@pytest.fixture
def hub(tmp_path):
    """A hub of the files in tmp_path, and the environment to use it with empty caches."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=tmp_path)) as server:
        server.asked_for = []
        server.env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache"),
                      "HF_HUB_OFFLINE": "0", "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "HF_HUB_DISABLE_XET": "1"}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def write_json(path, content):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def test_a_model_is_downloaded_with_its_tokenizer_and_then_used_offline(hub, run_script, tmp_path):
    folder, api = tmp_path / "someone" / "tiny" / "resolve" / COMMIT, tmp_path / "api" / "models" / "someone" / "tiny"
    size = save_tokenizer("byte-level", folder)
    make_transformers_gpt2(vocab_size=size).save_pretrained(folder)
    (folder / "tf_model.h5").write_bytes(bytes(10**6))
    files = [{"type": "file", "path": path.name, "rfilename": path.name, "size": path.stat().st_size, "oid": path.name}
             for path in folder.iterdir()]
    write_json(api / "revision" / "main", {"id": "someone/tiny", "sha": COMMIT, "siblings": files})
    write_json(api / "tree" / COMMIT, files)
    first = run_script(*ARGUMENTS, **hub.env)
    assert first.returncode == 0 and first.stdout.startswith("Hello"), first.stderr
    assert "tokenizer.json" in hub.asked_for and "tf_model.h5" not in hub.asked_for
    hub.asked_for.clear()
    offline = run_script(*ARGUMENTS, **hub.env | {"HF_HUB_OFFLINE": "1"})
    assert (offline.returncode, offline.stdout, hub.asked_for) == (0, first.stdout, []), offline.stderr


def test_gpt2s_vocabulary_comes_from_the_hub_at_last(hub, tiktoken_cache, tmp_path):
    content = json.loads(gpt2_tokenizer_json(tiktoken_cache))
    write_json(tmp_path / "openai-community/gpt2/resolve/main/tokenizer.json", content)
    code = ("import sys; from sampling.inputs.tiktoken_tokenizer import *; logger.setLevel('INFO'); "
            "logger.addHandler(logging.StreamHandler(sys.stdout)); print(load_encoding('gpt2').encode('Hello world'))")
    command, env = [sys.executable, "-c", code], {**os.environ, **hub.env, "HTTPS_PROXY": "http://127.0.0.1:9"}
    dead = subprocess.run(command, cwd=PROJECT, env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True)
    assert dead.stdout.count(b" failed (") == dead.stdout.count(b"\n") == 2 and b"Retry" not in dead.stderr
    lines = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("GPT-2's encoding: tiktoken's download failed") and lines[1:] == ["[15496, 995]"]
