"""Run sample.py as a new process, as users do, or in this process, which is much faster."""
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
from functools import partial
from subprocess import DEVNULL, PIPE

import pytest

from project import PROJECT, SCRIPT

CLOSED = "closed" # a standard stream that is closed in the new process


def start_script(*arguments, cwd=PROJECT, env=None, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, new_session=False):
    """Start sample.py with the tests' environment and env. Returns a subprocess.Popen.

    The streams are PIPE, DEVNULL, CLOSED, a descriptor or a file. A new session has the terminal on stdin as its
    controlling terminal.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(env or {})}
    streams = [stdin, stdout, stderr]
    closed = [fd for fd in range(3) if streams[fd] == CLOSED]
    stdin, stdout, stderr = (None if stream == CLOSED else stream for stream in streams)
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0,
                            preexec_fn=partial(enter_session, new_session, closed) if new_session or closed else None)


def enter_session(new_session, closed):
    """In the new process: start a new session if requested, with the terminal on stdin, and close these streams."""
    if new_session:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0) # this terminal sends Ctrl-C
    for fd in closed:
        os.close(fd)


def run_here(arguments, cwd, stdin, environment):
    """Run sample.py in this process, as a notebook does. Returns its exit status and the bytes of stdout and stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, stdin_of(stdin) as sys_stdin, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning) # a run that ends early leaves its files open
        for name, value in environment.items():
            patch.setenv(name, value)
        for name, value in zip(("stdin", "stdout", "stderr"), (sys_stdin, *streams), strict=True):
            patch.setattr(sys, name, value)
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(cwd)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
    return status, *(stream.buffer.getvalue() for stream in streams)


@contextmanager
def stdin_of(content):
    """In this block, file descriptor 0 reads these bytes, and so does the stream that the block gets."""
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
