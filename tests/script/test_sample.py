"""The script prints the samples of nanoGPT and of transformers, and nothing else on stdout."""
import json
import pickle
import re
import time
from types import SimpleNamespace

import pytest
import torch

import sampling
from models import CHARS, make_gpt, make_transformers_gpt2, save_checkpoint, save_repeating
from oracles import nanogpt_samples
from project import RULE, SCRIPT
from sampling import jit
from sampling.inputs.tokenizer_choice import TiktokenTokenizer
from sampling.outputs import printer
from script_process import run_python


def printed(texts):
    """What the script prints for these samples."""
    return "".join(f"{text}\n{RULE}\n" for text in texts)


def nanogpt_output(model, start, **settings):
    """What nanoGPT prints for a character-level model."""
    ids = [CHARS.index(char) for char in start]
    samples = nanogpt_samples(model, prompt=ids, **settings)
    return printed("".join(CHARS[i] for i in sample) for sample in samples)


def flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def test_samples_in_batches_equal_nanogpts(run_script, char_checkpoint):
    settings = dict(start="The ", num_samples=4, max_new_tokens=30, top_k=30, temperature=0.9,
                    seed=-5)
    cluster = dict(RANK="3", WORLD_SIZE="4") # has variables of its own
    done = run_script(f"--out_dir={char_checkpoint}", *flags(settings), "--device=cpu",
                      "--batch_size=3", **cluster)
    assert done.stdout == nanogpt_output(make_gpt(), **settings), done.stderr


def test_samples_with_default_settings_equal_nanogpts(run_script, tmp_path):
    model = make_gpt(n_layer=1) # 5000 tokens take nanoGPT long
    save_checkpoint(tmp_path, model)
    expected = nanogpt_output(model, "\n", seed=1337, num_samples=10, max_new_tokens=500, top_k=200,
                              temperature=0.8)
    assert run_script(f"--out_dir={tmp_path}", "--device=cpu").stdout == expected


def test_what_is_wrong_is_said_before_kernels_are_compiled(run_script, folder, monkeypatch):
    run = ("--device=cpu", "--max_new_tokens=60", "--num_samples=1", "--out_file=a.jsonl")
    run_script(*run, cwd=folder)
    monkeypatch.setattr(jit, "load_kernels", lambda calls: pytest.fail("they are compiled"))
    assert ": nothing to do" in run_script(*run, cwd=folder).stderr
    for mistake, message in ("--start=\xe9", "lacks"), ("--seed=2", "is from another run"):
        assert message in run_script(*run, mistake, cwd=folder).stderr


@pytest.mark.parametrize("kind", ["--num_samples=1", "--score"])
def test_the_clock_of_a_run_begins_when_the_kernels_are_ready(
        run_script, folder, monkeypatch, kind):
    hours = [0]
    monkeypatch.setattr(jit, "load_kernels", lambda calls: hours.append(1))
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600 * sum(hours))
    monkeypatch.setattr(printer, "time", clock)
    last_line = run_script("--device=cpu", kind, cwd=folder).stderr.splitlines()[-1]
    assert re.search(r"in \d\d?\.\d s: ", last_line)


def test_int8_samples_do_not_depend_on_the_batch_size(run_script, folder):
    run = ("--device=cpu", "--dtype=int8", "--context_shift", "--start=LINES:prompts.txt",
           "--num_samples=2", "--max_new_tokens=20")
    first, *others = (run_script(*run, f"--batch_size={size}", cwd=folder)
                      for size in (1, 4, None))
    assert "on cpu in int8\n" in first.stderr
    assert first.stdout.count(RULE) == 10
    assert [done.stdout for done in others] == 2 * [first.stdout]


@pytest.mark.parametrize("settings", [
    dict(top_k=200), dict(top_k=0, top_p=0.9, min_p=0.01, repetition_penalty=1.2)])
def test_samples_of_hugging_face_weights_equal_transformers(
        run_script, gpt2_folder, gpt2_encoding, settings):
    tokenizer = TiktokenTokenizer()
    theirs = make_transformers_gpt2()
    settings = dict(max_new_tokens=25, temperature=0.8, **settings)
    idx = torch.tensor([tokenizer.encode("Hello, I'm a")])
    expected = []
    torch.manual_seed(3)
    for _ in range(3):
        ids = theirs.generate(idx, do_sample=True, eos_token_id=None, pad_token_id=0, **settings)
        expected.append(tokenizer.decode(ids[0]))
    done = run_script(f"--init_from={gpt2_folder}", "--start=Hello, I'm a", "--num_samples=3",
                      "--seed=3", "--batch_size=2", "--device=cpu", *flags(settings))
    assert done.stdout == printed(expected)


def test_samples_go_to_stdout_and_messages_to_stderr(run_script, char_checkpoint):
    prompt = "A prompt that is longer than the window"
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=3", "--max_new_tokens=5",
                      "--start=LINES:-", "--stop=\\n", stdin=prompt.encode())
    assert re.fullmatch(rf"({prompt}[^-]{{5}}\n{RULE}\n){{3}}", done.stdout)
    for part in (
            "num_samples=3", "parameters", "tokens/s", "if you mean a newline",
            "standard input, line 1: the prompt has 39 tokens, but the model sees only the last 16"
    ):
        assert part in done.stderr
    assert done.stderr.count("warning: ") == 1


def test_a_stop_text_that_no_tokens_spell_or_that_is_decomposed_gets_a_warning(
        run_script, char_checkpoint, gpt2_folder):
    run = "--interactive", "--max_new_tokens=1", "--stop=('|x', 'e')"
    done = run_script(f"--out_dir={char_checkpoint}", *run, stdin=b"The\nO\n")
    path = char_checkpoint / "meta.pkl"
    assert re.findall("warning.*", done.stderr) == [
        f"warning: the stop text '|x' never occurs: {path} lacks '|'"]
    done = run_script(f"--init_from={gpt2_folder}", *run,
                      "--stop=('<|endoftext|>', 'é', 'e\u0301')", stdin=b"The\n")
    assert re.findall("warning.*", done.stderr) == [
        r"warning: the stop text 'e\u0301' is decomposed (NFD); most texts have '\xe9'"]


def test_a_bad_line_of_a_pipe_ends_the_run_after_the_lines_before_it(run_script, char_checkpoint):
    lines = b'{"prompt": "A"}\n{"prompt": "B"}\n{"text": "C"}\n'
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=2", "--max_new_tokens=5",
                      "--start=JSONL:-", stdin=lines)
    assert done.returncode == 1
    assert done.stdout.count(RULE) == 4
    message = "error: standard input, line 3: every line must be an object with a prompt"
    assert message in done.stderr


def test_a_random_seed_is_printed_and_saved_and_gives_the_samples_again(
        run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", "--num_samples=2", "--max_new_tokens=30"
    saved = *run, f"--out_file={tmp_path}/a.jsonl"
    first = run_script(*saved, "--seed=random")
    drawn = re.search(r"seed: (\d+), drawn at random; seed=\1 gives", first.stderr)[1]
    assert run_script(*run, "--seed=random").stdout != first.stdout
    assert run_script(*run, f"--seed={drawn}").stdout == first.stdout
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        assert json.loads(line)["seed"] == int(drawn)
    assert "nothing to do" in run_script(*saved, f"--seed={drawn}").stderr


def test_init_from_in_a_settings_file_beside_a_checkpoint_gets_a_warning(
        run_script, gpt2_folder, char_checkpoint, tmp_path):
    (tmp_path / "tune.py").write_text(f"init_from = {str(gpt2_folder)!r}\n")
    run = f"--out_dir={char_checkpoint}", "--device=cpu", "--num_samples=1", "--max_new_tokens=1"
    by_file = run_script(*run, "tune.py", cwd=tmp_path)
    by_flag = run_script(*run, f"--init_from={gpt2_folder}")
    assert by_file.stdout == by_flag.stdout
    message = "so the samples are not those of the ckpt.pt in out_dir: pass --init_from=resume"
    assert [message in done.stderr for done in (by_file, by_flag)] == [True, False]


def test_a_deleted_working_directory_is_one_error_line(tmp_path):
    code = f"import os, runpy; os.rmdir({str(tmp_path)!r}); runpy.run_path({str(SCRIPT)!r}, None, "
    done = run_python("-c", f"{code}'__main__')", cwd=tmp_path, status=2)
    assert done.stderr == "error: the working directory was deleted: change to another one\n"


# ---- user errors of every kind: each ends the script with one line

ERRORS = [ # arguments, the exit status, a part of the error line
    ("-p", 2, "unknown setting -p; did you mean start?"),
    ("bad.py", 2, "bad.py: top_k must be from 1 to 10**9, or None or 0 for every token; got -5"),
    ("--start=FILE:-", 1, "is empty"),
    ("--start=JSONL:", 1,
     "error: cannot read the prompt file '': No such file or directory; JSONL: takes the path"),
    ("--start=LINES:- --watch", 1, "watch=True uses the prompts again for each checkpoint"),
]


@pytest.mark.parametrize("arguments, status, message", ERRORS)
def test_bad_input_is_one_error_line(run_script, tmp_path, arguments, status, message):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "bad.py").write_text("top_k = -5\n")
    done = run_script("--out_dir=out", "--device=cpu", "--num_samples=1", *arguments.split(),
                      cwd=tmp_path)
    assert done.returncode == status
    assert done.stdout == ""
    *others, error = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert "rror" not in "".join(others)
    assert status == 1 or not others


def test_a_leading_tilde_is_the_home_folder_unless_a_file_is_called_so(run_script, tmp_path):
    home = tmp_path / "home"
    save_checkpoint(home / "out", make_gpt())
    (home / "prompt").write_text("The ")
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "prompt").write_text("And ")
    run = ("--out_dir=~/out", "--tokenizer=~/out/meta.pkl", "--out_file=~/a.jsonl", "--overwrite",
           "--num_samples=1", "--device=cpu")
    for start, prompt in ("FILE:~/out/../prompt", "The "), ("FILE:~/prompt", "And "):
        done = run_script(*run, f"--start={start}", cwd=tmp_path, HOME=str(home))
        assert done.stdout.startswith(prompt), done.stderr
        assert (home / "a.jsonl").stat().st_size


def test_two_halves_of_a_character_are_the_character_and_one_half_is_an_error(run_script, tmp_path):
    save_repeating(tmp_path, [*"😀".encode()], 256)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    run = (f"--out_dir={tmp_path}", "--device=cpu", "--max_new_tokens=8", "--temperature=0",
           "--num_samples=1")
    pair = r'"\ud83d\ude00"'
    (tmp_path / "my.py").write_text(f"start = {pair}\n")
    for start in f"--start={pair}", tmp_path / "my.py":
        assert run_script(*run, start).stdout == printed(["😀😀😀"])
    saved = *run, f"--out_file={tmp_path}/a.jsonl", f"--stop=[{pair}]"
    assert run_script(*saved, f"--start={pair}").stdout == printed(["😀"]) # before the stop text
    assert "is complete" in run_script(*saved, "--start=😀").stderr
    message = "error: the prompt is not valid UTF-8 at character 2"
    assert message in run_script(*run, r'--start="a\ud83d"').stderr
    gpt = sampling.load(tmp_path, device="cpu")
    sample, = gpt.generate("\ud83d\ude00", stop="\ud83d\ude00", temperature=0)
    assert sample.prompt.text == "😀"
    assert sample.text == ""
