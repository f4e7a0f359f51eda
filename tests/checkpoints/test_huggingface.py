"""GPT-2 in Hugging Face's format: its files, compared with transformers, and downloads from a small
server.
"""
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file, save_file

import sampling
from hf_tokenizers import gpt2_tokenizer_json, save_tokenizer
from models import cached_snapshot, make_gpt, make_transformers_gpt2, save_checkpoint
from sampling.checkpoints.finding import HUGGINGFACE_NAMES
from sampling.checkpoints.huggingface import load_huggingface
from sampling.checkpoints.nanogpt import load_nanogpt
from sampling.model import GPT
from script_process import run_forked

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"


@torch.no_grad()
def same_as_transformers(folder, theirs):
    """Whether the model in this folder gives the same logits as theirs."""
    ours = GPT.from_pretrained(str(folder), dict(dropout=0.25))
    assert ours.transformer.drop.p == 0.25
    idx = torch.arange(40)[None]
    return torch.allclose(ours(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-4)


# ---- folders as people have them

def edit(path, drop=(), **new):
    """Change fields of a JSON file."""
    content = {}
    if path.exists():
        content = json.loads(path.read_text())
    content |= new
    for name in drop:
        del content[name]
    path.write_text(json.dumps(content))


def editing(file, **changes):
    """A change of a folder that edits this file."""
    return lambda folder: edit(folder / file, **changes)


def resaving(change):
    """A change of a folder that saves other tensors."""
    def resave(folder):
        path = folder / WEIGHTS
        tensors = change(load_file(path))
        path.unlink() # which may be mapped
        save_file(tensors, path, {"format": "pt"})
    return resave


def shards(folder, save=save_file, names="model", suffix="safetensors"):
    """An index with names of its own, and the shards of an earlier save, with the usual names."""
    whole = folder / WEIGHTS
    tensors = load_file(whole)
    whole.unlink()
    weight_map = {}
    for k in 1, 2:
        part = {name: tensors[name] for name in sorted(tensors)[k - 1::2]}
        weight_map |= dict.fromkeys(part, f"part-{k}.{suffix}")
        save(part, folder / f"part-{k}.{suffix}")
        stale = {name: -tensor for name, tensor in part.items()}
        save(stale, folder / f"{names}-0000{k}-of-00002.{suffix}")
    edit(folder / f"{names}.{suffix}.index.json", weight_map=weight_map, metadata={})


def add_prefix_space(folder, name):
    """The tokenizer's class is named in config.json alone."""
    step = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    edit(folder / "tokenizer.json", pre_tokenizer=step, normalizer={"type": "Lowercase"})
    edit(folder / "tokenizer_config.json", drop=["tokenizer_class"])
    edit(folder / CONFIG, tokenizer_class=name)


def set_generation(folder):
    """What the authors of a model sample with, in the old place and in the new one."""
    edit(folder / CONFIG, temperature=0.5)
    edit(folder / GENERATION, temperature=1.0, repetition_penalty=1.5, no_repeat_ngram_size=3,
         max_length=50)


HEADS = {
    "v_head.summary.weight": torch.ones(1, 32),
    "score.weight": torch.ones(2, 32),
    "transformer.h.1.ln_cross_attn.weight": torch.ones(32),
    "transformer.h.1.crossattention.bias": torch.arange(1),
}
ADDED = {"content": "<a>", "lstrip": False, "rstrip": True, "normalized": False,
         "single_word": False}
B_TOKEN = ADDED | {"content": "<b>"}
FOLDERS = { # what is changed
    "stale-shards": shards,
    "stale-shards-bin": partial(shards, save=torch.save, names="pytorch_model", suffix="bin"),
    "stale-bin": lambda folder: torch.save({}, folder / "pytorch_model.bin"),
    "aliases": editing(CONFIG, drop=HUGGINGFACE_NAMES, hidden_size=32, num_hidden_layers=2,
                       num_attention_heads=4, max_position_embeddings=48),
    "aliases-beside-other-values": editing(
        CONFIG, num_attention_heads=8, n_embd=64, hidden_size=32),
    "heads": resaving(lambda tensors: tensors | HEADS),
    "head-alone": resaving(lambda tensors: {
        name.replace("transformer.wte", "lm_head"): tensor for name, tensor in tensors.items()}),
    "no-biases": resaving(lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}),
    "class": partial(add_prefix_space, name="PreTrainedTokenizerFast"),
    "gpt2-class": partial(add_prefix_space, name="GPT2TokenizerFast"),
    "object-of-tokens": editing("tokenizer_config.json", pad_token="<c>", extra_special_tokens={
        "a_token": "<a>", "b_token": B_TOKEN | {"__type": "AddedToken"}}),
    "named-token": editing("tokenizer_config.json", image_token="<a>"),
    "gap": editing("tokenizer_config.json", added_tokens_decoder={
        "494": ADDED | {"special": True}, "492": B_TOKEN | {"special": False}}),
    "gap-in-tokenizer-json": editing("tokenizer.json", added_tokens=[
        ADDED | {"id": 492, "special": False}]),
    "authors": set_generation,
    "nothing-changes": editing(GENERATION, temperature=1.0, top_k=50, top_p=1.0, min_p=0.0,
                               repetition_penalty=1.0, num_beams=1, typical_p=1.0, min_length=0,
                               no_repeat_ngram_size=0, min_new_tokens=0, suppress_tokens=[]),
}
LINES = { # what a line must say
    "heads": ".* need: 'crossatt.*ln_cross.*score.*v_h.*",
    "authors": r".* with repetition_penalty=1\.5, no_repeat_ngram_size=3 \(no setting .*",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_the_text_of_transformers(name, tmp_path, messages):
    from transformers import (  # it takes seconds
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        set_seed,
    )
    size = save_tokenizer("byte-level", tmp_path)
    model = make_transformers_gpt2(vocab_size=size + 8, n_head=4)
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path)
    FOLDERS[name](tmp_path)

    prompt = "Hello <a> world<b>"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs.generation_config = GenerationConfig(pad_token_id=0)
    ids = AutoTokenizer.from_pretrained(tmp_path)(prompt, add_special_tokens=False).input_ids
    ours = sampling.load(tmp_path, device="cpu")
    assert ours.tokenizer.encode(prompt) == ids
    settings = dict(max_new_tokens=20, temperature=0.8, top_k=200)
    set_seed(1337)
    expected = theirs.generate(torch.tensor([ids]), do_sample=True, **settings)
    sample, = ours.generate(prompt, seed=1337, **settings)
    assert ids + sample.token_ids == expected[0].tolist()
    lines = [line for line in messages if line.startswith(f"{tmp_path}: ") and "loaded" not in line]
    assert re.fullmatch(LINES.get(name, ""), "".join(lines))


def test_a_model_of_2019_loads(tmp_path):
    """The config has no model_type, and the tensors have no prefix."""
    theirs = make_transformers_gpt2(vocab_size=300)
    sizes = {name: getattr(theirs.config, name) for name in HUGGINGFACE_NAMES}
    edit(tmp_path / CONFIG, vocab_size=300, **sizes)
    torch.save(theirs.transformer.state_dict(), tmp_path / "pytorch_model.bin")
    assert same_as_transformers(tmp_path, theirs)


@pytest.mark.parametrize("changes", [
    {"scale_attn_by_inverse_layer_idx": True},
    {"scale_attn_weights": False},
    {"activation_function": "gelu", "layer_norm_epsilon": 0.1},
    {"n_inner": 40},
    {"activation_function": "gelu_accurate"},
    {"tie_word_embeddings": False},
])
def test_settings_of_the_architecture_are_followed_in_half_precision_and_in_shards(
        changes, tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300, **changes).half()
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert same_as_transformers(tmp_path, theirs.float())
    # This may be wrong: a head of its own is used all the same.
    edit(tmp_path / CONFIG, tie_word_embeddings=True)
    assert same_as_transformers(tmp_path, theirs)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    theirs = make_transformers_gpt2(vocab_size=300)
    theirs.save_pretrained(tmp_path)
    shards(tmp_path)
    second = tmp_path / "part-2.safetensors"
    stale = load_file(tmp_path / "model-00001-of-00002.safetensors")
    save_file(load_file(second) | stale, second)
    assert same_as_transformers(tmp_path, theirs)


def lose_shard(folder):
    shards(folder)
    shard = folder / "part-1.safetensors"
    shard.unlink()
    shard.symlink_to("nowhere")


def leave_folder(folder):
    (folder / WEIGHTS).unlink()
    edit(folder / INDEX, weight_map={"wte.weight": "../other.safetensors"})


@pytest.mark.parametrize("change, message", [
    (lambda folder: (folder / CONFIG).write_text("[1]"), "must hold an object"),
    (editing(CONFIG, model_type="llama"), "model_type 'llama'; only gpt2"),
    (editing(CONFIG, activation_function="relu"), "activation_function 'relu'; supported"),
    (editing(CONFIG, quantization_config={}), "holds quantized weights: pass"),
    (editing(CONFIG, drop=["n_layer"]), "n_layer=12 but holds tensors of 2"),
    (editing(CONFIG, tie_word_embeddings=False), "lm_head.weight: nothing instead of"),
    (lose_shard, "lacks 'part-1.safetensors', which"),
    (leave_folder, "its weight_map must give the names of files in its folder"),
    (resaving(lambda tensors: tensors | {"transformer.h.0.scale": torch.ones(1)}), "h.0.scale: "),
])
def test_what_is_missing_or_would_change_the_text_is_named(change, message, tmp_path):
    make_transformers_gpt2(vocab_size=300).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_huggingface(str(tmp_path))


def link_to_nothing(folder):
    (folder / WEIGHTS).rename(folder / "moved")
    (folder / WEIGHTS).symlink_to("blob")
    return folder / "moved", folder / "blob"


def leave_incomplete_download(folder):
    (folder / ".cache/huggingface/download").mkdir(parents=True)
    part = folder / ".cache/huggingface/download/a.incomplete"
    (folder / WEIGHTS).rename(part)
    return part, folder / WEIGHTS


def lose_index(folder):
    shards(folder)
    (folder / INDEX).rename(folder / "moved")
    return folder / "moved", folder / INDEX


def lose_config(folder):
    (folder / CONFIG).rename(folder / "moved")
    return folder / "moved", folder / CONFIG


@pytest.mark.parametrize("change, message", [
    (lose_config, f"/{WEIGHTS} lacks its config.json: copy that beside it, and pass init_from="),
    (link_to_nothing, f"/{WEIGHTS} is a link to blob, which is not there: repair or replace"),
    (leave_incomplete_download, "/a.incomplete is an incomplete download: download the"),
    (lose_index, f"-00001-of-00002.safetensors is a shard, but {INDEX}, which .* copy it there"),
])
def test_why_weights_are_missing_is_said_and_the_remedy_works(change, message, tmp_path):
    model = make_transformers_gpt2(vocab_size=300)
    model.save_pretrained(tmp_path)
    missing, place = change(tmp_path)
    for load in load_huggingface, load_nanogpt:
        with pytest.raises((OSError, ValueError), match=message) as error:
            load(str(tmp_path))
        assert f"; pass init_from={tmp_path}" not in str(error.value)
    missing.rename(place)
    assert same_as_transformers(tmp_path, model)


# ---- downloads

COMMIT = "0123456789abcdef" * 2 + "01234567"
NOWHERE = "http://127.0.0.1:9"
FAST = "--start=Hello", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"


class Hub(SimpleHTTPRequestHandler):
    """Answers as the hub does, with the files of a folder."""

    def end_headers(self):
        name = self.path.replace("/", "-")
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()

    def log_message(self, *args):
        self.server.asked_for.append(self.path.rpartition("/")[2])


@pytest.fixture
def hub(tmp_path):
    """A hub of the files in tmp_path, and the environment to use it with empty caches."""
    handler = partial(Hub, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked_for = []
        server.env = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"),
        }
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run_online(*arguments, **options):
    """Run sample.py in a process of its own, because the hub's variables are read on loading."""
    return run_forked(*arguments, status=None, **options)


def write_json(path, content):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def test_a_model_is_downloaded_with_its_tokenizer_and_then_used_offline(
        hub, tmp_path, monkeypatch):
    folder = tmp_path / "someone/tiny/resolve" / COMMIT
    size = save_tokenizer("byte-level", folder)
    make_transformers_gpt2(vocab_size=size).save_pretrained(folder)
    shards(folder)
    api = tmp_path / "api/models/someone/tiny"
    write_json(api / "revision/main", {"id": "someone/tiny", "sha": COMMIT})
    files = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
             for path in folder.iterdir()]
    for useless in "onnx/config.json", "trainer_state.json": # which the hub cannot send
        files.append({"type": "file", "path": useless, "size": 9, "oid": "none"})
    write_json(api / "tree" / COMMIT, files)
    run = "--init_from=someone/tiny", *FAST
    first = run_online(*run, **hub.env)
    assert first.stdout.startswith("Hello"), first.stderr
    assert {"tokenizer.json", "part-2.safetensors"} <= {*hub.asked_for}
    # The index does not name this one.
    assert "model-00001-of-00002.safetensors" not in hub.asked_for
    lost, = (tmp_path / "cache").rglob("part-2.safetensors")
    lost.resolve().unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache/hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"incomplete: .*part-2\.safetensors"):
        load_huggingface("someone/tiny")
    assert run_online(*run, **hub.env).stdout == first.stdout # this downloads it again
    hub.asked_for.clear()
    offline = run_online(*run, **hub.env | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout == first.stdout, offline.stderr
    assert not hub.asked_for


@pytest.mark.parametrize("name, cached, files, error", [
    ("gpt2", "openai-community--gpt2", [CONFIG, WEIGHTS], None),
    ("openai-community/gpt2-xl", "gpt2-xl", [CONFIG, WEIGHTS], None),
    ("gpt2", "gpt2", [CONFIG], r"\(the cache lacks model\.safetensors and pytorch_model\.bin\)"),
    ("gpt2", "gpt2", [CONFIG, "lost.bin"], r"lost\.bin is a link to .*, which is not .* again"),
    ("gpt2", "openai-community--gpt2", [CONFIG, "lost.bin"], r"lost\.bin is a link to"),
    ("gpt2-xl", "gpt2-xl", [CONFIG, "../../blobs/1f.incomplete"], "1f.incomplete is an incomplete"),
    ("gpt2", "someone--gpt2", [CONFIG, WEIGHTS], "Cannot find"),
])
def test_what_another_program_left_in_the_cache_is_used(
        name, cached, files, error, gpt2_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = cached_snapshot(tmp_path, cached)
    (snapshot.parent.parent / "blobs").mkdir()
    for file in files:
        (snapshot / file).symlink_to(gpt2_folder / file)
    if error:
        with pytest.raises(ValueError, match=error):
            load_huggingface(name)
    else:
        assert load_huggingface(name).folder == snapshot


IS_ASKED = "did not come from the Hugging Face hub"
ELSEWHERE = "; for the hub's model of this name, run the command in another folder"


@pytest.mark.parametrize("name, message", [
    ("me/gpt2-finetuned", IS_ASKED),
    ("gpt2", IS_ASKED),
    ("runs/last", f"there is no model at runs/last; found .*{ELSEWHERE}"),
    ("out-shakespeare-cha", f"found out-shakespeare-char, .*{ELSEWHERE}"),
])
def test_a_name_like_a_path_or_a_model_that_is_here_is_not_asked_of_the_hub(
        name, message, hub, tmp_path):
    here = tmp_path / "here"
    for folder in "out-shakespeare-char", "gpt2-finetuned", "gpt-2":
        save_checkpoint(here / folder, make_gpt())
    (here / "runs").mkdir()
    done = run_online(f"--init_from={name}", cwd=here, **hub.env)
    assert re.search(f"^error: .*{message}", done.stderr, re.M), done.stderr
    assert bool(hub.asked_for) == (message is IS_ASKED)


def test_gpt2s_vocabulary_comes_from_the_hub_at_last(
        hub, tiktoken_cache, gpt2_folder, run_script, tmp_path):
    content = json.loads(gpt2_tokenizer_json(tiktoken_cache))
    write_json(tmp_path / "openai-community/gpt2/resolve/main/tokenizer.json", content)
    run = f"--init_from={gpt2_folder}", *FAST
    expected = run_script(*run).stdout
    env = hub.env | {"HTTPS_PROXY": NOWHERE} # of tiktoken's downloads
    assert run_online(*run, **env).stdout == expected
    dead = run_online(*run, **env | {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path / "other")})
    assert "the download from Hugging Face's hub failed" in dead.stderr
    assert "Retry" not in dead.stderr
