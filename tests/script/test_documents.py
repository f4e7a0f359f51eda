"""README.md, docs/, the settings files and the demo checkpoint work as documented."""
import re
import shlex
from shutil import copytree

import huggingface_hub
import pytest

from models import cached_snapshot
from project import PROJECT, RULE, SCRIPT
from sampling.configurator import find_settings
from script_process import run_forked, run_program, run_python

README = PROJECT / "README.md"
DOCUMENTS = [README, PROJECT / "SECURITY.md", *sorted((PROJECT / "docs").glob("*.md"))]


def code_blocks(language):
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [pytest.param(block, id=f"{path.name}-{i}") for path in DOCUMENTS
            for i, block in enumerate(pattern.findall(path.read_text()))]


def commands(start):
    """Every command line that starts so, where this project is the working directory."""
    text = "\n".join(block.values[0] for block in code_blocks("sh"))
    return re.findall(rf"^{start} .*", text.replace("~/nanogpt-sample/", ""), re.MULTILINE)


@pytest.fixture
def user_folder(tmp_path, gpt2_folder, monkeypatch):
    """A folder with the files that the commands read. The hub's cache has small GPT-2s."""
    (tmp_path / "model.py").symlink_to(PROJECT / "model.py")
    for name in "demo", "out-shakespeare-char":
        (tmp_path / name).symlink_to(PROJECT / "demo")
    for name in "gpt2", "gpt2-xl":
        copytree(gpt2_folder, cached_snapshot(tmp_path / "hub", name), dirs_exist_ok=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.mark.parametrize("command", commands("(?:python|torchrun .* --) sample.py"))
def test_commands_run(command, run_script, user_folder):
    """They run as written, but in one process, with few and short samples, and small models."""
    arguments = shlex.split(command.partition("sample.py ")[2].replace("=1000", "=3"))
    done = run_script(*arguments, "--max_new_tokens=20", cwd=user_folder)
    assert done.returncode == 0, done.stderr
    assert RULE in done.stdout
    assert "warning" not in done.stderr


@pytest.fixture
def run_commands(user_folder, run_script):
    """run_commands(lines) runs them in the user's folder, as a shell does. Returns what they print.
    """
    def run(lines):
        printed = ""
        for line in lines:
            command, _, file = line.partition(" > ")
            program, *arguments = shlex.split(command)
            if arguments[0] == "sample.py":
                output = run_script(*arguments[1:], cwd=user_folder).stdout
            else:
                output = run_program(program, *arguments, cwd=user_folder).stdout
            if file:
                (user_folder / file).write_text(output)
            else:
                printed += output
        return printed
    return run


@pytest.mark.parametrize("block", code_blocks("text"))
def test_examples_print_the_documented_output(block, run_commands):
    lines = re.findall(r"^\$ (.*)", block, re.MULTILINE)
    shown = re.sub(r"^\$ .*\n", "", block, flags=re.MULTILINE)
    assert run_commands(lines) == shown


def test_the_command_for_a_page_of_several_runs_works_anywhere_without_installing(
        run_script, user_folder):
    for name in "a", "b", "cool", "warm":
        run_script("--out_dir=demo", "--num_samples=1", "--max_new_tokens=5", "--logprobs=5",
                   f"--out_file={name}.jsonl", cwd=user_folder)
    (user_folder / "sampling.py").write_text("open('ran', 'w')")
    command = r"python ~/nanogpt-sample/(sampling/outputs/html\.py) ([\w. ]+html)"
    for path in README, PROJECT / "docs" / "saving.md":
        (program, files), = re.findall(command, path.read_text())
        done = run_python(PROJECT / program, *files.split(), cwd=user_folder)
        assert done.stderr == f"{files.split()[-1]}: 2 samples\n"
    assert not (user_folder / "ran").exists()


@pytest.mark.parametrize("program", code_blocks("python"))
def test_programs_run(program):
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    assert run_forked(strict + program, script="-c").stdout


def test_the_table_of_settings_has_the_defaults_and_comments_of_the_script():
    table = README.read_text().partition("| setting | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n") - 1 >= 12
    settings = find_settings(SCRIPT)
    for name, default, comment in rows:
        assert (default, comment) == (repr(settings[name].default), settings[name].comment)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_to_existing_files(path):
    for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert "://" in link or (path.parent / link).exists(), link


@pytest.mark.slow
def test_every_cell_of_the_gpu_benchmark_runs_and_the_text_is_nanogpts():
    done = run_python(PROJECT / "tests" / "bench" / "gpu.py")
    assert '"error"' not in done.stdout
    assert len(re.findall(r'"tokens_per_s": [1-9]', done.stdout)) == 12
    # In bfloat16, they may round differently.
    exact = re.findall(r'^(?!.*bfloat16).*"equal": "(.*?)"', done.stdout, re.MULTILINE)
    assert exact == ["4 of 4"] * 2
