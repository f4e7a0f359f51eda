"""User errors of every kind. Each ends the script with one error line that says what is wrong, what is allowed, and what to do."""
import json

import pytest
import torch

from models import make_gpt, make_transformers_gpt2, nanogpt_args, save_checkpoint, save_meta

FAST = "--num_samples=1", "--max_new_tokens=5"
BAD = { # arguments, exit status, a part of the error line
    "unknown-setting": (["--temprature=1"], 2, "did you mean temperature?"),
    "alias": (["-p", "Once upon"], 2, "unknown setting -p; did you mean start?"),
    "no-value": (["--top_k"], 2, "--top_k needs a value"),
    "no-number": (["--num_samples=many"], 2, "num_samples takes a whole number"),
    "no-samples": (["--num_samples=0"], 2, "num_samples must be"),
    "negative-tokens": (["--max_new_tokens=-1"], 2, "max_new_tokens must be from 0"),
    "negative-temperature": (["--temperature=-0.5"], 2, "temperature must be"),
    "infinite-temperature": (["--temperature=1e999"], 2, "temperature must be"),
    "nan-temperature": (["--temperature=nan"], 2, "temperature takes a number"),
    "nan-in-a-file": (["nan.py"], 2, "temperature must be"),
    "negative-top_k": (["--top_k=-1"], 2, "top_k must be at least 1"),
    "negative-top_k-in-a-file": (["bad.py"], 2, "error: bad.py: top_k must be at least 1, or None or 0 for every token; got -5"),
    "no-batch": (["--batch_size=0"], 2, "batch_size must be from 1 to 100000"),
    "huge-seed": (["--seed=99999999999999999999"], 2, "seed must"),
    "unknown-device": (["--device=tpu"], 2, "device must be auto, cpu, cuda"),
    "absent-device": (["--device=cuda"], 1, "device=cuda is not available here; found: cpu"),
    "absent-second-device": (["--device=cuda:7"], 1, "device=cuda:7 is not available here; found: cpu"),
    "unknown-dtype": (["--dtype=int4"], 2, "dtype must be auto, float32"),
    "int8-compiled": (["--dtype=int8", "--compile"], 2, "dtype=int8 does not work with compile=True: leave out one of them"),
    "int8-exact": (["--dtype=int8", "--exact"], 2, "dtype=int8 does not work with exact=True: leave out one of them"),
    "scratch": (["--init_from=scratch"], 2, "init_from must be"),
    "no-settings-file": (["nowhere.py"], 2, "cannot read the settings file 'nowhere.py'"),
    "checkpoint-as-settings": (["out/ckpt.pt"], 2, "out/ckpt.pt"),
    "broken-settings-file": (["broken.py"], 2, "broken.py, line 1: SyntaxError"),
    "empty-prompt": (["--start="], 2, "start is empty"),
    "empty-prompt-file": (["--start=FILE:empty.txt"], 1, "empty.txt is empty"),
    "empty-standard-input": (["--start=FILE:-"], 1, "is empty"),
    "no-prompt-file": (["--start=FILE:nowhere.txt"], 1, "cannot read the prompt file 'nowhere.txt': No such file"),
    "folder-as-prompt": (["--start=FILE:out"], 1, "cannot read the prompt file 'out'"),
    "latin-1-prompt": (["--start=FILE:latin.txt"], 1, "latin.txt is not UTF-8"),
    "unknown-character": (["--start=naïve"], 1, "'ï' at 3"),
    "literal-newline": (["--start=A\\nB"], 1, "for a newline pass"),
    "no-checkpoint": (["--out_dir=nowhere"], 1, "there is no checkpoint at nowhere"),
    "no-checkpoint-but-one-nearby": (["--out_dir=nowhere"], 1, "checkpoints nearby: "),
    "no-checkpoint-in-folder": (["--out_dir=folder"], 1, "there is no checkpoint at folder/ckpt.pt"),
    "text-as-checkpoint": (["--out_dir=empty.txt"], 1, "cannot read empty.txt"),
    "cut-checkpoint": (["--out_dir=cut.pt"], 1, "cannot read cut.pt"),
    "missing-tensor": (["--out_dir=missing"], 1, "missing: transformer.wte.weight, lm_head.weight"),
    "misshapen-tensor": (["--out_dir=misshapen"], 1, "transformer.wpe.weight (9, 24) instead of (16, 24)"),
    "odd-model_args": (["--out_dir=rope"], 1, "rope"),
    "vocabulary-too-small": (["--out_dir=other"], 1, "other/meta.pkl has 3 tokens"),
    "no-vocabulary": (["--out_dir=bare"], 1, "GPT-2's encoding has 50257 tokens"),
    "nan-weights": (["--out_dir=nan"], 1, "NaN or infinite"),
    "nan-weights-greedy": (["--out_dir=nan", "--temperature=0"], 1, "NaN or infinite"),
    "no-hub-id": (["--init_from=no/such/model"], 1, "error: 'no/such/model' is neither a folder here nor a Hugging Face id"),
    "hub-does-not-answer": (["--init_from=gpt2"], 1, "could not get 'gpt2'"),
    "no-hugging-face-folder": (["--init_from=folder"], 1, "no config.json"),
    "checkpoint-as-hugging-face": (["--init_from=out"], 1, "for a ckpt.pt pass --out_dir=out"),
    "hugging-face-as-checkpoint": (["--out_dir=hf"], 1, "pass --init_from=hf"),
    "float-in-config.json": (["--init_from=hf"], 1, "n_layer must be a whole number"),
    "missing-shard": (["--init_from=shards"], 1, "b.safetensors'"),
    "huge-size": (["--out_dir=huge"], 1, "block_size must be a whole number"),
    "odd-bias": (["--out_dir=bias"], 1, "'bias': Tensor"),
    "huge-numbers": (["--num_samples=" + "9" * 30], 2, "num_samples must be"),
    "huge-length": (["--max_new_tokens=" + "9" * 30], 2, "max_new_tokens must be"),
    "huge-batch": (["--batch_size=" + "9" * 30], 2, "batch_size must be"),
    "huge-number-in-a-file": (["vast.py"], 2, "got an integer of 16610 bits"),
    "file-that-exits": (["exits.py"], 2, "exits.py, line 2: SystemExit"),
    "top_p-0": (["--top_p=0"], 2, "top_p must be above 0 and at most 1"),
    "min_p-2": (["--min_p=2"], 2, "min_p must be from 0 to 1"),
    "penalty-0": (["--repetition_penalty=0"], 2, "repetition_penalty must be from 0.01 to 100"),
    "penalty-nan": (["nan_penalty.py"], 2, "repetition_penalty must be from 0.01 to 100"),
    "stop-is-a-number": (["stop.py"], 2, "stop takes text or a list or None, got 5"),
    "one-file-for-two": (["--out_file=a.x", "--html_file=folder/../a.x"], 2, "out_file and html_file must be two files"),
    "nul-in-out_file": (["--out_file='a\\0b'"], 2, "out_file must be the path"),
    "nan-as-an-id": (["--start=JSONL:nan.jsonl"], 1, "nan.jsonl, line 1: every line must be an object"),
    "empty-stop": (["--stop="], 2, "stop must be a text"),
    "stop-of-numbers": (["stops.py"], 2, "stop must be a text or a list of texts"),
    "no-out_file": (["--out_file="], 2, "out_file must be the path"),
    "no-html_file": (["--html_file="], 2, "html_file must be the path"),
    "out_file-in-no-folder": (["--out_file=no/such/a.jsonl"], 1, "cannot write 'no/such/a.jsonl': there is no folder /"),
    "out_file-is-a-folder": (["--out_file=folder"], 1, "folder"),
    "out_file-of-others": (["--out_file=bad.py"], 1, "bad.py, line 1: not"),
    "interactive-saving": (["--interactive", "--out_file=a.jsonl"], 2, "leave out_file and html_file out"),
    "no-lines-file": (["--start=LINES:nothing.txt"], 1, "cannot read the prompt file 'nothing.txt'"),
    "empty-lines": (["--start=LINES:empty.txt"], 1, "empty.txt is empty"),
    "latin-lines": (["--start=LINES:latin.txt"], 1, "is not UTF-8"),
    "line-with-an-unknown-character": (["--start=LINES:lines.txt"], 1, "lines.txt, line 3: the prompt has characters"),
    "no-json": (["--start=JSONL:lines.txt"], 1, "lines.txt, line 1: every line must be an object"),
    "json-without-a-prompt": (["--start=JSONL:objects.jsonl"], 1, "objects.jsonl, line 2: every line must be an object"),
    "nul-in-a-path": (["--start='FILE:a\\0b'"], 1, "cannot read the prompt file 'a\\x00b'"),
}
# Tests of validation, the configurator and the prompts cover these too. Each fault here has another case beside it.
SLOW = {"no-value", "no-number", "negative-tokens", "infinite-temperature", "nan-temperature", "negative-top_k", "no-batch", "huge-seed", "unknown-dtype",
        "top_p-0", "min_p-2", "penalty-0", "penalty-nan", "stop-is-a-number", "huge-numbers", "huge-length", "huge-batch", "empty-stop", "no-out_file",
        "no-html_file", "absent-second-device", "nan-weights-greedy", "empty-lines", "latin-lines", "no-lines-file", "nan-in-a-file", "nul-in-out_file",
        "folder-as-prompt", "no-checkpoint-in-folder", "stop-of-numbers", "nul-in-a-path", "json-without-a-prompt", "line-with-an-unknown-character", "interactive-saving", "out_file-is-a-folder", "nan-as-an-id"}


@pytest.fixture(scope="module")
def bad_input_folder(tmp_path_factory):
    """A folder with a valid checkpoint in out/ and all files that BAD names."""
    folder, model = tmp_path_factory.mktemp("bad"), make_gpt()
    good = save_checkpoint(folder / "out", model)
    (folder / "cut.pt").write_bytes(good.read_bytes()[:9999])
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "nan.py").write_text("temperature = float('nan')\n")
    (folder / "bad.py").write_text("top_k = -5\n")
    (folder / "broken.py").write_text("top_k = (\n")
    (folder / "nan_penalty.py").write_text("repetition_penalty = float('nan')\n")
    (folder / "stop.py").write_text("stop = 5\n")
    (folder / "nan.jsonl").write_text('{"prompt": "a", "id": NaN}\n')
    (folder / "stops.py").write_text("stop = ['a', 5]\n")
    (folder / "lines.txt").write_text("good\n\nso \N{EURO SIGN}\n", encoding="utf-8")
    (folder / "objects.jsonl").write_text('{"prompt": "good"}\n{"prompt": ""}\n')
    (folder / "folder").mkdir()
    (folder / "vast.py").write_text("num_samples = 10**5000\n")
    (folder / "exits.py").write_text("import sys\nsys.exit()\n")
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
    without = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "transformer.wte.weight")}
    save_checkpoint(folder / "missing", model, model=without)
    save_checkpoint(folder / "misshapen", model, model=tensors | {"transformer.wpe.weight": torch.ones(9, 24)})
    save_checkpoint(folder / "rope", model, model_args=args | {"rope": True})
    save_checkpoint(folder / "huge", model, model_args=args | {"block_size": 10**30})
    save_checkpoint(folder / "bias", model, model_args=args | {"bias": torch.tensor([True, False])})
    save_checkpoint(folder / "bare", model, meta=False)
    save_checkpoint(folder / "other", model)
    save_meta(folder / "other" / "meta.pkl", "\nab")
    save_checkpoint(folder / "nan", model, model=tensors | {"transformer.ln_f.bias": torch.full((24,), torch.nan)})


@pytest.mark.parametrize("arguments, status, message", [
    pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in BAD.items()])
def test_bad_input_is_one_error_line(run_script, bad_input_folder, arguments, status, message):
    done = run_script("--out_dir=out", *FAST, *arguments, cwd=bad_input_folder)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == status, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert len(errors) == 1 and errors[0] == done.stderr.splitlines()[-1]
    assert message in errors[0]
    if status == 2:
        assert done.stderr.count("\n") == 1


def test_without_gpt2s_encoding_the_error_names_the_files_to_download(run_script, tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50304), meta=False)
    done = run_script(f"--out_dir={tmp_path}", TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"), HTTPS_PROXY="http://127.0.0.1:9")
    assert done.returncode == 1 and done.stdout == ""
    for name in "vocab.bpe", "encoder.json", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "TIKTOKEN_CACHE_DIR":
        assert name in done.stderr
