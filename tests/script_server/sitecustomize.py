"""Python imports this file at its start, where this folder is on PYTHONPATH. It is then a server
that forks itself for each start of sample.py, which saves the import of torch.

A fork returns from here and goes on as Python does, to the script of its command, sample.py; other
scripts, and the code after "-c", run here. See start_script for the other end of the connection.
The server must not load a model, nor start a thread: neither survives a fork.
"""
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
import traceback
from contextlib import suppress

SCRIPT = sys.argv[0]


def serve(connection):
    """Fork for each start, until the connection is closed. Returns in the started process."""
    running = {} # the reading end of a pipe that a process holds: its id, its reports
    while True:
        ready, _, _ = select.select([connection, *running], [], [])
        for ended in running.keys() & {*ready}:
            report_end(ended, *running.pop(ended))
        if connection not in ready:
            continue
        message, files, _, _ = socket.recv_fds(connection, 2**20, 4)
        if not message:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        *streams, reports = files
        ended, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            for file in connection.detach(), reports, ended, *running:
                os.close(file)
            return become(streams, **json.loads(message))
        for file in held, *streams:
            os.close(file)
        running[ended] = pid, reports
        with suppress(BrokenPipeError): # the test has ended
            os.write(reports, str(pid).encode())


def report_end(ended, pid, reports):
    """Report the exit status, and the peak memory in MB."""
    _, status, used = os.wait4(pid, 0)
    with suppress(BrokenPipeError):
        os.write(reports, f"{os.waitstatus_to_exitcode(status)} {used.ru_maxrss // 1024}".encode())
    os.close(reports)
    os.close(ended)


def become(streams, script, arguments, cwd, env):
    """Let this process be one that was started with these standard streams."""
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0) # this terminal sends Ctrl-C
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for name, mode, buffering in ("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1):
        old = getattr(sys, name)
        setattr(sys, name, os.fdopen(old.fileno(), mode, buffering, old.encoding, old.errors,
                                     closefd=False))
    sys.argv[:] = script, *map(str, arguments)
    if script != SCRIPT:
        status = 1
        try:
            if script == "-c":
                exec(arguments[0], {"__name__": "__main__"})
            else:
                runpy.run_path(script, run_name="__main__")
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status) # sys.exit would take a second to free what was imported


sys.path[0] = os.path.dirname(SCRIPT) # instead of this folder
import sampling.backends.cpu  # noqa: E402
import sampling.sampler.kernels  # noqa: E402
import sampling.text_generator  # noqa: E402, F401

del sys.path[0] # Python inserts it
serve(socket.socket(fileno=int(sys.argv[1])))
