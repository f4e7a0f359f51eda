"""Run sample.py on a pseudo-terminal, as users do."""
import fcntl
import os
import pty
import select
import struct
import termios
import time
from subprocess import DEVNULL, Popen

from script_process import start_script


class Terminal:
    """A run of sample.py on a pseudo-terminal. stdout=False or stderr=False discards that stream. With tee=True,
    standard output is a pipe to tee, which shows it on the terminal.
    """

    def __init__(self, arguments, tiktoken_cache, stdout=True, stderr=True, term="dumb", tee=False):
        self.screen, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        modes = termios.tcgetattr(end)
        modes[1] &= ~termios.ONLCR # do not translate newlines
        termios.tcsetattr(end, termios.TCSANOW, modes)
        output = end if stdout else DEVNULL
        if tee:
            reader, output = os.pipe()
            self.tee = Popen("tee", stdin=reader, stdout=end)
            os.close(reader)
        self.process = start_script(*arguments, env={"TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "TERM": term},
                                    stdin=end, stdout=output, stderr=end if stderr else DEVNULL, new_session=True)
        if tee:
            os.close(output)
        os.close(end)
        self.bytes = b""

    def read_some(self, seconds=20):
        """Wait for more output. Return False when there is no more."""
        ready, _, _ = select.select([self.screen], [], [], seconds)
        try:
            more = os.read(self.screen, 65536) if ready else b""
        except OSError: # the other end is closed
            more = b""
        self.bytes += more
        return bool(more)

    @property
    def text(self):
        return self.bytes.decode(errors="replace")

    @property
    def shown(self):
        """The lines that the screen shows: after a carriage return, text replaces what is there."""
        lines, column = [""], 0
        for char in self.text:
            if char == "\n":
                lines.append("")
            elif char != "\r":
                lines[-1] = lines[-1][:column].ljust(column) + char + lines[-1][column + 1:]
            column = 0 if char in "\r\n" else column + 1
        return [line.rstrip() for line in lines]

    def wait_for(self, text, seconds=60):
        """Wait until this text is printed, and discard the output up to its end."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline and self.read_some(), self.text
        self.bytes = self.bytes[self.bytes.index(text.encode()) + len(text.encode()):]

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
