"""Run sample.py and other programs as new processes, or sample.py in this one, which is faster."""
import fcntl
import io
import os
import runpy
import subprocess
import sys
import tempfile
import termios
import warnings
from contextlib import contextmanager
from subprocess import DEVNULL, PIPE

import pytest

from project import PROJECT, SCRIPT

CLOSED = "closed" # a standard stream that is closed in the new process
OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_program(*command, cwd=PROJECT, status=0, **environment):
    """Run a program, which must end with this exit status; None: with any. Its output is text."""
    env = {**os.environ, **OFFLINE, **environment}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, stdin=DEVNULL,
                          capture_output=True, text=True, timeout=300)
    assert status is None or done.returncode == status, done.stderr
    return done


def run_python(*arguments, **settings):
    return run_program(sys.executable, *arguments, **settings)


def start_script(*arguments, cwd=PROJECT, env=None, stdin=DEVNULL, stdout=PIPE, stderr=PIPE,
                 new_session=False):
    """Start sample.py with the tests' environment and env. Returns a subprocess.Popen.

    The streams are PIPE, DEVNULL, CLOSED, a descriptor or a file. A new session has the terminal on
    stdin as its controlling terminal.
    """
    streams = [stdin, stdout, stderr]

    def prepare(): # in the new process
        if new_session:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0) # this terminal sends Ctrl-C
        for fd in range(3):
            if streams[fd] == CLOSED:
                os.close(fd)
    stdin, stdout, stderr = (None if stream == CLOSED else stream for stream in streams)
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, **OFFLINE, **(env or {})}
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr,
                            bufsize=0, preexec_fn=prepare)


def run_here(arguments, cwd, stdin, environment):
    """Run sample.py in this process, as a notebook does. Its output is text."""
    stdout = output_stream()
    stderr = output_stream()
    with (pytest.MonkeyPatch.context() as patch, stdin_of(stdin) as sys_stdin,
          warnings.catch_warnings()):
        # A run that ends early leaves its files open.
        warnings.simplefilter("ignore", ResourceWarning)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", sys_stdin)
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(cwd)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
    texts = (stream.buffer.getvalue().decode() for stream in (stdout, stderr))
    return subprocess.CompletedProcess(arguments, status, *texts)


def output_stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


@contextmanager
def stdin_of(content):
    """In this block, file descriptor 0 reads these bytes. The block gets a stream of it."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        with redirected(0, file), open(0, encoding="utf-8", closefd=False) as stream:
            yield stream


@contextmanager
def redirected(descriptor, file):
    """Let a file descriptor of this process be another file."""
    saved = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
