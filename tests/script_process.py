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

CLOSED = "closed" # a standard stream that is closed in a new Python
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


def start_python(*arguments, cwd=PROJECT, stdin=DEVNULL, stdout=PIPE, stderr=PIPE):
    """Start a new Python. The streams are PIPE, DEVNULL, CLOSED, a descriptor or a file.

    Returns a subprocess.Popen.
    """
    streams = [stdin, stdout, stderr]

    def close_streams(): # in the new process
        for fd in range(3):
            if streams[fd] == CLOSED:
                os.close(fd)
    stdin, stdout, stderr = (None if stream == CLOSED else stream for stream in streams)
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=cwd,
                            env={**os.environ, **OFFLINE}, stdin=stdin, stdout=stdout,
                            stderr=stderr, bufsize=0, preexec_fn=close_streams)


# ---- processes that are forked from one that has imported torch, and take a seventh of the time

@cache
def script_server():
    """The connection to script_server/sitecustomize.py, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = PROJECT / "tests" / "script_server"
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(theirs.fileno())], pass_fds=[theirs.fileno()],
        env={**os.environ, **OFFLINE, "PYTHONPATH": str(folder)}, stdin=DEVNULL)
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
        socket.send_fds(script_server(), [json.dumps(request).encode()], files)
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


def start_script(*arguments, script=SCRIPT, cwd=PROJECT, env=None, stdin=DEVNULL, stdout=PIPE,
                 stderr=PIPE, new_session=False):
    """Start sample.py, or another script, with the tests' environment and env.

    The streams are PIPE, DEVNULL, a descriptor or a file. A new session has the terminal on stdin
    as its controlling terminal. Returns a ForkedProcess. It is like that of a new Python, apart
    from modules that have been imported already, and from what these read from the environment.
    """
    env = {**os.environ, **OFFLINE, **(env or {})}
    request = dict(script=str(script), arguments=[*map(str, arguments)], cwd=str(cwd),
                   env={name: str(value) for name, value in env.items()}, new_session=new_session)
    return ForkedProcess(request, (stdin, stdout, stderr))


def run_forked(*arguments, cwd=PROJECT, status=0, **environment):
    """Run sample.py in a fork of the server, otherwise as run_program does."""
    process = start_script(*arguments, cwd=cwd, env=environment)
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
