"""Run sample.py and other programs in new processes, in forked ones, or in this one. Each way is
faster than the one before.
"""
import atexit
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from subprocess import DEVNULL, PIPE

import pytest

from project import PROJECT, SCRIPT

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


def run_in_shell(redirections, *arguments, status=0):
    """Run sample.py in a new Python, with a shell's redirections of the standard streams."""
    return run_program("sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, SCRIPT,
                       *arguments, status=status)


# ---- processes that are forked from one that has imported torch, and take a seventh of the time

@cache
def script_server():
    """The connection to script_server/sitecustomize.py, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = PROJECT / "tests" / "script_server"
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(theirs.fileno())], pass_fds=[theirs.fileno()],
        env={**os.environ, **OFFLINE, "PYTHONPATH": str(folder)}, stdin=DEVNULL,
        start_new_session=True) # no Ctrl-C of pytest's
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


class ForkedProcess:
    """A process that the server started. It has the parts of subprocess.Popen that tests use."""

    def __init__(self, request, streams):
        self.returncode = None
        self.peak = None # of its memory in MB, when it has ended
        self.stdin, stdin = self.end_of(streams[0], "wb")
        self.stdout, stdout = self.end_of(streams[1], "rb")
        self.stderr, stderr = self.end_of(streams[2], "rb")
        self.reports, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = stdin, stdout, stderr, reports.detach()
        socket.send_fds(script_server(), [request], files)
        for file in files:
            os.close(file)
        self.pid = int(self.reports.recv(100))

    @staticmethod
    def end_of(stream, mode):
        """Our end of a stream, None without a pipe, and the descriptor of the other end."""
        if stream == DEVNULL:
            return None, os.open(os.devnull, os.O_RDWR)
        if stream != PIPE:
            return None, os.dup(stream if isinstance(stream, int) else stream.fileno())
        reader, writer = os.pipe()
        ours, theirs = (writer, reader) if mode == "wb" else (reader, writer)
        return open(ours, mode, buffering=0), theirs

    def wait(self, timeout=None):
        if self.returncode is None:
            self.reports.settimeout(timeout)
            try:
                report = self.reports.recv(100)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("the script", timeout) from None
            self.reports.close()
            self.returncode, self.peak = map(int, report.split())
        return self.returncode

    def poll(self):
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def communicate(self, timeout=300):
        """Close standard input. Returns the rest of the other streams' bytes."""
        if self.stdin:
            self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            outputs = pool.map(read_and_close, (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return tuple(outputs)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def read_and_close(stream):
    if stream:
        with stream:
            return stream.read()


def start_script(*arguments, script=SCRIPT, cwd=PROJECT, stdin=DEVNULL, stdout=PIPE, stderr=PIPE,
                 **environment):
    """Start sample.py, or another script, with the tests' environment and this; script "-c" is the
    code in the first argument.

    The streams are PIPE, DEVNULL, a descriptor or a file. A terminal as stdin is the controlling
    one. Returns a ForkedProcess. It is like that of a new Python, apart from modules that have been
    imported already, and from what these read from the environment.
    """
    env = {**os.environ, **OFFLINE, **environment}
    request = dict(script=script, arguments=arguments, cwd=cwd, env=env)
    return ForkedProcess(json.dumps(request, default=str).encode(), (stdin, stdout, stderr))


def run_forked(*arguments, cwd=PROJECT, status=0, **environment):
    """Run sample.py, or another script, in a fork of the server, otherwise as run_program does."""
    process = start_script(*arguments, cwd=cwd, **environment)
    output = [text.decode() for text in process.communicate()]
    assert status is None or process.returncode == status, output[1]
    return subprocess.CompletedProcess(arguments, process.returncode, *output)


# ---- sample.py in this process

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
