"""Run sample.py on a pseudo-terminal, as users do."""
import fcntl
import os
import pty
import select
import struct
import termios
import time
from contextlib import suppress
from subprocess import DEVNULL

from script_process import start_script


class Terminal:
    """A run of sample.py on a pseudo-terminal.

    stdout=False or stderr=False discards that stream.
    """

    def __init__(self, arguments, tiktoken_cache, stdout=True, stderr=True, term="dumb"):
        self.screen, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        modes = termios.tcgetattr(end)
        modes[1] &= ~termios.ONLCR # do not translate newlines
        termios.tcsetattr(end, termios.TCSANOW, modes)
        self.process = start_script(*arguments, stdin=end, stdout=end if stdout else DEVNULL,
                                    stderr=end if stderr else DEVNULL,
                                    TIKTOKEN_CACHE_DIR=tiktoken_cache, TERM=term)
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
