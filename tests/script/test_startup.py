"""The start of the script: what it imports, and from which folders it runs."""
import os
import subprocess
import sys

import pytest

from models import make_gpt, save_checkpoint
from project import PROJECT, RULE, SCRIPT

FAST = "--num_samples=1", "--max_new_tokens=5"
HEAVY = {"torch", "numpy", "numba", "tiktoken", "transformers", "safetensors", "huggingface_hub", "tqdm", "psutil"}


def run_python(*arguments, cwd=PROJECT):
    """Run a separate Python process."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("argument, status", [("--help", 0), ("--temprature=1", 2), ("--top_k=-1", 2)])
def test_help_and_invalid_settings_do_not_import_torch(argument, status):
    done = run_python("-X", "importtime", SCRIPT, argument)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == status and "configurator" in imported
    assert not {name.partition(".")[0] for name in imported} & HEAVY
    assert ("--top_k=200" in done.stdout) if status == 0 else (done.stdout == "" and "error: " in done.stderr)


def test_importing_the_package_imports_no_torch():
    done = run_python("-c", "import sys, sampling; print(sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert not {name for name in HEAVY if f"'{name}'" in done.stdout}


def test_importing_the_script_runs_nothing():
    done = run_python("-c", "import sample; print(sample.temperature)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.8\n", "")


@pytest.mark.parametrize("path", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ["absolute", "relative"]), "link"])
def test_the_script_runs_from_any_folder_and_through_a_symbolic_link(run_script, tmp_path, char_checkpoint, path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sample").symlink_to(SCRIPT)
    save_checkpoint(tmp_path / "elsewhere" / "out", make_gpt())
    # The script imports its own model.py, not the one in the working directory.
    (tmp_path / "elsewhere" / "model.py").write_text("raise SystemExit('a wrong model.py')")
    here = run_script(f"--out_dir={char_checkpoint}", *FAST)
    assert here.returncode == 0 and RULE in here.stdout
    script = {"absolute": SCRIPT, "relative": os.path.relpath(SCRIPT, tmp_path / "elsewhere"), "link": tmp_path / "bin" / "sample"}[path]
    done = run_python(script, *FAST, cwd=tmp_path / "elsewhere")
    assert (done.returncode, done.stdout) == (0, here.stdout), done.stderr


@pytest.mark.parametrize("run", [pytest.param("checkpoint", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.slow), "prompts-and-files", pytest.param("session", marks=pytest.mark.slow)])
def test_a_separate_process_prints_the_same_as_a_fork(run_script, char_checkpoint, gpt2_folder, tmp_path, run):
    """Most tests run forks of the fork server (script_process.py). One run of each kind shows that the output is the same."""
    arguments, stdin = {
        "checkpoint": ([f"--out_dir={char_checkpoint}", "--num_samples=3"], b""),
        "gpt2": ([f"--init_from={gpt2_folder}", "--start=Hi", "--num_samples=3"], b""),
        "prompts-and-files": ([f"--out_dir={char_checkpoint}", "--start=LINES:-", "--out_file=a.jsonl", "--html_file=a.html"], b"The\nO\n"),
        "session": ([f"--out_dir={char_checkpoint}", "--interactive"], b"The\n:top_k=3\nO\n:nothing\n"),
    }[run]
    found = []
    for separate in False, True:
        folder = tmp_path / str(separate)
        folder.mkdir()
        done = run_script(*arguments, "--max_new_tokens=20", cwd=folder, stdin=stdin, separate=separate, OMP_NUM_THREADS="1")
        assert done.returncode == 0 and RULE in done.stdout, done.stderr
        found.append((done.stdout, {path.name: path.read_bytes() for path in folder.iterdir()}))
    assert found[0] == found[1]
