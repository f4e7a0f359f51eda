"""A file of samples, a line of JSON each, that a run cut short takes up again."""
import errno
import json
import os
from contextlib import contextmanager, suppress
from itertools import chain


class SampleFile:
    """Samples on disk, in order, each written and flushed as it is done.

    What path already holds stays, and take_up checks it. checkpoint and settings are what every line says besides
    its sample. OSError or ValueError where the file cannot be used.
    """

    def __init__(self, path, checkpoint, settings):
        self.path, self.checkpoint, self.settings = path, checkpoint, settings
        self.file = open_output(path)
        self.count = sum(line.endswith(b"\n") for line in self.file)

    def take_up(self, samples):
        """Yield an iterator's samples, those that the file holds, and are not to be drawn again, marked as kept.

        ValueError, with the file as it was, where it is not the beginning of such a run's. A last line that was cut
        short is taken away.
        """
        self.file.seek(end := 0)
        while line := self.file.readline():
            sample = next(samples, None)
            if sample is None:
                raise ValueError(f"{self.path} holds {self.count} samples, more than this run draws: give out_file "
                                 "another name")
            whole = line.endswith(b"\n")
            if not whole and self.cut_short(sample, line):
                self.file.truncate(end)
                samples = chain([sample], samples)
                break
            self.check(sample, line)
            if not whole:
                self.file.write(b"\n")
            sample.kept, end = True, end + len(line)
            yield sample
        yield from samples

    def cut_short(self, sample, line):
        """Whether this is no more than the beginning of the sample's line."""
        with suppress(ValueError, RecursionError):
            json.loads(line)
            return False
        begin = json.dumps(self.whose(sample), ensure_ascii=False)[:-1].encode("utf-8", errors="backslashreplace")
        return line[:len(begin)] == begin[:len(line)]

    def check(self, sample, line):
        """Raise ValueError that names the difference if this is not the line of this sample of this run."""
        try:
            found = json.loads(line)
            settings, checkpoint = dict(found["settings"]), found["checkpoint"]["crc32"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"{self.path}, line {sample.number + 1}: not one of sample.py's; nothing is overwritten, "
                             "so move the file, or give out_file another name") from None
        for name in self.settings | settings:
            self.compare(sample, name, settings.get(name), self.settings.get(name))
        self.compare(sample, "the checkpoint's checksum", checkpoint, self.checkpoint["crc32"])
        for name in "sample", "prompt", "id":
            self.compare(sample, name, found.get(name), self.whose(sample).get(name))

    def compare(self, sample, name, found, wanted):
        """Raise ValueError unless the two are the same."""
        if found != wanted:
            raise ValueError(f"{self.path}, line {sample.number + 1}, is of another run: there {name} is "
                             f"{found!r:.100}, here {wanted!r:.100}; give out_file another name, or the settings "
                             "it was made with")

    def add(self, sample):
        """Write a sample that has ended."""
        text = json.dumps(self.line(sample), ensure_ascii=False) + "\n"
        with named(self.path):
            if not os.fstat(self.file.fileno()).st_nlink: # or a night's samples would go nowhere
                raise FileNotFoundError(errno.ENOENT, "it was removed during the run")
            self.file.write(text.encode("utf-8", errors="backslashreplace"))
            self.file.flush()

    def close(self):
        """Nothing more comes."""
        self.file.close()

    def whose(self, sample):
        """What a line begins with."""
        found = {"sample": sample.number, "prompt": sample.prompt.text, "id": sample.prompt.id}
        return {name: value for name, value in found.items() if value is not None}

    def line(self, sample):
        """What is written of a sample."""
        return {
            **self.whose(sample), "text": sample.text, "tokens": len(sample.new), "ended": sample.ended,
            # Four digits: further ones depend on which samples shared a batch.
            "logprob": float(f"{sample.logprob:.4g}"), "seed": self.settings["seed"],
            "checkpoint": self.checkpoint, "settings": self.settings,
        }


def open_output(path):
    """A file to read and to add to, which no other run has; OSError or ValueError that names it where it cannot be."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file to add samples to")
    with named(path):
        file = open(path, "a+b") # noqa: SIM115, for as long as the run
    lock(file, path)
    with suppress(OSError): # standard output may be closed
        if os.path.samestat(os.fstat(file.fileno()), os.fstat(1)):
            raise ValueError(f"{path} is where standard output goes: give the file another name")
    file.seek(0)
    return file


@contextmanager
def named(path):
    """Name the file in what the system says of it."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path!r:.200}: {error.strerror}") from None


def lock(file, path):
    """Keep other runs from the file, where the system can; ValueError if one has it."""
    with suppress(ImportError): # Windows
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes {path}: give the file another name") from None
        except OSError: # a file system without locks
            pass
