"""The start of the script: what it imports, and from where it runs: any folder, pip's command, a notebook."""
import ctypes
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch

import sampling
from models import make_gpt, save_checkpoint
from project import PROJECT, RULE, SCRIPT
from sampling.process import cores_are_busy, peak_memory

FAST = "--num_samples=1", "--max_new_tokens=5", "--device=cpu"
HEAVY = {"torch", "numpy", "numba", "tiktoken", "transformers", "safetensors", "huggingface_hub", "tqdm"}
HOST = f"""
import runpy, signal, sys
kept = [] # a notebook keeps the latest one
for argument in "--start=The", "--temprature=1", "--seed=5", "--start=The":
    sys.argv = ["sample.py", *sys.argv[1:6], argument]
    try:
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
        kept.append(end)
from model import GPT
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, GPT)
"""


def run(*command, cwd=PROJECT, status=0):
    """Run a command. Returns its standard output and error."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("arguments, status, first_words", [
    ([SCRIPT, "--help"], 0, ["Sample"]), ([SCRIPT, "--top_k=-1"], 2, ["error:"]), (["-c", "import sample"], 0, [])])
def test_help_and_invalid_settings_and_imports_do_not_import_torch(arguments, status, first_words):
    printed, messages = run(sys.executable, "-X", "importtime", *arguments, status=status)
    lines = [line for line in messages.splitlines() if line.startswith("import time:")]
    others = [line for line in messages.splitlines() if line not in lines]
    imported = {line.split("|")[-1].strip() for line in lines}
    assert "sampling.configurator" in imported
    assert not {name.partition(".")[0] for name in imported} & {*HEAVY, "configurator"}
    assert [*printed.split()[:1], *(line.split()[0] for line in others)] == first_words


def test_the_class_of_a_model_is_there_for_annotations_and_only_asking_for_it_imports_torch():
    code = """
import os, sys, sampling
def use(gpt: "sampling.TextGenerator"): pass
assert "torch" not in sys.modules and not hasattr(sampling, "Nothing")
from sampling import TextGenerator
import sampling.text_generator
assert TextGenerator is sampling.text_generator.TextGenerator and "GOMP_SPINCOUNT" in os.environ
"""
    run(sys.executable, "-c", code)


@pytest.fixture
def nanogpt(tmp_path):
    """A folder like nanoGPT's: it has a model.py, and a configurator.py that its scripts execute."""
    (tmp_path / "model.py").write_text("GPT = 'its own'\n")
    (tmp_path / "configurator.py").write_text("print(learning_rate)\n")
    (tmp_path / "train.py").write_text("learning_rate = 1\nexec(open('configurator.py').read())\nprint('training')\n")
    return tmp_path


@pytest.mark.parametrize("command", [["sample.py"], ["-I", "sample.py"], ["-m", "sample"], ["-m", "runpy", "sample"],
                                     ["-m", "torch.distributed.run", "--nproc_per_node=1", "sample.py"]], ids=str)
def test_a_symbolic_link_in_nanogpts_folder_runs(run_script, char_checkpoint, nanogpt, command):
    (nanogpt / "sample.py").symlink_to(SCRIPT)
    save_checkpoint(nanogpt / "out", make_gpt())
    expected = run_script(f"--out_dir={char_checkpoint}", *FAST).stdout
    assert run(sys.executable, *command, *FAST, cwd=nanogpt)[0] == expected


def test_a_settings_file_of_nanogpt_imports_its_neighbours(run_script, char_checkpoint, nanogpt):
    (nanogpt / "config").mkdir()
    (nanogpt / "config" / "base.py").write_text("import model\nstart = 'The' if model.GPT == 'its own' else ''\n")
    (nanogpt / "config" / "my.py").write_text("from config.base import *\n")
    (nanogpt / "sampling.py").write_text("seed = 5\n")
    (nanogpt / "shared_settings.py").write_text("from sampling import seed\n")
    (nanogpt / "other.py").write_text("import shared_settings\nseed = shared_settings.seed\n")
    printed, _ = run(sys.executable, SCRIPT, "config/my.py", "other.py", f"--out_dir={char_checkpoint}", *FAST,
                     cwd=nanogpt)
    assert printed == run_script("--start=The", "--seed=5", f"--out_dir={char_checkpoint}", *FAST).stdout


@pytest.mark.parametrize("copied, script, message", [
    (["sample.py"], "sample.py", "No module named 'sampling': do not copy sample.py, but link to it"),
    (["sample.py", "sampling"], "sample.py", "model.py is missing, or belongs to another project: do not copy"),
    (["sample.py", "sampling", "model.py"], "sample.py", "configurator.py is missing, or belongs to another project"),
    (["configurator.py"], "train.py", "this configurator.py is not nanoGPT's: git checkout"),
], ids=str)
def test_copies_in_nanogpts_folder_are_one_error_line(nanogpt, copied, script, message):
    for name in copied:
        (copytree if name == "sampling" else copy)(PROJECT / name, nanogpt / name)
    printed, messages = run(sys.executable, script, "--learning_rate=2", cwd=nanogpt, status=1)
    assert printed == "" and messages.startswith("error: ") and message in messages and messages.count("\n") == 1


def test_an_interpreter_with_a_model_py_of_its_own_goes_on_after_a_run_and_after_an_error(char_checkpoint, nanogpt):
    arguments = f"--out_dir={char_checkpoint}", "--out_file=a.jsonl", *FAST
    printed, messages = run(sys.executable, "-c", HOST, *arguments, cwd=nanogpt)
    sample, rest = printed.split(f"\n{RULE}\n", 1)
    assert sample.startswith("The") and rest == "status 2\nstatus 1\nTrue its own\n"
    assert messages.endswith("a.jsonl is complete, with 1 sample: nothing to do\n") # no run has it open


TYPED = """
import sampling
def show(value: int) -> None: ...
def use(gpt: sampling.TextGenerator) -> str:
    params = sampling.SamplingParams(max_new_tokens=5, stop=["a"], seed="random")
    samples = gpt.generate("A", params, num_samples=2, temperature=0.5)
    show(samples)
    return samples[0].text + "".join(gpt.stream("A")) + str(gpt.score("A").tokens[0].id)
use(sampling.load("demo"))
"""


@pytest.mark.slow # pip takes some seconds
def test_pip_installs_a_command_and_no_module_of_a_common_name(run_script, char_checkpoint, tmp_path):
    venv.create(tmp_path / "venv")
    python, = [path for path in (tmp_path / "venv").glob("*/python*") if path.stem == "python"]
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")[0].strip())
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib")) # this Python's torch and other packages
    run("git", "clone", "-q", PROJECT, tmp_path / "source")
    pip = sys.executable, "-m", "pip", "-q"
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", tmp_path / "source", cwd=tmp_path)
    wheel, = tmp_path.glob("*.whl")
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    installed = {path.stem for path in packages.iterdir()}
    assert installed >= {"nanogpt_sample", "sampling"}
    assert not installed & {"model", "sample", "configurator", "config", "tests"}
    arguments = f"--out_dir={char_checkpoint}", *FAST
    printed, _ = run(python.with_name("nanogpt-sample"), *arguments, cwd=tmp_path)
    assert printed == run_script(*arguments).stdout
    assert run(python.with_name("nanogpt-sample"), "--version", cwd=tmp_path)[0] == f"{sampling.__version__}\n"
    shown, _ = run(python.with_name("nanogpt-sample"), "--help", cwd=tmp_path)
    assert "    nanogpt-sample --out_dir=demo" in shown and "sample.py" not in shown
    for seed in 1, 2:
        run(python.with_name("nanogpt-sample"), *arguments, f"--seed={seed}", f"--out_file={seed}.jsonl", cwd=tmp_path)
    _, messages = run(python.with_name("nanogpt-compare"), "1.jsonl", "2.jsonl", "page.html", cwd=tmp_path)
    assert messages == "page.html: 2 samples\n"
    # In bfloat16, no kernels are compiled.
    code = ("import sys, sampling; generator = sampling.load(sys.argv[1], 'cpu', 'bfloat16'); "
            "print(generator.generate('The', sampling.SamplingParams(5))[0].num_tokens)")
    assert run(python, "-c", code, char_checkpoint, cwd=tmp_path)[0] == "5\n"
    (tmp_path / "typed.py").write_text(TYPED)
    mypy = sys.executable, "-m", "mypy", "--strict", "--python-executable", python
    checked, _ = run(*mypy, "typed.py", cwd=tmp_path, status=1)
    assert 'Argument 1 to "show" has incompatible type "list[Sample]"; expected "int"' in checked, checked
    assert checked.endswith("Found 1 error in 1 file (checked 1 source file)\n"), checked


# ---- what macOS and Windows lack: a run without it gives the same samples and files

RUN = "--num_samples=2", "--max_new_tokens=20", "--start=The", "--device=cpu"
MISSING = { # modules, and the error at glibc's functions; neither has /proc
    "macOS": ([], AttributeError),
    "Windows": (["fcntl", "resource", "readline", "termios", "pty"], TypeError),
}


@pytest.fixture(params=MISSING)
def other_system(request, monkeypatch):
    """Take away what this system lacks. Returns its name."""
    modules, error = MISSING[request.param]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None) # then an import raises ImportError
    read_text, load_library = Path.read_text, ctypes.CDLL

    def read_outside_proc(path, *arguments, **settings):
        if path.parts[:2] == ("/", "proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read_text(path, *arguments, **settings)

    def load_no_glibc(name, *arguments, **settings):
        if name is None:
            raise error("this is not glibc")
        return load_library(name, *arguments, **settings)
    monkeypatch.setattr(Path, "read_text", read_outside_proc)
    monkeypatch.setattr(ctypes, "CDLL", load_no_glibc)
    return request.param


@pytest.fixture(scope="module")
def expected(run_script, char_checkpoint, tmp_path_factory):
    """The samples as printed and as saved on this system."""
    folder = tmp_path_factory.mktemp("expected")
    done = run_script(f"--out_dir={char_checkpoint}", *RUN, "--out_file=a.jsonl", "--logprobs=5", cwd=folder)
    return done.stdout, (folder / "a.jsonl").read_bytes()


def test_samples_files_and_sessions_are_the_same(other_system, expected, run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", *RUN, "--out_file=a.jsonl", "--html_file=a.html"
    done = run_script(*run, cwd=tmp_path)
    assert done.returncode == 0 and (done.stdout, (tmp_path / "a.jsonl").read_bytes()) == expected, done.stderr
    assert ("peak memory" in done.stderr) == (other_system != "Windows")
    resumed = run_script(*run, cwd=tmp_path)
    assert resumed.returncode == 0 and "nothing to do" in resumed.stderr
    session = run_script(*run[:1], "--max_new_tokens=20", "--interactive", stdin=b"The\r\n:quit\r\n")
    assert session.returncode == 0 and expected[0].startswith(session.stdout) and session.stdout, session.stderr
    assert not cores_are_busy(), "nothing says how many programs run"


def test_peak_memory_is_in_bytes_on_macos_too(monkeypatch):
    on_linux = peak_memory(torch.device("cpu")) # where ru_maxrss is in kilobytes
    monkeypatch.setattr(sys, "platform", "darwin")
    assert on_linux / 2000 < peak_memory(torch.device("cpu")) < on_linux / 500
