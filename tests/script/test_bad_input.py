"""User errors of every kind. Each ends the script with one line that says what is wrong, what is allowed, what to do.

Tests of validation, the configurator, prompts and checkpoints have more cases without the script.
"""
import json

import pytest
import torch

from attacks import needs_linux, write_attack, write_settled
from models import make_gpt, make_transformers_gpt2, nanogpt_args, save_checkpoint, save_meta
from pickle_code import call, value

pytest_plugins = ["attacks"]
FAST = "--num_samples=1", "--max_new_tokens=5"
WRONG_SETTINGS = [ # an argument, a part of the error line: exit status 2
    ("--temprature=1", "did you mean temperature?"),
    ("-p", "unknown setting -p; did you mean start?"),
    ("--num_samples=0", "num_samples must be"),
    ("--temperature=-0.5", "temperature must be"),
    ("--start=", "start is empty"),
    ("bad.py", "error: bad.py: top_k must be from 1 to 10**9, or None or 0 for every token; got -5"),
    ("broken.py", "broken.py, line 1: SyntaxError"),
    ("nowhere.py", "cannot read the settings file 'nowhere.py'"),
    ("out/ckpt.pt", "out/ckpt.pt"),
    ("--device=tpu", "device must be auto, cpu, cuda"),
    ("--init_from=scratch", "init_from must be"),
    ("--out_file=no.html --html_file=out/../no.html", "out_file and html_file must be two files"),
    ("--interactive --out_file=a.jsonl", "leave out_file and html_file out"),
    ("--dtype=int8 --compile", "dtype=int8 does not work with compile=True: leave out one of them"),
]
UNUSABLE = [ # arguments, a part of the error line: exit status 1
    ("--device=cuda", "device=cuda is not available here; found: cpu"),
    ("--start=FILE:empty.txt", "empty.txt is empty"),
    ("--start=FILE:-", "is empty"),
    ("--start=FILE:nowhere.txt", "cannot read the prompt file 'nowhere.txt': No such file"),
    ("--start=FILE:latin.txt", "latin.txt is not UTF-8"),
    ("--start=naïve", "'ï' at 3"),
    ("--start=A\\nB", "for a newline pass"),
    ("--start=LINES:lines.txt", "lines.txt, line 3: the prompt has characters"),
    ("--start=JSONL:lines.txt", "lines.txt, line 1: every line must be an object"),
    ("--start=JSONL:device.jsonl", "device.jsonl, line 1: device is a setting of the whole run"),
    ("--out_dir=nowhere", "there is no checkpoint at nowhere"),
    ("--out_dir=nowhere", "there is no checkpoint at nowhere; pass --out_dir="),
    ("--out_dir=empty.txt", "cannot read empty.txt"),
    ("--out_dir=cut.pt", "cannot read cut.pt"),
    ("--out_dir=missing", "transformer.wte.weight: nothing instead of (61, 24); lm_head.weight: nothing"),
    ("--out_dir=misshapen", "transformer.wpe.weight: (9, 24) instead of (16, 24)"),
    ("--out_dir=rope", "rope"),
    ("--out_dir=huge", "block_size must be a whole number"),
    ("--out_dir=other", "other/meta.pkl has 3 tokens"),
    ("--out_dir=bare", "GPT-2's encoding has 50257 tokens"),
    ("--out_dir=nan", "NaN or infinite"),
    ("--out_dir=nan --temperature=0", "NaN or infinite"),
    ("--out_dir=hf", "pass --init_from=hf"),
    ("--init_from=no/such/model", "error: 'no/such/model' is neither a folder here nor a Hugging Face id"),
    ("--init_from=gpt2", "could not get 'gpt2'"),
    ("--init_from=out", "for a ckpt.pt pass --out_dir=out"),
    ("--init_from=hf", "n_layer must be a whole number"),
    ("--init_from=shards", "nor the shards of either"),
    ("--out_file=no/such/a.jsonl", "cannot write 'no/such/a.jsonl': there is no folder /"),
    ("--out_file=bad.py", "bad.py, line 1: not"),
    ("--draft=larger", "has a vocabulary of 70 tokens, but the model has 61: the two must be equal"),
    ("--draft=a/b/c", "error: cannot load draft=a/b/c: 'a/b/c' is neither a folder here nor a Hugging Face id"),
]


@pytest.fixture(scope="module")
def bad_input_folder(tmp_path_factory):
    """A folder with a valid checkpoint in out/ and all files that the tables name."""
    folder, model = tmp_path_factory.mktemp("bad"), make_gpt()
    good = save_checkpoint(folder / "out", model)
    write_settled(folder / "cut.pt", good.read_bytes()[:9999])
    write_settled(folder / "empty.txt", b"")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "bad.py").write_text("top_k = -5\n")
    (folder / "broken.py").write_text("top_k = (\n")
    (folder / "lines.txt").write_text("good\n\nso \N{EURO SIGN}\n", encoding="utf-8")
    (folder / "device.jsonl").write_text('{"prompt": "O", "device": 1}\n')
    save_bad_models(folder, model)
    return folder


def save_bad_models(folder, model):
    """Save models that are each damaged in one way."""
    make_transformers_gpt2().save_pretrained(folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps(config | {"n_layer": 2.0}))
    (folder / "shards").mkdir()
    (folder / "shards" / "config.json").write_text(json.dumps(config))
    (folder / "shards" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors"}}')
    tensors, args = model.state_dict(), nanogpt_args(model.config)
    tied = "lm_head.weight", "transformer.wte.weight"
    save_checkpoint(folder / "missing", model, model={name: tensors[name] for name in tensors if name not in tied})
    save_checkpoint(folder / "misshapen", model, model=tensors | {"transformer.wpe.weight": torch.ones(9, 24)})
    save_checkpoint(folder / "rope", model, model_args=args | {"rope": True})
    save_checkpoint(folder / "huge", model, model_args=args | {"block_size": 10**30})
    save_checkpoint(folder / "bare", model, meta=False)
    save_checkpoint(folder / "other", model)
    save_meta(folder / "other" / "meta.pkl", "\nab")
    save_checkpoint(folder / "nan", model, model=tensors | {"transformer.ln_f.bias": torch.full((24,), torch.nan)})
    save_checkpoint(folder / "larger", make_gpt(vocab_size=70), meta=False)


@pytest.mark.parametrize("arguments, status, message", [
    *((arguments, 2, message) for arguments, message in WRONG_SETTINGS),
    *((arguments, 1, message) for arguments, message in UNUSABLE)])
def test_bad_input_is_one_error_line(run_script, bad_input_folder, arguments, status, message):
    done = run_script("--out_dir=out", "--device=cpu", *FAST, *arguments.split(), cwd=bad_input_folder)
    *others, error = done.stderr.splitlines()
    assert done.returncode == status and done.stdout == ""
    assert error.startswith("error: ") and message in error
    assert not any("rror" in line for line in others) and (status == 1 or not others)


def test_without_gpt2s_encoding_the_error_names_the_files_to_download(run_script, tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50304), meta=False)
    done = run_script(f"--out_dir={tmp_path}", TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"),
                      HTTPS_PROXY="http://127.0.0.1:9")
    assert done.returncode == 1 and done.stdout == ""
    for name in ("vocab.bpe", "encoder.json", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
                 "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "TIKTOKEN_CACHE_DIR"):
        assert name in done.stderr


@needs_linux
@pytest.mark.parametrize("kind, payload, name", [
    ("ckpt.pt", b"cos\nmkdir\n(" + value("ran") + b"tR", "out/ckpt.pt"),
    ("pytorch_model.bin", value("os") + value("mkdir") + b"\x93" + value("ran") + b"\x85R", "pytorch_model.bin"),
    ("meta.pkl", b"cbuiltins\nbytes\ncbuiltins\nmap\ncos\nmkdir\n](" + value("ran") + b"e\x86\x81\x85\x81", "meta.pkl"),
    ("ckpt.pt", call("builtins bytearray", value(2**31)), "out/ckpt.pt"),
], ids=["code-in-ckpt.pt", "code-in-pytorch_model.bin", "code-in-meta.pkl", "two-gigabytes"])
def test_the_script_refuses_hostile_pickles(kind, payload, name, run_script, valid_checkpoint, tmp_path):
    init_from = write_attack(kind, payload, tmp_path, valid_checkpoint)
    done = run_script("--out_dir=out", f"--init_from={init_from}", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "ran").exists()
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and name in error and done.stderr.count("error") == 1
