"""Start sample.py as a fork of the fork server, which is much faster, or as a separate process."""
import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from subprocess import DEVNULL, PIPE

from project import PROJECT, SCRIPT
from script_server import NUMBER, enter_session

CLOSED = "closed" # a standard stream that is closed in the new process
CAN_FORK = sys.platform == "linux" # Windows has no fork, and macOS libraries may crash after one
# Environment variables that Python, torch and their libraries read when they are loaded.
READ_ON_LOADING = re.compile("(?!OMP_NUM_THREADS)(OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|MALLOC|PYTHON|LC_|LANG|LD_|DYLD)")


def start_script(*arguments, cwd=PROJECT, env=None, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, new_session=False, separate=False):
    """Start sample.py with the tests' environment and env. Return a subprocess.Popen or a ForkedProcess.

    The streams are PIPE, DEVNULL, CLOSED, a descriptor or a file. A new session has the terminal on stdin as its controlling
    terminal. separate=True starts a new Python process, as users do, instead of a fork of the server. Variables in env that
    match READ_ON_LOADING need a new process too. A fork computes with one thread, because more threads cost a small model
    three times the processor time. A new process has as many threads as users have.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
    command, streams = [str(SCRIPT), *map(str, arguments)], [stdin, stdout, stderr]
    if CAN_FORK and not separate and read_on_loading(env) == read_on_loading(os.environ):
        return ForkedProcess(command, cwd, {"OMP_NUM_THREADS": "1", **env}, streams, new_session)
    closed = [fd for fd in range(3) if streams[fd] == CLOSED]
    stdin, stdout, stderr = (None if stream == CLOSED else stream for stream in streams)
    return subprocess.Popen([sys.executable, *command], cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0,
                            preexec_fn=partial(enter_session, new_session, closed) if new_session or closed else None)


def read_on_loading(env):
    """The environment variables that a fork cannot change."""
    return {name: value for name, value in env.items() if READ_ON_LOADING.match(name)}


@cache
def server():
    """The socket of the fork server, which exits when this process exits."""
    ours, theirs = socket.socketpair()
    folder = tempfile.TemporaryDirectory()
    env = {**os.environ, "GOMP_SPINCOUNT": "10000", # as sample.py does while the cores are free
           "OPENBLAS_NUM_THREADS": "1"} # numpy's threads would be lost in a fork
    with theirs:
        process = subprocess.Popen([sys.executable, Path(__file__).with_name("script_server.py"), str(theirs.fileno()), folder.name],
                                   env=env, stdin=DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True)

    def close():
        ours.close()
        process.wait()
        folder.cleanup()
    atexit.register(close)
    return ours


class ForkedProcess:
    """A run of sample.py that the fork server has started. It has the attributes and methods of subprocess.Popen that the tests use."""

    def __init__(self, command, cwd, env, streams, new_session):
        self.args, self.returncode = command, None
        self.channel, end = socket.socketpair()
        request = dict(script=command[0], arguments=command[1:], cwd=str(cwd), env=env, new_session=new_session,
                       closed=[fd for fd in range(3) if streams[fd] == CLOSED])
        with end, ExitStack() as theirs:
            (self.stdin, stdin), (self.stdout, stdout), (self.stderr, stderr) = (
                open_stream(fd, stream, theirs) for fd, stream in enumerate(streams))
            socket.send_fds(server(), [b"1"], [stdin, stdout, stderr, end.fileno()])
        self.channel.sendall(json.dumps(request).encode())
        self.channel.shutdown(socket.SHUT_WR)
        self.pid = self.receive()

    def receive(self):
        """Return the next number from the server."""
        message = self.channel.recv(NUMBER.size)
        if not message:
            raise RuntimeError("the fork server has exited")
        return NUMBER.unpack(message)[0]

    def wait(self, timeout=None):
        """Return the exit status, which is negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.channel.settimeout(timeout)
            try:
                self.returncode = self.receive()
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(self.args, timeout) from error
            self.channel.close()
        return self.returncode

    def poll(self):
        """Return the exit status, or None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def send_signal(self, number):
        """Send a signal unless the process has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, input=b"", timeout=None):
        """Write the input, wait for the process to exit, and return its output. Raises subprocess.TimeoutExpired."""
        with ThreadPoolExecutor(3) as pool:
            pool.submit(write_all, self.stdin, input)
            outputs = [pool.submit(read_all, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill() # ends the threads too
                raise
        return tuple(output.result() for output in outputs)


def open_stream(fd, stream, theirs):
    """Return this process's end of a standard stream (None if there is none) and the other end, which theirs closes."""
    if stream == PIPE:
        reader, writer = os.pipe()
        ours, other = (reader, writer) if fd else (writer, reader)
        theirs.callback(os.close, other)
        return open(ours, "rb" if fd else "wb", buffering=0), other
    if stream in (DEVNULL, CLOSED):
        return None, theirs.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
    return None, stream if isinstance(stream, int) else stream.fileno()


def write_all(stream, content):
    if stream is not None:
        with suppress(BrokenPipeError), stream: # the script may close its stdin early
            while content:
                content = content[stream.write(content):]


def read_all(stream):
    if stream is not None and not stream.closed:
        with stream:
            return stream.read()
