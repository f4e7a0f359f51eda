"""The whole script: what it prints, and that its samples equal nanoGPT's."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models import CHARS, SHAPE, make_gpt, make_transformers_gpt2, nanogpt_args, save_checkpoint, save_meta
from oracles import nanogpt_samples
from project import PROJECT, RULE, SCRIPT
from sampling.inputs.gpt2_tokenizer import GPT2Tokenizer

FAST = "--num_samples=1", "--max_new_tokens=5"
BUSY = "import time; end = time.monotonic() + 300\nwhile time.monotonic() < end: pass" # a program that uses a core
needs_gomp = pytest.mark.skipif(not list(Path(torch.__file__).parent.glob("lib*/*gomp*")), reason="this torch has another OpenMP")


def expected_text(model, prompt, **sampling):
    """What nanoGPT prints for a character-level model: all samples, each followed by the rule."""
    ids = [CHARS.index(char) for char in prompt]
    samples = nanogpt_samples(nanogpt_args(model.config), model.state_dict(), prompt=ids, **sampling)
    return "".join("".join(CHARS[i] for i in sample) + f"\n{RULE}\n" for sample in samples)


@pytest.mark.parametrize("batch_size", [None, 1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_samples_equal_nanogpts_with_any_batch_size(run_script, char_checkpoint, batch_size):
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=4", "--max_new_tokens=30", "--start=The ", "--top_k=30",
                  "--temperature=0.9", "--seed=5", f"--batch_size={batch_size}", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text(make_gpt(), "The ", seed=5, num_samples=4, max_new_tokens=30, top_k=30, temperature=0.9)


def test_samples_with_default_settings_equal_nanogpts(run_script, tmp_path):
    model = make_gpt(n_layer=1) # 5000 tokens take nanoGPT long
    save_checkpoint(tmp_path, model)
    done = run_script(f"--out_dir={tmp_path}", "--device=cpu", separate=True)
    assert done.stdout == expected_text(model, "\n", seed=1337, num_samples=10, max_new_tokens=500, top_k=200, temperature=0.8)


@needs_gomp
@pytest.mark.skipif(os.cpu_count() > 16 or not Path("/proc/loadavg").exists(), reason="too many cores to keep busy, or not Linux")
def test_waiting_threads_sleep_if_other_programs_use_the_cores(run_script, char_checkpoint):
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count())]
    try:
        done = run_script(f"--out_dir={char_checkpoint}", *FAST, "--device=cpu", OMP_DISPLAY_ENV="verbose")
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert "GOMP_SPINCOUNT = '0'" in done.stderr


@pytest.mark.slow
@needs_gomp
@pytest.mark.parametrize("variables, spin_count", [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")], ids=str)
def test_the_users_own_settings_of_waiting_threads_stay(run_script, char_checkpoint, variables, spin_count):
    done = run_script(f"--out_dir={char_checkpoint}", *FAST, "--device=cpu", OMP_DISPLAY_ENV="verbose", **variables)
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr


@pytest.mark.parametrize("sampling", [
    pytest.param(dict(top_k=200), marks=pytest.mark.slow), dict(top_k=0, top_p=0.9, min_p=0.01, repetition_penalty=1.2)], ids=str)
def test_samples_of_hugging_face_weights_equal_transformers(run_script, gpt2_folder, gpt2_encoding, sampling):
    tokenizer, theirs = GPT2Tokenizer(), make_transformers_gpt2()
    idx = torch.tensor([tokenizer.encode("Hello, I'm a")])
    torch.manual_seed(3)
    expected = [theirs.generate(idx, do_sample=True, max_new_tokens=25, temperature=0.8, eos_token_id=None, pad_token_id=0,
                                **sampling)[0].tolist() for _ in range(3)]
    done = run_script(f"--init_from={gpt2_folder}", "--start=Hello, I'm a", "--num_samples=3", "--max_new_tokens=25", "--seed=3",
                  "--batch_size=2", "--device=cpu", *(f"--{name}={value}" for name, value in sampling.items()))
    assert done.stdout == "".join(f"{tokenizer.decode(ids)}\n{RULE}\n" for ids in expected)


def test_the_script_finds_nanogpts_data_folder_from_another_folder(run_script, tmp_path):
    save_checkpoint(tmp_path / "nanoGPT" / "out-letters", make_gpt(), meta=False)
    save_meta(tmp_path / "nanoGPT" / "data" / "letters" / "meta.pkl")
    (tmp_path / "elsewhere").mkdir()
    expected = expected_text(make_gpt(), "The ", seed=5, num_samples=1, max_new_tokens=5, top_k=200, temperature=0.8)
    done = run_script(f"--out_dir={tmp_path / 'nanoGPT' / 'out-letters'}", *FAST, "--start=The ", "--seed=5", "--device=cpu", cwd=tmp_path / "elsewhere")
    assert done.stdout == expected, done.stderr


def test_samples_go_to_stdout_and_messages_to_stderr(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=3", "--max_new_tokens=5", "--start=AB")
    assert re.fullmatch(rf"(AB[^-]{{5}}\n{RULE}\n){{3}}", done.stdout)
    assert "num_samples=3" in done.stderr and "parameters" in done.stderr and "tokens/s" in done.stderr


@pytest.mark.parametrize("arguments, prompt", [
    pytest.param(["--start=123"], "123", marks=pytest.mark.slow),
    pytest.param(["--start=a=b"], "a=b", marks=pytest.mark.slow),
    pytest.param(['--start="\\n"'], "\n", marks=pytest.mark.slow),
    pytest.param(["--start", "two words"], "two words", marks=pytest.mark.slow),
    pytest.param(["--temperature=1"], "\n", marks=pytest.mark.slow),
    (["--temperature=0"], "\n"),
    pytest.param(["--top_k=None"], "\n", marks=pytest.mark.slow),
    pytest.param(["--top_k=0"], "\n", marks=pytest.mark.slow),
    pytest.param(["--top-k", "5"], "\n", marks=pytest.mark.slow),
    pytest.param(["--seed=-1"], "\n", marks=pytest.mark.slow),
    (["--context_shift", "--start=A", "--seed=-1"], "A"),
    (["--dtype=bfloat16"], "\n"),
    (["--dtype=float16"], "\n"),
    (["--start=FILE:prompt.txt"], "Zürich\nis"),
    pytest.param(["--start=FILE:-"], "piped", marks=pytest.mark.slow),
    (["one.py", "--num_samples=1"], "one"),
    pytest.param(["one.py", "two.py"], "two", marks=pytest.mark.slow),
    pytest.param(["config/greedy.py"], "\n", marks=pytest.mark.slow),
], ids=str)
def test_valid_settings_run(run_script, tmp_path, arguments, prompt):
    save_checkpoint(tmp_path / "out", make_gpt(vocab_size=80))
    save_meta(tmp_path / "out" / "meta.pkl", CHARS + "=ü0123456789")
    (tmp_path / "prompt.txt").write_bytes("Zürich\r\nis".encode())
    (tmp_path / "one.py").write_text("num_samples = 2\nstart = 'one'\n")
    (tmp_path / "two.py").write_text("num_samples = 1\nstart = 'two'\n")
    done = run_script(*FAST, *arguments, cwd=tmp_path, stdin=b"piped")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt) and len(done.stdout) == len(prompt) + 5 + len(f"\n{RULE}\n")


def test_0_new_tokens_print_the_prompt(run_script, char_checkpoint):
    assert run_script(f"--out_dir={char_checkpoint}", "--max_new_tokens=0", "--num_samples=2", "--start=Hi").stdout == f"Hi\n{RULE}\n" * 2


def test_top_k_none_0_and_the_vocabulary_size_keep_all_tokens(run_script, char_checkpoint):
    run = f"--out_dir={char_checkpoint}", "--num_samples=1", "--max_new_tokens=40"
    off = [run_script(*run, f"--top_k={k}").stdout for k in ("None", 0, 61)]
    assert off[0] == off[1] == off[2] != run_script(*run, "--top_k=2").stdout


def test_a_checkpoint_without_a_vocabulary_uses_gpt2s_encoding(needs_gpt2_encoding, run_script, tmp_path):
    save_checkpoint(tmp_path, make_gpt(vocab_size=50304), meta=False)
    done = run_script(f"--out_dir={tmp_path}", "--start=Hi<|endoftext|>", "--num_samples=2", "--max_new_tokens=8")
    assert done.returncode == 0 and done.stdout.count("Hi<|endoftext|>") == 2


def test_ids_beyond_the_vocabulary_are_printed_as_replacement_characters(run_script, tmp_path):
    model = make_gpt(vocab_size=64) # its weights prefer the ids that pad the vocabulary
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.lm_head.weight[:len(CHARS)] = 0
        model.lm_head.weight[len(CHARS):] = 9
    save_checkpoint(tmp_path, model)
    assert run_script(f"--out_dir={tmp_path}", "--start=A", *FAST).stdout == f"A{'�' * 5}\n{RULE}\n"


@pytest.mark.parametrize("chars", ["a", "ACGT"])
def test_the_page_of_a_model_with_few_tokens_shows_all_tokens_as_alternatives(run_script, tmp_path, chars):
    save_checkpoint(tmp_path, make_gpt(vocab_size=len(chars)), meta=False)
    save_meta(tmp_path / "meta.pkl", chars)
    done = run_script(f"--out_dir={tmp_path}", f"--start={chars}", *FAST, f"--html_file={tmp_path / 'a.html'}")
    assert done.returncode == 0 and done.stdout.startswith(chars), done.stderr
    tokens = json.loads(re.search(r'<script type="application/json">(.*?)</script>', (tmp_path / "a.html").read_text())[1])
    assert len(tokens) == 5 and all(len(token) == 2 + 2 * len(chars) for token in tokens)


@pytest.mark.slow # test_eager.py compiles in the quick run
@pytest.mark.parametrize("n_layer, num_samples, batch_size", [(2, 3, 2), (1, 9, 9)])
def test_compile_compiles_everything_before_the_first_sample(run_script, tmp_path, n_layer, num_samples, batch_size):
    """Also if the last batch is smaller, and if two axes have the same size."""
    save_checkpoint(tmp_path, make_gpt(n_layer=n_layer))
    arguments = (f"--out_dir={tmp_path}", f"--num_samples={num_samples}", f"--batch_size={batch_size}", "--max_new_tokens=25",
                 "--start=ROMEO:")
    done = run_script(*arguments, "--compile", TORCH_LOGS="recompiles")
    assert done.returncode == 0, done.stderr
    before, _, after = re.split(r"(compiled in \d+\.\d s)", done.stderr)
    assert "Recompiling" in before and "Recompiling" not in after
    assert done.stdout == run_script(*arguments).stdout


LITTLE_MEMORY = """
import resource, runpy, sys, torch
torch.ones(2, 2) @ torch.ones(2, 2)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20, -1))
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow # generation/test_engine_failures.py has the same without a process
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
def test_out_of_memory_halves_the_batch(run_script, tmp_path):
    save_checkpoint(tmp_path, make_gpt(n_layer=4, n_embd=128, block_size=1024))
    settings = [f"--out_dir={tmp_path}", "--start=" + "a" * 1000, "--max_new_tokens=3", "--num_samples=128"]
    code = f"import sys; sys.argv = {[str(SCRIPT), *settings, '--batch_size=128']!r}\n{LITTLE_MEMORY}"
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"} # each arena of a thread takes 128 MB of the address space
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, env=env)
    assert done.returncode == 0, done.stderr
    assert "out of memory with 128 samples at once: continuing with 64" in done.stderr
    assert done.stdout == run_script(*settings, "--batch_size=16").stdout


@pytest.mark.slow
def test_a_prompt_of_ten_megabytes_is_printed_in_full(run_script, char_checkpoint, tmp_path):
    """The model sees only its last tokens, but the script prints all of it."""
    prompt = ("To be, or not to be: that is the question.\n" * 250_000)[-10_000_000:]
    (tmp_path / "long.txt").write_text(prompt)
    printed = run_script(f"--out_dir={char_checkpoint}", *FAST, f"--start=FILE:{tmp_path / 'long.txt'}").stdout
    end = prompt[-SHAPE["block_size"]:]
    assert printed.startswith(prompt)
    assert printed[len(prompt) - len(end):] == run_script(f"--out_dir={char_checkpoint}", *FAST, f"--start={end}").stdout
