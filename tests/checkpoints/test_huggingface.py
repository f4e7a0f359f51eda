"""GPT-2 in Hugging Face's format: its files, compared with transformers, and downloads from a small server."""
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

import sampling
from hf_tokenizers import gpt2_tokenizer_json, save_tokenizer
from models import make_gpt, make_transformers_gpt2, save_checkpoint
from project import PROJECT
from sampling.checkpoints.finding import ALIASES
from sampling.checkpoints.huggingface import load_huggingface
from sampling.model import GPT
from sampling.params import SamplingParams


def same_as_transformers(folder, theirs):
    """Whether the model in this folder gives the same logits as theirs."""
    ours, idx = GPT.from_pretrained(str(folder), dict(dropout=0.25)), torch.arange(40)[None]
    with torch.no_grad():
        expected = theirs(idx).logits
        return ours.transformer.drop.p == 0.25 and expected.std() > 0.1 and torch.allclose(
            ours(idx, idx)[0], expected, rtol=0, atol=1e-4)


def test_a_model_of_2019_loads(tmp_path):
    """The config has no model_type, the tensors have no prefix, and mask buffers are among them."""
    theirs = make_transformers_gpt2(vocab_size=300)
    edit(tmp_path / "config.json", vocab_size=300, **{name: getattr(theirs.config, name) for name in ALIASES})
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()
               if name != "lm_head.weight"} | {"h.0.attn.bias": torch.ones(1, 1, 48, 48, dtype=torch.bool)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)


# ---- folders as people have them

def edit(path, drop=(), **new):
    """Change fields of a JSON file."""
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **new}
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in drop}))


def resave(folder, change, as_bin=False):
    """Change the tensors of a folder."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin") if as_bin else save_file(tensors, path, {"format": "pt"})


def shards(folder, as_bin=False):
    """An index with names of its own, and the shards of an earlier save, with the usual names."""
    save, suffix = (torch.save, "bin") if as_bin else (save_file, "safetensors")
    whole, stem = folder / "model.safetensors", "pytorch_model" if as_bin else "model"
    tensors, weight_map = load_file(whole), {}
    whole.unlink()
    for k in 1, 2:
        part = {name: tensors[name] for name in sorted(tensors)[k - 1::2]}
        weight_map |= dict.fromkeys(part, f"part-{k}.{suffix}")
        save(part, folder / f"part-{k}.{suffix}")
        save({name: -tensor for name, tensor in part.items()}, folder / f"{stem}-0000{k}-of-00002.{suffix}")
    edit(folder / f"{stem}.{suffix}.index.json", weight_map=weight_map, metadata={})


def without(*endings):
    """Drop the tensors whose names end so."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(endings)}


def add_prefix_space(folder, name):
    """The tokenizer's class is named in config.json alone."""
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    edit(folder / "tokenizer.json", pre_tokenizer=step, normalizer={"type": "Lowercase"})
    edit(folder / "tokenizer_config.json", drop=["tokenizer_class"])
    edit(folder / "config.json", tokenizer_class=name)


HEADS = {"v_head.summary.weight": torch.ones(1, 32), "score.weight": torch.ones(2, 32), "steps": torch.arange(1),
         "qa_outputs.bias": torch.ones(2), "multiple_choice_head.summary.bias": torch.ones(1),
         "transformer.h.1.ln_cross_attn.weight": torch.ones(32), "transformer.h.1.crossattention.bias": torch.arange(1)}
ADDED = {"content": "<a>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
FOLDERS = { # what is changed, and what a line must say
    "stale-shards": (shards, None), "stale-shards-bin": (lambda folder: shards(folder, as_bin=True), None),
    "stale-bin": (lambda folder: torch.save({}, folder / "pytorch_model.bin"), None),
    "aliases": (lambda folder: edit(folder / "config.json", drop=ALIASES, hidden_size=32, num_hidden_layers=2,
                                      num_attention_heads=4, max_position_embeddings=48), None),
    "heads": (lambda folder: resave(folder, lambda tensors: tensors | HEADS), "need: 'crossatt.*ln_cross.*score.*v_h"),
    "head-alone": (lambda folder: resave(folder, lambda tensors: {
        name.replace("transformer.wte", "lm_head"): tensor for name, tensor in tensors.items()}), None),
    "no-biases": (lambda folder: resave(folder, without("bias"), as_bin=True), None),
    "class": (lambda folder: add_prefix_space(folder, "PreTrainedTokenizerFast"), None),
    "gpt2-class": (lambda folder: add_prefix_space(folder, "GPT2TokenizerFast"), None),
    "object-of-tokens": (lambda folder: edit(folder / "tokenizer_config.json", extra_special_tokens={
        "a_token": "<a>", "b_token": ADDED | {"content": "<b>", "__type": "AddedToken"}}, pad_token="<c>"), None),
    "named-token": (lambda folder: edit(folder / "tokenizer_config.json", image_token="<a>"), None),
    "gap": (lambda folder: edit(folder / "tokenizer_config.json", added_tokens_decoder={
        "494": ADDED | {"special": True}, "492": ADDED | {"content": "<b>", "special": False}}), None),
    "gap-in-tokenizer-json": (lambda folder: edit(folder / "tokenizer.json", added_tokens=[
        ADDED | {"id": 492, "special": False}]), None),
    "authors": (lambda folder: (edit(folder / "config.json", temperature=1.0, top_k=50, num_beams=1), edit(
        folder / "generation_config.json", repetition_penalty=1.5, no_repeat_ngram_size=3, max_length=50)),
        r"with --repetition_penalty=1\.5, no_repeat_ngram_size=3 \(no flag\); nothing is")}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_the_text_of_transformers(name, tmp_path, messages):
    change, line = FOLDERS[name]
    size = save_tokenizer("byte-level", tmp_path)
    model = make_transformers_gpt2(vocab_size=size + 8, n_head=4)
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path)
    change(tmp_path)
    theirs, prompt = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), "Hello <a> world<b>"
    theirs.generation_config = GenerationConfig(pad_token_id=0)
    ids = AutoTokenizer.from_pretrained(tmp_path)(prompt, add_special_tokens=False).input_ids
    ours = sampling.load(tmp_path, device="cpu")
    assert ours.tokenizer.encode(prompt) == ids
    for temperature in 0, 0.8:
        set_seed(1337)
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=temperature > 0, top_k=200,
                                   temperature=temperature or 1.0)
        sample, = ours.generate(prompt, SamplingParams(20, temperature=temperature, top_k=200, seed=1337))
        assert ids + sample.token_ids == expected[0].tolist()
    lines = [line for line in messages if line.startswith(f"{tmp_path}: ") and "loaded" not in line]
    assert len(lines) == bool(line) and re.search(line or "", "".join(lines))


@pytest.mark.parametrize("changes", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False},
                                     {"activation_function": "gelu", "layer_norm_epsilon": 0.1}, {"n_inner": 40},
                                     {"activation_function": "gelu_accurate"}, {"tie_word_embeddings": False}])
def test_settings_of_the_architecture_are_followed_also_in_half_precision_and_in_shards(changes, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300, **changes).half()
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and same_as_transformers(tmp_path, theirs.float())
    theirs.config.tie_word_embeddings = True # which may be wrong: a head of its own is used all the same
    theirs.config.save_pretrained(tmp_path)
    assert same_as_transformers(tmp_path, theirs)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    shards(tmp_path)
    stale = {name: -tensor for name, tensor in load_file(tmp_path / "part-1.safetensors").items()}
    save_file(load_file(tmp_path / "part-2.safetensors") | stale, tmp_path / "part-2.safetensors", {"format": "pt"})
    assert same_as_transformers(tmp_path, theirs)


def dangle(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")


@pytest.mark.parametrize("change, message", [
    (lambda folder: (folder / "config.json").write_text("[1]"), "must hold an object"),
    (lambda folder: edit(folder / "config.json", model_type="llama"), "model_type 'llama'; only gpt2"),
    (lambda folder: edit(folder / "config.json", activation_function="relu"), "activation_function 'relu'; supported"),
    (lambda folder: edit(folder / "config.json", quantization_config={}), "holds quantized weights: pass"),
    (lambda folder: edit(folder / "config.json", drop=["n_layer"]), "n_layer=12 but holds tensors of 2"),
    (lambda folder: (shards(folder), dangle(folder, "part-1.safetensors")), "lacks 'part-1.safetensors', which"),
    (lambda folder: (shards(folder), (folder / "model.safetensors.index.json").unlink()), "nor an index of the shards"),
    (lambda folder: dangle(folder, "model.safetensors"), "neither model.safetensors nor "),
    (lambda folder: (edit(folder / "model.safetensors.index.json", weight_map={"wte.weight": "../other.safetensors"}),
                     dangle(folder, "model.safetensors")), "its weight_map must give the names of files in its folder"),
    (lambda folder: resave(folder, without("1.attn.c_attn.bias")), r"h\.1\.attn\.c_attn\.bias: nothing instead"),
    (lambda folder: resave(folder, lambda tensors: tensors | {"transformer.h.0.scale": torch.ones(1)}), "h.0.scale: "),
    (lambda folder: edit(folder / "config.json", tie_word_embeddings=False), "lm_head.weight: nothing instead of"),
    (lambda folder: edit(folder / "config.json", hidden_size=64), "n_embd 32, but also hidden_size 64, which means")])
def test_what_is_missing_or_would_change_the_text_is_named(change, message, tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
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
    shards(folder)
    files = [{"type": "file", "path": path.name, "rfilename": path.name, "size": path.stat().st_size, "oid": path.name}
             for path in folder.iterdir()]
    write_json(api / "revision" / "main", {"id": "someone/tiny", "sha": COMMIT, "siblings": files})
    write_json(api / "tree" / COMMIT, files)
    first = run_script(*ARGUMENTS, **hub.env)
    assert first.returncode == 0 and first.stdout.startswith("Hello"), first.stderr
    assert {"tokenizer.json", "part-2.safetensors"} <= {*hub.asked_for}
    assert "model-00001-of-00002.safetensors" not in hub.asked_for, "the index does not name it"
    hub.asked_for.clear()
    offline = run_script(*ARGUMENTS, **hub.env | {"HF_HUB_OFFLINE": "1"})
    assert (offline.returncode, offline.stdout, hub.asked_for) == (0, first.stdout, []), offline.stderr


@pytest.mark.parametrize("name, asks", [
    ("out-shakespeare-cha", False), ("runs/last", False), ("a/out-shakespeare-char", False), ("someone/tiny", True),
    ("me/gpt2-finetuned", True), ("gpt2", True)])
def test_a_name_like_a_path_or_a_model_that_is_here_is_not_asked_of_the_hub(name, asks, hub, run_script, tmp_path):
    here = tmp_path / "here"
    for folder in "out-shakespeare-char", "gpt2-finetuned", "gpt-2":
        save_checkpoint(here / folder, make_gpt())
    (here / "runs").mkdir()
    done = run_script(f"--init_from={name}", cwd=here, **hub.env)
    assert bool(hub.asked_for) == asks and done.returncode == 1, done.stderr
    if not asks:
        assert f"error: there is no model at {name}; found " in done.stderr
    if "shakespeare" in name:
        assert "; found out-shakespeare-char" in done.stderr
        assert "for the hub's model of this name, run the command in another folder" in done.stderr


def test_gpt2s_vocabulary_comes_from_the_hub_at_last(hub, tiktoken_cache, tmp_path):
    content = json.loads(gpt2_tokenizer_json(tiktoken_cache))
    write_json(tmp_path / "openai-community/gpt2/resolve/main/tokenizer.json", content)
    code = ("import sys; from sampling.inputs.tokenizer_choice import *; logger.setLevel('INFO'); "
            "logger.addHandler(logging.StreamHandler(sys.stdout)); print(load_encoding('gpt2').encode('Hello world'))")
    command, env = [sys.executable, "-c", code], {**os.environ, **hub.env, "HTTPS_PROXY": "http://127.0.0.1:9"}
    dead = subprocess.run(command, cwd=PROJECT, env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True)
    assert dead.stdout.count(b" failed (") == dead.stdout.count(b"\n") == 2 and b"Retry" not in dead.stderr
    lines = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("GPT-2's encoding: tiktoken's download failed") and lines[1:] == ["[15496, 995]"]
