"""Fork a process for every run of a script. torch is imported before the fork, so a start takes 0.1 s instead of 1.4 s.

    python script_server.py DESCRIPTOR FOLDER

DESCRIPTOR is a socket. For each run it receives four descriptors: standard input, output and error, and a channel. The server
reads the request from the channel, and writes the process id and later the exit status to it. The server exits when the socket
is closed. The runs cache the bytecode of the project's modules in FOLDER, so that only the first run compiles them.
"""
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

import numpy.random  # noqa: F401 -- the script imports it later
import torch  # nothing here may start threads, because a fork loses them

with suppress(ImportError): # the script imports it, and works without it
    import psutil  # noqa: F401

NUMBER = struct.Struct("i") # a process id or an exit status


def serve(listener):
    """Return the request and its three standard streams, in a new process for each run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN) # do not keep exited supervisors as zombies
    while True:
        message, fds, _, _ = socket.recv_fds(listener, 1, 4)
        if not message:
            sys.exit()
        if os.fork() == 0: # this process becomes the supervisor
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    with socket.socket(fileno=fds.pop()) as channel:
        request = json.loads(channel.makefile().read())
        if pid := os.fork():
            supervise(pid, fds, channel)
    return request, fds


def supervise(pid, fds, channel):
    """Send the process id and later its exit status, and exit."""
    for fd in fds: # otherwise their readers would wait for this process too
        os.close(fd)
    channel.sendall(NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    channel.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def become(request, fds):
    """Make this process look like a new Python process for the request."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    enter_session(request["new_session"], request["closed"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if num_threads := request["env"].get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(num_threads)) # the library read the variable when it was loaded
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(os.path.realpath(request["script"]))
    for fd, name in enumerate(["stdin", "stdout", "stderr"]):
        setattr(sys, name, None if fd in request["closed"] else reopen(fd, getattr(sys, name)))


def reopen(fd, stream):
    """Open a standard stream as Python does, with the encoding of the server's stream."""
    line_buffering = fd == 2 or os.isatty(fd)
    buffering = line_buffering if line_buffering and fd else -1
    return open(fd, "w" if fd else "r", buffering, stream.encoding, stream.errors, newline="\n", closefd=False)


def enter_session(new_session, closed):
    """Start a new session if requested, with the terminal on standard input, and close these streams."""
    if new_session:
        os.setsid()
        if os.isatty(0):
            import fcntl
            import termios
            fcntl.ioctl(0, termios.TIOCSCTTY, 0) # this terminal sends Ctrl-C
    for fd in closed:
        os.close(fd)


if __name__ == "__main__":
    sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[2], False
    gc.freeze() # the forks share these objects, because their garbage collectors do not write to them
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
    importlib.import_module(os.path.splitext(os.path.basename(sys.argv[0]))[0]).command()
