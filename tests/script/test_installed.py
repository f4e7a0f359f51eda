"""Where the script runs: installed by pip, and inside an interpreter that goes on, as in a notebook."""
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from project import PROJECT, RULE, SCRIPT

FAST = "--num_samples=1", "--max_new_tokens=5"
HOST = f"""
import gc, runpy, signal, sys
for arguments in ["--start=The"], ["--temprature=1"], ["--out_dir=nowhere"], ["--start=The"]:
    sys.argv = ["sample.py", *sys.argv[1:4], *arguments]
    try:
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
print(gc.isenabled(), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def run(*command, cwd, **options):
    """Run a command. Returns what it printed."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_interpreter_goes_on_after_a_run_and_after_an_error(char_checkpoint, tmp_path):
    printed = run(sys.executable, "-c", HOST, f"--out_dir={char_checkpoint}", *FAST, cwd=tmp_path)
    sample, rest = printed.split(f"\n{RULE}\n", 1)
    assert sample.startswith("The") and rest == f"status 2\nstatus 1\n{sample}\n{RULE}\nTrue True\n"


@pytest.mark.slow # pip takes some seconds
def test_pip_installs_a_command_and_no_module_of_a_common_name(char_checkpoint, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python, = [path for path in (tmp_path / "venv").glob("*/python*") if path.stem == "python"]
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib")) # torch and the others, as this Python has them
    source = tmp_path / "source"
    run("git", "clone", "-q", PROJECT, source, cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "--no-deps", source, cwd=tmp_path)
    assert {path.stem for path in packages.iterdir()} >= {"nanogpt_sample", "sampling"}
    assert not [name for name in ("model", "sample", "configurator", "config", "tests") if (packages / name).exists()
                or (packages / f"{name}.py").exists()]
    arguments = f"--out_dir={char_checkpoint}", *FAST
    printed = run(python.with_name("nanogpt-sample"), *arguments, cwd=tmp_path)
    assert printed == run(sys.executable, SCRIPT, *arguments, cwd=tmp_path)
    code = "import sys, sampling; print(sampling.load(sys.argv[1], 'cpu').generate('The')[0].prompt.text)"
    assert run(python, "-c", code, char_checkpoint, cwd=tmp_path) == "The\n"
