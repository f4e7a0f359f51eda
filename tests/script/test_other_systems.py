"""What macOS and Windows lack: each use of it has a branch, and a run without it gives the same samples and files."""
import ctypes
import sys
from pathlib import Path

import pytest

from sampling.process import cores_are_busy, peak_memory

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


def test_samples_and_files_are_the_same(other_system, expected, run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", *RUN, "--out_file=a.jsonl", "--html_file=a.html"
    done = run_script(*run, cwd=tmp_path)
    assert done.returncode == 0 and (done.stdout, (tmp_path / "a.jsonl").read_bytes()) == expected, done.stderr
    assert ("peak memory" in done.stderr) == (other_system != "Windows")
    resumed = run_script(*run, cwd=tmp_path)
    assert resumed.returncode == 0 and "nothing to do" in resumed.stderr


def test_a_session_answers(other_system, expected, run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", *RUN[1:2], "--interactive", stdin=b"The\r\n:quit\r\n")
    assert done.returncode == 0 and expected[0].startswith(done.stdout) and done.stdout, done.stderr


def test_cores_count_as_free_where_nothing_says_how_many_programs_run(other_system):
    assert not cores_are_busy()


def test_peak_memory_is_in_bytes_on_macos_too(monkeypatch):
    """There, ru_maxrss is in bytes. Linux has kilobytes."""
    import torch
    cpu = torch.device("cpu")
    on_linux = peak_memory(cpu)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert on_linux / 2000 < peak_memory(cpu) < on_linux / 500
