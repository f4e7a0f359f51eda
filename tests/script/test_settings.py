"""What the script says about settings that do not mean what their author thought."""
import json
import re

import pytest

from project import RULE

FAST = "--num_samples=1", "--max_new_tokens=5"


@pytest.mark.parametrize("arguments", [
    ["--stop=e", "--stop=a"], pytest.param(['--stop=["e", "a"]'], marks=pytest.mark.slow), pytest.param(["stops.py"], marks=pytest.mark.slow),
    pytest.param(["stops.py", "--stop=a", "--stop", "e"], marks=pytest.mark.slow)], ids=str)
def test_several_stop_texts_end_a_sample_where_the_first_of_them_begins(run_script, char_checkpoint, tmp_path, arguments):
    (tmp_path / "stops.py").write_text("stop = ['a', 'e']\n")
    run = f"--out_dir={char_checkpoint}", "--num_samples=3", "--max_new_tokens=40", "--start=O", "--device=cpu"
    plain = run_script(*run).stdout.split(f"\n{RULE}\n")[:-1]
    done = run_script(*run, *arguments, cwd=tmp_path)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert done.stdout.split(f"\n{RULE}\n")[:-1] == [re.split("[ae]", text)[0] for text in plain]
    assert any(re.search("[ae]", text) for text in plain)


def test_a_session_takes_a_list_of_stop_texts(run_script, char_checkpoint):
    run = f"--out_dir={char_checkpoint}", "--max_new_tokens=40", "--device=cpu"
    done = run_script(*run, "--interactive", stdin=b':stop=["e", "a"]\nO\n:stop=None\n:stop ["a", "e"]\n:seed=1337\nO\n')
    expected = run_script(*run, "--start=O", "--num_samples=1", "--stop=e", "--stop=a").stdout
    assert done.stdout == expected * 2 and "error" not in done.stderr


@pytest.mark.parametrize("stop, warning", [
    ("\\n\\n", r"""warning: the stop text '\\n\\n' has a backslash and the letter n; if you mean a newline, write it in quotes: "\n\n", and in a shell --stop='"\n\n"'"""),
    pytest.param("<|endoftext|>", "meta.pkl never produces this text", marks=pytest.mark.slow),
], ids=str)
def test_a_stop_text_that_cannot_match_gets_a_warning(run_script, char_checkpoint, stop, warning):
    done = run_script(f"--out_dir={char_checkpoint}", *FAST, f"--stop={stop}", "--stop=e")
    assert done.returncode == 0 and done.stderr.count("warning: ") == 1 and warning in done.stderr


def test_the_batch_size_of_a_training_file_is_ignored(run_script, char_checkpoint, tmp_path):
    (tmp_path / "train.py").write_text(f"out_dir = {str(char_checkpoint)!r}\nbatch_size = 64\nlearning_rate = 1e-3\nmax_iters = 5000\n")
    done = run_script(tmp_path / "train.py", *FAST)
    assert done.returncode == 0 and f"{tmp_path / 'train.py'}: batch_size is ignored, because this file is for training\n" in done.stderr
    settings, = [line for line in done.stderr.splitlines() if line.startswith("settings: ")]
    assert "out_dir=" in settings and "batch_size" not in settings
    assert "batch_size=2" in run_script(tmp_path / "train.py", *FAST, "--batch_size=2").stderr


@pytest.mark.parametrize("start", ["--start=FILE:prompt.txt", *(pytest.param(start, marks=pytest.mark.slow) for start in ["--start={}", "--start=LINES:-"])])
def test_a_line_says_what_the_model_sees_of_a_long_prompt(run_script, char_checkpoint, tmp_path, start):
    prompt = "A prompt that is longer than the window of the model"
    (tmp_path / "prompt.txt").write_text(prompt)
    done = run_script(f"--out_dir={char_checkpoint}", *FAST, start.format(prompt), cwd=tmp_path, stdin=prompt.encode())
    location, others = ("standard input, line 1: ", "; of later prompts too, it sees at most 16") if "LINES" in start else ("", "")
    assert f"{location}the prompt has 52 tokens, but the model sees only the last 16, which begin with {prompt[-16:]!r}{others}" in done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout.startswith(prompt)
    assert "sees only" not in run_script(f"--out_dir={char_checkpoint}", *FAST, f"--start={prompt[:16]}").stderr


def test_a_random_seed_is_printed_and_saved_and_gives_the_samples_again(run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", "--num_samples=2", "--max_new_tokens=30"
    first, second = (run_script(*run, "--seed=random", f"--out_file={tmp_path / name}") for name in ("a.jsonl", "b.jsonl"))
    assert first.returncode == second.returncode == 0 and first.stdout != second.stdout
    drawn = re.search(r"seed: (\d+), drawn at random; --seed=\1 gives", first.stderr)[1]
    assert run_script(*run, f"--seed={drawn}").stdout == first.stdout
    assert all(json.loads(line)["seed"] == json.loads(line)["settings"]["seed"] == int(drawn) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    resumed = run_script(*run, f"--seed={drawn}", f"--out_file={tmp_path / 'a.jsonl'}")
    assert resumed.returncode == 0, resumed.stderr
