"""A file of samples, a line of JSON each, that a run cut short takes up again."""
import json
import os
from contextlib import contextmanager, suppress

BEGIN = b'{"sample": 0, "prompt": ' # of every such file


class SampleFile:
    """Samples on disk, in order, each written and flushed as it is done.

    What path already holds stays: a last line that was cut short is taken away, and take_up checks the rest.
    ValueError where it is anything but the beginning of such a run's file; OSError where it cannot be used.
    checkpoint and settings are what every line says besides its sample.
    """

    def __init__(self, path, checkpoint, settings):
        self.path, self.checkpoint, self.settings = path, checkpoint, settings
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"out_file={path} is no file to add samples to")
        with said_of(path):
            self.file = open(path, "a+b") # noqa: SIM115, as long as the run
        lock(self.file, path)
        self.file.seek(0)
        head = self.file.read(len(BEGIN))
        if not BEGIN.startswith(head):
            raise self.foreign(1)
        self.file.seek(0)
        end = self.count = 0
        for line in self.file:
            if line.endswith(b"\n"):
                end, self.count = end + len(line), self.count + 1
        self.file.truncate(end)
        self.file.seek(0)

    def take_up(self, samples):
        """Take what the file holds from an iterator of the run's samples; returns how many. ValueError if not these."""
        for _ in range(self.count):
            self.check(next(samples, None), self.file.readline())
        return self.count

    def check(self, sample, line):
        """Raise ValueError that names the difference if this is not the line of this sample of this run."""
        if sample is None:
            raise ValueError(f"{self.path} holds {self.count} samples, more than this run draws: give out_file "
                             "another name")
        try:
            found = json.loads(line)
            settings, checkpoint = dict(found["settings"]), found["checkpoint"]["crc32"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise self.foreign(sample.number + 1) from None
        for name in self.settings | settings:
            self.compare(sample, name, settings.get(name), self.settings.get(name))
        self.compare(sample, "the checkpoint's checksum", checkpoint, self.checkpoint["crc32"])
        for name, value in ("sample", sample.number), ("prompt", sample.prompt.text), ("id", sample.prompt.id):
            self.compare(sample, name, found.get(name), value)

    def foreign(self, line):
        """The error for a file that holds something else."""
        return ValueError(f"{self.path}, line {line}: not one of sample.py's; nothing is overwritten, so move the "
                          "file, or give out_file another name")

    def compare(self, sample, name, found, wanted):
        """Raise ValueError unless the two are the same."""
        if found != wanted:
            raise ValueError(f"{self.path}, line {sample.number + 1}, is of another run: there {name} is "
                             f"{found!r:.100}, here {wanted!r:.100}; give out_file another name, or the settings "
                             "it was made with")

    def add(self, sample):
        """Write a sample that has ended."""
        text = json.dumps(self.line(sample), ensure_ascii=False) + "\n"
        with said_of(self.path):
            self.file.write(text.encode("utf-8", errors="backslashreplace"))
            self.file.flush()

    def close(self):
        """Nothing more comes."""
        self.file.close()

    def line(self, sample):
        """What is written of a sample."""
        return {
            "sample": sample.number, "prompt": sample.prompt.text,
            **({} if sample.prompt.id is None else {"id": sample.prompt.id}),
            "text": sample.text, "tokens": len(sample.new), "ended": sample.ended,
            # Four digits: further ones depend on which samples shared a batch.
            "logprob": float(f"{sample.logprob:.4g}"), "seed": self.settings["seed"],
            "checkpoint": self.checkpoint, "settings": self.settings,
        }


@contextmanager
def said_of(path):
    """Name the file in what the system says of it."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path!r:.200}: {error.strerror}; what it holds stays, and the same command goes "
                      "on from there") from None


def lock(file, path):
    """Keep a second run from the file, where the system can; ValueError if one has it."""
    with suppress(ImportError): # Windows
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes {path}: give the file another name") from None
        except OSError: # a file system without locks
            pass
