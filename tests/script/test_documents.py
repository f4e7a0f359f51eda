"""README.md, docs/, the settings files and the demo checkpoint work as documented."""
import json
import os
import re
import shlex
import subprocess
import sys

import huggingface_hub
import pytest

from project import PROJECT, RULE, SCRIPT
from sampling.configurator import find_settings

DOCUMENTS = [PROJECT / "README.md", PROJECT / "SECURITY.md", *sorted((PROJECT / "docs").glob("*.md"))]
DEMO = PROJECT / "demo"


def code_blocks(language):
    """All code blocks of this language. The id of each is its document's name and its number in the document."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [pytest.param(block, id=f"{path.name}-{i}") for path in DOCUMENTS
            for i, block in enumerate(pattern.findall(path.read_text(encoding="utf-8")))]


def commands():
    """Every command line with sample.py: those of one process, and the others."""
    lines = [line.replace("~/nanogpt-sample/", "") for block in code_blocks("sh")
             for line in block.values[0].splitlines() if "sample.py" in line]
    alone = [line for line in lines if line.startswith("python sample.py ")]
    return alone, [line for line in lines if line not in alone]


def examples():
    """Every example with its output. Slow, but for those in README.md."""
    return [pytest.param(*block.values, id=block.id, marks=() if "README" in block.id else pytest.mark.slow)
            for block in code_blocks("text")]


@pytest.fixture
def user_folder(tmp_path, gpt2_folder, monkeypatch):
    """A folder with the files that the commands read. The hub's cache has a small model for each name of GPT-2."""
    (tmp_path / "model.py").symlink_to(PROJECT / "model.py")
    for name in "demo", "out-shakespeare-char":
        (tmp_path / name).symlink_to(DEMO)
    for name in "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "distilbert--distilgpt2":
        cached = tmp_path / "hub" / f"models--{name}"
        (cached / "snapshots").mkdir(parents=True)
        (cached / "snapshots" / "abc").symlink_to(gpt2_folder)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.mark.parametrize("command", commands()[0])
def test_commands_run(command, run_script, user_folder):
    """They run as written, but with short samples, and small models."""
    is_help = "--help" in command
    done = run_script(*shlex.split(command)[2:], *([] if is_help else ["--max_new_tokens=20"]), cwd=user_folder)
    assert done.returncode == 0, done.stderr
    assert RULE in done.stdout or is_help


@pytest.mark.parametrize("command", [
    pytest.param(command, marks=pytest.mark.slow if "torchrun" in command else ()) for command in commands()[1]])
def test_commands_of_several_programs_run(command, tiktoken_cache, user_folder):
    """They run as written, but with short samples, and fewer processes and samples for torchrun."""
    for written, run in [("torchrun --nproc_per_node=8", "python -m torch.distributed.run --nproc_per_node=2"),
                         ("python ", f"{shlex.quote(sys.executable)} "), (" sample.py", f" {SCRIPT}"),
                         ("--num_samples=1000", "--num_samples=3")]:
        command = command.replace(written, run)
    done = run_in_bash(f"{command} --max_new_tokens=20", user_folder, tiktoken_cache)
    assert done.returncode == 0 and RULE in done.stdout, done.stderr


def test_the_command_for_a_page_of_several_runs_works_anywhere_without_installing(run_script, user_folder):
    for name in "a.jsonl", "b.jsonl", "cool.jsonl", "warm.jsonl":
        run_script("--out_dir=demo", "--num_samples=1", "--max_new_tokens=5", "--logprobs=5", f"--out_file={name}",
                   cwd=user_folder)
    (user_folder / "sampling.py").write_text("open('ran', 'w')")
    for path in DOCUMENTS[0], PROJECT / "docs" / "saving.md":
        command, = re.findall(r"python (~/nanogpt-sample/sampling/outputs/html\.py [\w. ]+html)", path.read_text())
        command = command.replace("~/nanogpt-sample", str(PROJECT)).split()
        done = subprocess.run([sys.executable, *command], cwd=user_folder, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == f"{command[-1]}: 2 samples\n", done.stderr
    assert not (user_folder / "ran").exists()


@pytest.mark.parametrize("block", examples())
def test_examples_print_the_documented_output(block, tiktoken_cache, user_folder):
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    shown = "".join(line for line in block.splitlines(keepends=True) if not line.startswith("$ "))
    script = "\n".join(commands).replace("python sample.py", f"{shlex.quote(sys.executable)} {SCRIPT}")
    done = run_in_bash(f"set -e\n{script}", user_folder, tiktoken_cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def run_in_bash(script, folder, tiktoken_cache):
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "CUDA_VISIBLE_DEVICES": "",
           "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("program", code_blocks("python"))
def test_programs_run(program):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=PROJECT, env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_the_table_of_settings_has_the_defaults_and_comments_of_the_script():
    table = DOCUMENTS[0].read_text(encoding="utf-8").partition("| setting | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", table, re.MULTILINE)
    settings = find_settings(SCRIPT)
    assert len(rows) == table.count("\n") - 1 >= 12
    assert rows == [(name, repr(settings[name].default), settings[name].comment) for name, _, _ in rows]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_to_existing_files(path):
    links = [link for link in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("file", sorted(path.name for path in (PROJECT / "config").glob("*.py")))
def test_settings_files_run_without_warnings(run_script, char_checkpoint, gpt2_folder, file):
    source = f"--init_from={gpt2_folder}" if "gpt2" in file else f"--out_dir={char_checkpoint}"
    done = run_script(f"config/{file}", source, "--max_new_tokens=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(RULE) >= 1 and "warning" not in done.stderr


@pytest.mark.slow
def test_every_cell_of_the_gpu_benchmark_runs_and_the_text_is_nanogpts():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, PROJECT / "tests" / "bench" / "gpu.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if "error" in line] == []
    texts = {line["cell"]: line["equal"] for line in lines if "equal" in line}
    exact = [texts[cell] for cell in texts if "bfloat16" not in cell] # these two may round differently
    assert len(texts) == 4 and exact == ["4 of 4"] * 2
    assert len([line for line in lines if line.get("tokens_per_s", 0) > 0]) == 12
