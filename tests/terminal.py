"""Run sample.py on a pseudo-terminal, as users do."""
import fcntl
import os
import pty
import select
import struct
import termios
import time
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen

from script_process import start_script


class Terminal:
    """A run of sample.py on a pseudo-terminal.

    stdout=False or stderr=False discards that stream. With tee=True, standard output is a pipe to
    tee, which shows it on the terminal.
    """

    def __init__(self, arguments, tiktoken_cache, stdout=True, stderr=True, term="dumb", tee=False):
        self.screen, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        modes = termios.tcgetattr(end)
        modes[1] &= ~termios.ONLCR # do not translate newlines
        termios.tcsetattr(end, termios.TCSANOW, modes)
        output = end if stdout else DEVNULL
        if tee:
            self.tee = Popen("tee", stdin=PIPE, stdout=end)
            output = self.tee.stdin
        env = {"TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "TERM": term}
        self.process = start_script(*arguments, env=env, stdin=end, stdout=output,
                                    stderr=end if stderr else DEVNULL, new_session=True)
        if tee:
            output.close()
        os.close(end)
        self.bytes = b""

    def read_some(self, seconds=20):
        """Wait for more output. Return False when there is no more."""
        more = b""
        with suppress(OSError): # the other end is closed
            if select.select([self.screen], [], [], seconds)[0]:
                more = os.read(self.screen, 65536)
        self.bytes += more
        return bool(more)

    @property
    def text(self):
        return self.bytes.decode(errors="replace")

    @property
    def shown(self):
        """The lines that the screen shows: after a carriage return, text replaces what is there."""
        lines = []
        for printed in self.text.split("\n"):
            line = ""
            for part in printed.split("\r"):
                line = part + line[len(part):]
            lines.append(line.rstrip())
        return lines

    def wait_for(self, text, seconds=60):
        """Wait until this text is printed, and discard the output up to its end."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline and self.read_some(), self.text
        self.bytes = self.bytes.partition(text.encode())[2]

    def type(self, text):
        os.write(self.screen, text.encode())

    def read_to_end(self):
        while self.read_some():
            pass
        self.process.wait(60)
        return self.text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)
