"""The script whole, as a process: what it prints, what it refuses, and that its samples are nanoGPT's."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizer import GPT2Tokenizer

from conftest import (
    CHARS,
    PROJECT,
    RULE,
    SHAPE,
    make_gpt,
    make_transformers_gpt2,
    nanogpt_args,
    nanogpt_samples,
    save_checkpoint,
    save_meta,
)

FAST = "--num_samples=1", "--max_new_tokens=5"


def expected_text(model, prompt, **how):
    """What nanoGPT prints for a character model: its samples one after another, in full and with their rules."""
    ids = [CHARS.index(char) for char in prompt]
    samples = nanogpt_samples(nanogpt_args(model.config), model.state_dict(), prompt=ids, **how)
    return "".join("".join(CHARS[i] for i in sample) + f"\n{RULE}\n" for sample in samples)


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 4])
def test_samples_are_those_drawn_one_by_one(sample, letters, batch_size):
    done = sample(f"--out_dir={letters}", "--num_samples=4", "--max_new_tokens=30", "--start=The ", "--top_k=30",
                  "--temperature=0.9", "--seed=5", f"--batch_size={batch_size}", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text(make_gpt(), "The ", seed=5, num_samples=4, max_new_tokens=30, top_k=30, temperature=0.9)


def test_the_defaults_are_nanogpts(sample, letters):
    done = sample(f"--out_dir={letters}", "--device=cpu")
    assert done.stdout == expected_text(make_gpt(), "\n", seed=1337, num_samples=10, max_new_tokens=500, top_k=200, temperature=0.8)


@pytest.mark.skipif(not list(Path(torch.__file__).parent.glob("lib*/*gomp*")), reason="this torch has another OpenMP")
@pytest.mark.parametrize("set_before, found", [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
                         ids=str)
def test_threads_wait_awake_for_a_moment_only(sample, letters, set_before, found):
    done = sample(f"--out_dir={letters}", *FAST, "--device=cpu", OMP_DISPLAY_ENV="verbose", **set_before)
    assert f"GOMP_SPINCOUNT = '{found}'" in done.stderr


@pytest.mark.parametrize("how", [dict(top_k=200), dict(top_k=0, top_p=0.9, min_p=0.01, repetition_penalty=1.2)], ids=str)
def test_samples_of_hugging_face_weights_are_those_of_transformers(sample, gpt2_folder, gpt2_encoding, how):
    tokenizer, theirs = GPT2Tokenizer(), make_transformers_gpt2()
    idx = torch.tensor([tokenizer.encode("Hello, I'm a")])
    torch.manual_seed(3)
    expected = [theirs.generate(idx, do_sample=True, max_new_tokens=25, temperature=0.8, eos_token_id=None, pad_token_id=0,
                                **how)[0].tolist() for _ in range(3)]
    done = sample(f"--init_from={gpt2_folder}", "--start=Hello, I'm a", "--num_samples=3", "--max_new_tokens=25", "--seed=3",
                  "--batch_size=2", "--device=cpu", *(f"--{name}={value}" for name, value in how.items()))
    assert done.stdout == "".join(f"{tokenizer.decode(ids)}\n{RULE}\n" for ids in expected)


def test_stdout_holds_the_samples_and_stderr_the_rest(sample, letters):
    done = sample(f"--out_dir={letters}", "--num_samples=3", "--max_new_tokens=5", "--start=AB")
    assert re.fullmatch(rf"(AB[^-]{{5}}\n{RULE}\n){{3}}", done.stdout)
    assert "num_samples=3" in done.stderr and "parameters" in done.stderr and "tokens/s" in done.stderr


@pytest.mark.parametrize("arguments, starts", [
    (["--start=123"], "123"),
    (["--start=a=b"], "a=b"),
    (['--start="\\n"'], "\n"),
    (["--start", "two words"], "two words"),
    (["--temperature=1"], "\n"),
    (["--temperature=0"], "\n"),
    (["--top_k=None"], "\n"),
    (["--top_k=0"], "\n"),
    (["--top-k", "5"], "\n"),
    (["--seed=-1"], "\n"),
    (["--context_shift", "--start=A"], "A"),
    (["--dtype=bfloat16"], "\n"),
    (["--dtype=float16"], "\n"),
    (["--start=FILE:prompt.txt"], "Zürich\nis"),
    (["--start=FILE:-"], "piped"),
    (["one.py", "--num_samples=1"], "one"),
    (["one.py", "two.py"], "two"),
    (["config/greedy.py"], "\n"),
], ids=str)
def test_settings_that_must_work(sample, tmp_path, arguments, starts):
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=80))
    save_meta(tmp_path / "out" / "meta.pkl", CHARS + "=ü0123456789")
    (tmp_path / "prompt.txt").write_bytes("Zürich\r\nis".encode())
    (tmp_path / "one.py").write_text("num_samples = 2\nstart = 'one'\n")
    (tmp_path / "two.py").write_text("num_samples = 1\nstart = 'two'\n")
    done = sample(*FAST, *arguments, cwd=tmp_path, stdin=b"piped")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(starts) and len(done.stdout) == len(starts) + 5 + len(f"\n{RULE}\n")


def test_no_new_tokens_print_the_prompt(sample, letters):
    assert sample(f"--out_dir={letters}", "--max_new_tokens=0", "--num_samples=2", "--start=Hi").stdout == f"Hi\n{RULE}\n" * 2


def test_top_k_off_is_every_token(sample, letters):
    runs = [sample(f"--out_dir={letters}", "--num_samples=1", "--max_new_tokens=40", f"--top_k={k}").stdout for k in ("None", 0, 61)]
    assert runs[0] == runs[1] == runs[2] != sample(f"--out_dir={letters}", "--num_samples=1", "--max_new_tokens=40", "--top_k=2").stdout


def test_gpt2_encoding_without_a_table(sample, tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50304), meta=False)
    done = sample(f"--out_dir={tmp_path}", "--start=Hi<|endoftext|>", "--num_samples=2", "--max_new_tokens=8")
    assert done.returncode == 0 and done.stdout.count("Hi<|endoftext|>") == 2


def test_padded_ids_show_as_replacement_characters(sample, tmp_path):
    model = make_gpt(vocab_size=64) # that likes only ids past the table
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.lm_head.weight[:len(CHARS)] = 0
        model.lm_head.weight[len(CHARS):] = 9
    save_checkpoint(tmp_path, model)
    assert sample(f"--out_dir={tmp_path}", "--start=A", *FAST).stdout == f"A{'�' * 5}\n{RULE}\n"


@pytest.mark.parametrize("chars", ["a", "ACGT"])
def test_a_page_of_fewer_characters_than_it_would_show(sample, tmp_path, chars):
    save_checkpoint(tmp_path, make_gpt(vocab_size=len(chars)), meta=False)
    save_meta(tmp_path / "meta.pkl", chars)
    done = sample(f"--out_dir={tmp_path}", f"--start={chars}", *FAST, f"--html_file={tmp_path / 'a.html'}")
    assert done.returncode == 0 and done.stdout.startswith(chars), done.stderr
    row = json.loads(re.search(r'<script type="application/json">(.*?)</script>', (tmp_path / "a.html").read_text())[1])
    assert all(len(token) == 2 + 2 * len(chars) for token in row)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("samples, batch_size", [(2, 2), (3, 2), (9, 9)])
def test_compile_compiles_and_says_how_long_it_took(sample, letters, samples, batch_size):
    """All that runs is compiled by then: also a last batch that is smaller, and where sizes happen to be equal."""
    arguments = (f"--out_dir={letters}", f"--num_samples={samples}", f"--batch_size={batch_size}", "--max_new_tokens=25",
                 "--start=ROMEO:")
    done = sample(*arguments, "--compile", TORCH_LOGS="recompiles")
    assert done.returncode == 0, done.stderr
    before, _, after = re.split(r"(compiled in \d+\.\d s)", done.stderr)
    assert "Recompiling" in before and "Recompiling" not in after
    assert done.stdout == sample(*arguments).stdout


BAD = {
    "unknown-setting": (["--temprature=1"], 2, "did you mean temperature?"),
    "no-value": (["--top_k"], 2, "--top_k needs a value"),
    "no-number": (["--num_samples=many"], 2, "num_samples takes a whole number"),
    "no-samples": (["--num_samples=0"], 2, "num_samples must be at least 1"),
    "negative-tokens": (["--max_new_tokens=-1"], 2, "max_new_tokens must be from 0"),
    "negative-temperature": (["--temperature=-0.5"], 2, "temperature must be"),
    "infinite-temperature": (["--temperature=1e999"], 2, "temperature must be"),
    "nan-temperature": (["--temperature=nan"], 2, "temperature takes a number"),
    "nan-in-a-file": (["nan.py"], 2, "temperature must be"),
    "negative-top_k": (["--top_k=-1"], 2, "top_k must be at least 1"),
    "negative-top_k-in-a-file": (["bad.py"], 2, "top_k must be at least 1"),
    "no-batch": (["--batch_size=0"], 2, "batch_size must be from 1 to 100000"),
    "huge-seed": (["--seed=99999999999999999999"], 2, "seed must lie between"),
    "unknown-device": (["--device=tpu"], 2, "device must be auto, cpu, cuda"),
    "absent-device": (["--device=cuda"], 1, "device=cuda is not there"),
    "absent-second-device": (["--device=cuda:7"], 1, "device=cuda:7 is not there"),
    "unknown-dtype": (["--dtype=int8"], 2, "dtype must be auto, float32"),
    "scratch": (["--init_from=scratch"], 2, "init_from must be"),
    "no-settings-file": (["nowhere.py"], 2, "cannot read the settings file 'nowhere.py'"),
    "checkpoint-as-settings": (["out/ckpt.pt"], 2, "out/ckpt.pt"),
    "broken-settings-file": (["broken.py"], 2, "broken.py, line 1: SyntaxError"),
    "empty-prompt": (["--start="], 2, "start is empty"),
    "empty-prompt-file": (["--start=FILE:empty.txt"], 1, "empty.txt is empty"),
    "empty-standard-input": (["--start=FILE:-"], 1, "- is empty"),
    "no-prompt-file": (["--start=FILE:nowhere.txt"], 1, "cannot read the prompt file 'nowhere.txt': No such file"),
    "folder-as-prompt": (["--start=FILE:out"], 1, "cannot read the prompt file 'out'"),
    "latin-1-prompt": (["--start=FILE:latin.txt"], 1, "latin.txt is not UTF-8"),
    "lacking-character": (["--start=naïve"], 1, "'ï' at 3"),
    "literal-newline": (["--start=A\\nB"], 1, "for a newline pass"),
    "no-checkpoint": (["--out_dir=nowhere"], 1, "there is no checkpoint at nowhere; nearby there is one in"),
    "no-checkpoint-in-folder": (["--out_dir=folder"], 1, "there is no checkpoint at folder/ckpt.pt"),
    "text-as-checkpoint": (["--out_dir=empty.txt"], 1, "cannot read empty.txt"),
    "cut-checkpoint": (["--out_dir=cut.pt"], 1, "cannot read cut.pt"),
    "missing-tensor": (["--out_dir=missing"], 1, "missing/ckpt.pt: the tensors do not fit the network; missing: transformer.wte.weight, lm_head.weight"),
    "misshapen-tensor": (["--out_dir=misshapen"], 1, "misshapen: transformer.wpe.weight (9, 24) instead of (16, 24)"),
    "odd-model_args": (["--out_dir=rope"], 1, "model_args holds what GPT does not have: rope"),
    "table-too-small": (["--out_dir=other"], 1, "other/meta.pkl has 3 tokens and the network 61"),
    "no-table": (["--out_dir=bare"], 1, "GPT-2's encoding has 50257 tokens and the network 61"),
    "nan-weights": (["--out_dir=nan"], 1, "NaN or infinite"),
    "nan-weights-greedy": (["--out_dir=nan", "--temperature=0"], 1, "NaN or infinite"),
    "no-hub-id": (["--init_from=no/such/model"], 1, "neither 'resume', nor a folder here, nor a Hugging Face id"),
    "no-network": (["--init_from=gpt2"], 1, "could not get 'gpt2'"),
    "no-hugging-face-folder": (["--init_from=folder"], 1, "no config.json"),
    "checkpoint-as-hugging-face": (["--init_from=out"], 1, "for a ckpt.pt pass --out_dir=out"),
    "hugging-face-as-checkpoint": (["--out_dir=hf"], 1, "pass --init_from=hf"),
    "float-in-config.json": (["--init_from=hf"], 1, "cannot load hf: n_layer must be a whole number"),
    "missing-shard": (["--init_from=shards"], 1, "'b.safetensors' is none"),
    "huge-size": (["--out_dir=huge"], 1, "block_size must be a whole number"),
    "odd-bias": (["--out_dir=bias"], 1, "bias/ckpt.pt holds model_args with 'bias': Tensor"),
    "huge-numbers": (["--num_samples=" + "9" * 30], 2, "num_samples must be"),
    "huge-length": (["--max_new_tokens=" + "9" * 30], 2, "max_new_tokens must be"),
    "huge-batch": (["--batch_size=" + "9" * 30], 2, "batch_size must be"),
    "huge-number-in-a-file": (["vast.py"], 2, "got one of 16610 bits"),
    "file-that-exits": (["exits.py"], 2, "exits.py, line 2: SystemExit"),
    "top_p-0": (["--top_p=0"], 2, "top_p must be above 0 and at most 1"),
    "min_p-2": (["--min_p=2"], 2, "min_p must be from 0 to 1"),
    "penalty-0": (["--repetition_penalty=0"], 2, "repetition_penalty must be from 0.01 to 100"),
    "penalty-nan": (["nan_penalty.py"], 2, "repetition_penalty must be from 0.01 to 100"),
    "stop-is-a-number": (["stop.py"], 2, "stop.py: stop takes text or a list or None, got 5"),
    "one-file-for-two": (["--out_file=a.x", "--html_file=folder/../a.x"], 2, "out_file and html_file must be two files"),
    "nul-in-out_file": (["--out_file='a\\0b'"], 2, "out_file must be the path"),
    "nan-as-an-id": (["--start=JSONL:nan.jsonl"], 1, "nan.jsonl, line 1: every line must be an object"),
    "empty-stop": (["--stop="], 2, "stop must be a text"),
    "stop-of-numbers": (["stops.py"], 2, "stop must be a text, or in a settings file a list of texts"),
    "no-out_file": (["--out_file="], 2, "out_file must be the path"),
    "no-html_file": (["--html_file="], 2, "html_file must be the path"),
    "out_file-in-no-folder": (["--out_file=no/such/a.jsonl"], 1, "no/such/a.jsonl"),
    "out_file-is-a-folder": (["--out_file=folder"], 1, "folder"),
    "out_file-of-others": (["--out_file=bad.py"], 1, "bad.py, line 1: not one of sample.py's"),
    "interactive-saving": (["--interactive", "--out_file=a.jsonl"], 2, "leave out_file and html_file out"),
    "no-lines-file": (["--start=LINES:nothing.txt"], 1, "cannot read the prompt file 'nothing.txt'"),
    "empty-lines": (["--start=LINES:empty.txt"], 1, "empty.txt is empty"),
    "latin-lines": (["--start=LINES:latin.txt"], 1, "is not UTF-8"),
    "line-with-a-strange-character": (["--start=LINES:lines.txt"], 1, "lines.txt, line 3: the prompt has characters"),
    "no-json": (["--start=JSONL:lines.txt"], 1, "lines.txt, line 1: every line must be an object"),
    "json-without-a-prompt": (["--start=JSONL:objects.jsonl"], 1, "objects.jsonl, line 2: every line must be an object"),
    "nul-in-a-path": (["--start='FILE:a\\0b'"], 1, "null byte"),
}


@pytest.fixture(scope="session")
def bad_things(tmp_path_factory):
    """A folder with a good checkpoint in out/ and everything that BAD names."""
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
    return folder


@pytest.mark.parametrize("arguments, status, said", BAD.values(), ids=BAD)
def test_bad_input_gets_one_clear_line(sample, bad_things, arguments, status, said):
    done = sample("--out_dir=out", *FAST, *arguments, cwd=bad_things)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == status, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert len(errors) == 1 and errors[0] == done.stderr.splitlines()[-1]
    assert said in errors[0]
    if status == 2:
        assert done.stderr.count("\n") == 1


def test_a_hostile_checkpoint_and_table_run_nothing(sample, tmp_path):
    import pickle
    class Runs:
        def __init__(self, name):
            self.name = name

        def __reduce__(self):
            return os.system, (f"touch '{tmp_path / self.name}'",)

    save_checkpoint(tmp_path / "a", make_gpt(), optimizer=Runs("ran-a"))
    save_checkpoint(tmp_path / "b", make_gpt())
    (tmp_path / "b" / "meta.pkl").write_bytes(pickle.dumps({"stoi": {}, "itos": Runs("ran-b")}))
    for out_dir in "ab":
        done = sample(f"--out_dir={tmp_path / out_dir}", *FAST)
        assert done.returncode == 1 and "could run code" in done.stderr and done.stdout == ""
    assert not list(tmp_path.glob("ran*"))


def test_gpt2_encoding_offline_says_which_files(sample, tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50304), meta=False)
    done = sample(f"--out_dir={tmp_path}", TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"), HTTPS_PROXY="http://127.0.0.1:9")
    assert done.returncode == 1 and done.stdout == ""
    for said in "vocab.bpe", "encoder.json", "TIKTOKEN_CACHE_DIR":
        assert said in done.stderr


@pytest.mark.parametrize("after", [0.3, 0.6, 3.0])
def test_ctrl_c_ends_the_run_at_once(letters, after):
    """While torch is imported, and while it samples; what is printed by then is whole."""
    command = [sys.executable, PROJECT / "sample.py", f"--out_dir={letters}", "--num_samples=100000", "--batch_size=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said
    assert printed == "" or printed.endswith(f"\n{RULE}\n")


def test_a_closed_stderr_takes_nothing_to_stdout(letters):
    command = f"{sys.executable} {PROJECT / 'sample.py'} --out_dir={letters} --num_samples=2 --start=Hi --max_new_tokens=0 2>&-"
    assert subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True).stdout == f"Hi\n{RULE}\n" * 2


def test_a_character_that_stdout_cannot_show_ends_nothing(sample, tmp_path):
    save_checkpoint(tmp_path, make_gpt())
    save_meta(tmp_path / "meta.pkl", CHARS[:-1] + "é")
    assert sample(f"--out_dir={tmp_path}", *FAST, "--start=é", PYTHONIOENCODING="ascii").stdout.startswith("?")


def test_a_closed_pipe_is_no_error(letters):
    command = f"{sys.executable} {PROJECT / 'sample.py'} --out_dir={letters} --batch_size=1 --max_new_tokens=5 --num_samples=50 | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "error" not in done.stderr and done.returncode == 141


LITTLE_MEMORY = """
import resource, runpy, sys, torch
torch.ones(2, 2) @ torch.ones(2, 2)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, -1))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
def test_where_memory_is_short_fewer_samples_are_drawn_at_once(sample, tmp_path):
    save_checkpoint(tmp_path, make_gpt(n_layer=4, n_embd=128, block_size=1024))
    settings = [f"--out_dir={tmp_path}", "--start=" + "a" * 1000, "--max_new_tokens=3", "--num_samples=128"]
    code = f"import sys; sys.argv = {[str(PROJECT / 'sample.py'), *settings, '--batch_size=128']!r}\n{LITTLE_MEMORY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "out of memory with 128 samples at once: going on with 64" in done.stderr
    assert done.stdout == sample(*settings, "--batch_size=16").stdout


def test_a_prompt_of_ten_megabytes(sample, letters, tmp_path):
    """Only its end fits the window; all of it is printed."""
    prompt = ("To be, or not to be: that is the question.\n" * 250_000)[-10_000_000:]
    (tmp_path / "long.txt").write_text(prompt)
    long = sample(f"--out_dir={letters}", *FAST, f"--start=FILE:{tmp_path / 'long.txt'}").stdout
    end = prompt[-SHAPE["block_size"]:]
    assert long.startswith(prompt) and long[len(prompt) - len(end):] == sample(f"--out_dir={letters}", *FAST, f"--start={end}").stdout
