"""What the script imports, and from where it runs: any folder, pip's command, a notebook."""
import ctypes
import re
import sys
import sysconfig
import venv
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch

import sampling
from models import make_gpt, save_checkpoint
from project import PROJECT, SCRIPT
from sampling.outputs.outputs import peak_memory
from sampling.process import cores_are_busy
from script_process import run_program, run_python

FAST = "--num_samples=1", "--max_new_tokens=5", "--device=cpu"
UNWANTED = (r"(torch|numpy|numba|tiktoken|transformers|safetensors|huggingface_hub|tqdm|"
            r"configurator)\b")
NOTEBOOK = f"""
import runpy, signal, sys
kept = [] # a notebook keeps the latest one
for argument in "--start=The", "--temprature=1", "--seed=5", "--start=The":
    sys.argv = ["sample.py", *sys.argv[1:6], argument]
    try:
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
        kept.append(end)
from model import NAME
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, NAME)
"""


@pytest.mark.parametrize("arguments, status, output", [
    ([SCRIPT, "--help"], 0, "Sample .*"),
    ([SCRIPT, "--top_k=-1"], 2, "error: .*\n"),
    (["-c", "import sample"], 0, ""),
])
def test_help_and_invalid_settings_and_imports_do_not_import_torch(arguments, status, output):
    done = run_python("-X", "importtime", *arguments, status=status)
    imported = re.findall(r"^import time:.*\| +(.*)", done.stderr, re.MULTILINE)
    assert "sampling.configurator" in imported
    assert not [name for name in imported if re.match(UNWANTED, name)]
    messages = re.sub("import time:.*\n", "", done.stderr)
    assert re.fullmatch(output, done.stdout + messages, re.DOTALL)


def test_the_class_of_a_model_imports_torch_only_when_it_is_asked_for():
    run_python("-c", """
import os, sys, sampling
def use(gpt: "sampling.TextGenerator"): pass
os.environ.pop("GOMP_SPINCOUNT")
assert "torch" not in sys.modules and not hasattr(sampling, "Nothing")
from sampling import TextGenerator
import sampling.text_generator
assert TextGenerator is sampling.text_generator.TextGenerator
assert "GOMP_SPINCOUNT" in os.environ # so torch's threads spin shortly
""")


def test_a_settings_file_that_imports_torch_finds_the_spinning_shortened(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import os\nraise SystemExit(os.environ['GOMP_SPINCOUNT'])\n")
    unset = "env", "-u", "GOMP_SPINCOUNT"
    done = run_program(*unset, sys.executable, SCRIPT, path, status=2)
    assert re.search(r"SystemExit: \d", done.stderr), done.stderr


@pytest.fixture
def nanogpt(tmp_path):
    """A folder like nanoGPT's: with a model.py, and a configurator.py that its scripts execute."""
    (tmp_path / "model.py").write_text("NAME = 'its own'\n")
    (tmp_path / "configurator.py").write_text("print(learning_rate)\n")
    training = "learning_rate = 1\nexec(open('configurator.py').read())\nprint('training')\n"
    (tmp_path / "train.py").write_text(training)
    return tmp_path


@pytest.fixture
def expected(run_script, char_checkpoint):
    """What the script prints with FAST and --start=The."""
    return run_script(f"--out_dir={char_checkpoint}", *FAST, "--start=The").stdout


@pytest.mark.parametrize("command", [
    ["-I", "sample.py"],
    pytest.param(["-m", "sample"], marks=pytest.mark.slow)])
def test_a_symbolic_link_in_nanogpts_folder_runs(expected, nanogpt, command):
    (nanogpt / "sample.py").symlink_to(SCRIPT)
    save_checkpoint(nanogpt / "out", make_gpt())
    assert run_python(*command, *FAST, "--start=The", cwd=nanogpt).stdout == expected


@pytest.mark.parametrize("copied, script, message", [
    (["sample.py"], "sample.py",
     "No module named 'sampling': do not copy sample.py; link to it"),
    (["sample.py", "sampling"], "sample.py",
     "model.py is missing, or belongs to another project: do not copy"),
    (["sample.py", "sampling", "model.py"], "sample.py",
     "configurator.py is missing, or belongs to another project"),
    (["configurator.py"], "train.py", "this configurator.py is not nanoGPT's: git checkout"),
])
def test_copies_in_nanogpts_folder_are_one_error_line(nanogpt, copied, script, message):
    for name in copied:
        copy_one = copytree if name == "sampling" else copy
        copy_one(PROJECT / name, nanogpt / name)
    done = run_python(script, "--learning_rate=2", cwd=nanogpt, status=1)
    assert done.stdout == ""
    line, = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_an_interpreter_with_its_own_model_py_goes_on_after_a_run_and_after_an_error(
        expected, char_checkpoint, nanogpt):
    arguments = f"--out_dir={char_checkpoint}", "--out_file=a.jsonl", *FAST
    done = run_python("-c", NOTEBOOK, *arguments, cwd=nanogpt)
    assert done.stdout == f"{expected}status 2\nstatus 1\nTrue its own\n"
    # No run has the file open.
    assert done.stderr.endswith("a.jsonl is complete, with 1 sample: nothing to do\n")


# In bfloat16, no kernels are compiled.
TYPED = """
import sys, sampling
def show(value: int) -> None: ...
def use(gpt: sampling.TextGenerator) -> str:
    params = sampling.SamplingParams(max_new_tokens=5, stop=["a"], seed="random")
    samples = gpt.generate("A", params, num_samples=2, temperature=0.5)
    show(samples)
    text = samples[0].text + "".join(gpt.stream("A", max_new_tokens=5))
    return text + gpt.score("A").tokens[0].text
print(use(sampling.load(sys.argv[1], "cpu", "bfloat16"))[-1:])
"""


@pytest.fixture
def installed(tmp_path_factory):
    """The Python of a new environment in which pip has installed this project."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    python, = (folder / "venv").glob("*/python")
    packages, = (folder / "venv").glob("**/site-packages")
    # This Python's torch and other packages.
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    run_program("git", "clone", "-q", PROJECT, folder / "source")
    pip = "-m", "pip", "-q"
    run_python(*pip, "wheel", "--no-deps", "--no-build-isolation", folder / "source", cwd=folder)
    wheel, = folder.glob("*.whl")
    run_python(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    for name in "model", "sample", "configurator", "config", "tests":
        assert not [*packages.glob(f"{name}*")]
    return python


@pytest.mark.slow # pip and mypy take some seconds
def test_pip_installs_commands_and_a_package_with_types(
        installed, expected, char_checkpoint, tmp_path):
    def run(name, *arguments):
        return run_program(installed.with_name(name), *arguments, cwd=tmp_path)
    script = "nanogpt-sample"
    arguments = f"--out_dir={char_checkpoint}", *FAST, "--start=The"
    assert run(script, *arguments, "--out_file=1.jsonl").stdout == expected
    assert run(script, "--version").stdout == f"{sampling.__version__}\n"
    copy(tmp_path / "1.jsonl", tmp_path / "2.jsonl")
    done = run("nanogpt-compare", "1.jsonl", "2.jsonl", "page.html")
    assert done.stderr == "page.html: 2 samples\n"
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    assert run_program(installed, program, PROJECT / "demo").stdout == "A\n"
    unread = "[mypy-torch.*,numpy.*]\nfollow_imports = skip\n" # reading them takes 20 seconds
    (tmp_path / "mypy.ini").write_text(unread)
    mypy = "-m", "mypy", "--strict", "--python-executable", installed
    checked = run_python(*mypy, program, cwd=tmp_path, status=1).stdout
    error = 'Argument 1 to "show" has incompatible type "list[Sample]"; expected "int"'
    assert error in checked
    assert checked.endswith("Found 1 error in 1 file (checked 1 source file)\n")


# ---- what macOS and Windows lack: a run without it gives the same samples and files

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
    read_text = Path.read_text
    load_library = ctypes.CDLL

    def read_outside_proc(path, *arguments, **settings):
        if path.parts[:2] == ("/", "proc"):
            raise FileNotFoundError
        return read_text(path, *arguments, **settings)

    def load_no_glibc(name, *arguments, **settings):
        if name is None:
            raise error("this is not glibc")
        return load_library(name, *arguments, **settings)
    monkeypatch.setattr(Path, "read_text", read_outside_proc)
    monkeypatch.setattr(ctypes, "CDLL", load_no_glibc)
    return request.param


@pytest.fixture(scope="module")
def whole(run_script, char_checkpoint, tmp_path_factory):
    """A run on this system: its folder, its arguments, and what it prints."""
    folder = tmp_path_factory.mktemp("whole")
    run = f"--out_dir={char_checkpoint}", "--start=The", "--max_new_tokens=20", "--device=cpu"
    saved = *run, "--num_samples=2", "--out_file=a.jsonl", "--html_file=a.html"
    return folder, run, saved, run_script(*saved, cwd=folder).stdout


def test_samples_files_and_sessions_are_the_same(other_system, whole, run_script, tmp_path):
    folder, run, saved, printed = whole
    done = run_script(*saved, cwd=tmp_path)
    assert done.stdout == printed, done.stderr
    assert (tmp_path / "a.jsonl").read_bytes() == (folder / "a.jsonl").read_bytes()
    assert ("peak memory" in done.stderr) == (other_system != "Windows")
    assert "nothing to do" in run_script(*saved, cwd=tmp_path).stderr
    session = run_script(*run, "--interactive", stdin=b":quit\r\n")
    assert session.returncode == 0
    assert session.stdout == printed[:len(printed) // 2]
    assert not cores_are_busy(), "nothing says how many programs run"


def test_peak_memory_is_in_bytes_on_macos_too(monkeypatch):
    cpu = torch.device("cpu")
    on_linux = peak_memory(cpu) # where ru_maxrss is in kilobytes
    monkeypatch.setattr(sys, "platform", "darwin")
    assert on_linux / 2000 < peak_memory(cpu) < on_linux / 500
