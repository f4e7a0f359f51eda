"""Writes samples as lines of JSON. A later run with the same settings can resume the file."""
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from sampling.inputs.prompts import MULTI_KINDS, RESULT_FIELDS, parse_start
from sampling.outputs.console import is_tty, log_replacements, sanitize
from sampling.outputs.output_file import append, check_not_removed, open_output
from sampling.params import Sample, SampleRequest, Token, as_list

VERSION = 2 # of the fields of a line; lines of version 1 have no such field
VERSION_1_FIELDS = {"sample", "tokens", "ended", "logprob"}

# The settings that decide the text of a sample, besides its prompt and the weights.
REPRODUCIBILITY_KEYS = ("num_samples", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                        "stop", "seed", "compile", "context_shift", "exact", "tokenizer")

CheckpointId = dict[str, str | None]


class LineFormat:
    """Turns samples into lines of JSON.

    Each line holds a sample, checkpoint_id ("path" and "crc32") and settings. logprobs: how many of the most likely
    tokens to save with each sampled token; None: save no tokens.
    """

    def __init__(self, checkpoint_id: CheckpointId, settings: dict[str, Any], logprobs: int | None = None):
        self.checkpoint_id, self.logprobs = checkpoint_id, logprobs
        # A resumed run must have the same settings. With logprobs among them, all lines of a file have the same fields.
        self.settings = settings if logprobs is None else {**settings, "logprobs": logprobs}

    def line(self, sample: Sample) -> bytes:
        """The line of a finished sample."""
        logprobs = {} if self.logprobs is None else {"logprobs": token_logprobs(sample.tokens, self.logprobs)}
        return encode_json({
            **identity(sample.request), "text": sample.text, "num_tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason, "cumulative_logprob": round_logprob(sample.cumulative_logprob),
            **logprobs, "seed": self.settings["seed"], "checkpoint": self.checkpoint_id, "settings": self.settings,
        }) + b"\n"


class JsonlPrinter:
    """Prints each sample on standard output, as the line that JsonlWriter writes."""

    def __init__(self, format: LineFormat):
        self.format = format

    def write(self, sample: Sample) -> None:
        """Print a finished sample."""
        line = self.format.line(sample).decode()
        print(sanitize(line) if is_tty(sys.stdout) else line, end="", flush=True)
        log_replacements()

    def close(self) -> None:
        """Do nothing: every line is already flushed."""


class JsonlWriter:
    """Writes samples to a file, in order. Each sample is flushed when it is finished.

    The lines that the file already holds stay, and resume checks them. If overwrite is True, the first write removes
    them: a run that fails earlier does not change the file. Raises OSError or ValueError if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike, format: LineFormat, overwrite: bool = False):
        self.path, self.format = path, format
        self.file, self.overwrite = open_output(path), overwrite
        self.num_saved = 0 if overwrite else sum(line.endswith(b"\n") or is_json(line) for line in self.file)

    def resume(self, requests: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
        """Yield all requests. Those with samples in the file are marked as already saved.

        Removes a truncated last line, and continues after the line before it. Raises ValueError, without changing the
        file, if the file is from another run.
        """
        requests, end = iter(requests), 0
        self.file.seek(0)
        while not self.overwrite and (line := self.file.readline()):
            request = next(requests, None)
            if request is None:
                raise ValueError(f"{self.path} holds {self.num_saved} samples, more than this run generates: give "
                                 "out_file another name, or replace it with --overwrite")
            has_newline = line.endswith(b"\n")
            if not has_newline and self.is_truncated(line, request):
                self.file.truncate(end)
                requests = chain([request], requests)
                break
            self.check_line(line, request)
            if not has_newline:
                self.file.write(b"\n")
            end += len(line)
            yield replace(request, already_saved=True)
        yield from requests

    def write(self, sample: Sample) -> None:
        """Append a finished sample. Raises OSError if it cannot be written."""
        check_not_removed(self.file)
        if self.overwrite:
            self.file.truncate(0)
            self.overwrite = False
        append(self.file, self.format.line(sample))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def is_truncated(self, line: bytes, request: SampleRequest) -> bool:
        """Whether a line without its newline is only the beginning of this sample's line."""
        begin = encode_json(identity(request))[:-1]
        return not is_json(line) and line[:len(begin)] == begin[:len(line)]

    def check_line(self, line: bytes, request: SampleRequest) -> None:
        """Raise ValueError that names the difference, unless this is the line of this sample of this run."""
        where = f"{self.path}, line {request.index + 1}"
        for name, saved, wanted in self.compare(parse_record(line, where), request):
            if saved != wanted:
                difference = f"{name} is {saved!r:.100} there, and {wanted!r:.100} here"
                if name == "num_samples" and None in (saved, wanted): # only a run of many prompts saves it
                    runs = ["one prompt" if value is None else "a file of many prompts" for value in (saved, wanted)]
                    difference = f"that run had {runs[0]}, and this one has {runs[1]}"
                raise ValueError(f"{where}, is from another run: {difference}; give out_file another name, run with "
                                 "the settings of the file, or replace it with --overwrite")

    def compare(self, record: Mapping[str, Any], request: SampleRequest) -> Iterator[tuple[str, Any, Any]]:
        """Yield everything that must be equal in a saved sample of this run: (name, saved value, this run's value)."""
        saved_settings, settings = record["settings"], self.format.settings
        for name in dict.fromkeys([*settings, *saved_settings]):
            yield name, saved_settings.get(name), settings.get(name)
        yield "the checkpoint's checksum", record["checkpoint"].get("crc32"), self.format.checkpoint_id["crc32"]
        wanted = identity(request)
        for name in dict.fromkeys(["index", "prompt", "id", *wanted, *record]):
            if name == "index" or name not in RESULT_FIELDS: # results differ, but index must be equal
                yield name, record.get(name), wanted.get(name)


def reproducibility_settings(settings: Mapping[str, Any], device_type: str, dtype_name: str) -> dict[str, Any]:
    """The settings that decide the text of a sample, by name. Values with the same meaning become equal."""
    kept = {name: settings[name] for name in REPRODUCIBILITY_KEYS}
    if parse_start(settings["start"])[0] not in MULTI_KINDS:
        del kept["num_samples"] # a longer run of one prompt may continue the file of a shorter run
    for name in "exact", "tokenizer":
        if not kept[name]:
            del kept[name] # files of earlier versions do not have it
    return {
        **kept,
        "top_k": kept["top_k"] or None,
        "top_p": None if kept["top_p"] == 1 else kept["top_p"],
        "min_p": kept["min_p"] or None,
        "stop": [] if kept["stop"] is None else as_list(kept["stop"]),
        "device": device_type,
        "dtype": dtype_name,
    }


def token_logprobs(tokens: list[Token], num_top: int) -> dict[str, Any]:
    """The tokens and their log-probabilities in the form of OpenAI's chat completions, and also their ids."""
    return {"content": [
        {"id": token.id, "token": token.text, "logprob": round_logprob(token.logprob),
         "top_logprobs": [{"token": text, "logprob": round_logprob(logprob)}
                          for text, logprob in token.top_logprobs[:num_top]]}
        for token in tokens]}


def round_logprob(logprob: float) -> float:
    """Round to three decimals, as the page does, because further ones depend on which samples shared a batch."""
    return round(logprob, 3) + 0.0 # never -0.0


def identity(request: SampleRequest) -> dict[str, Any]:
    """The fields at the beginning of a sample's line."""
    prompt = request.prompt
    return {
        "version": VERSION, "index": request.index, "prompt": prompt.text,
        **({} if prompt.id is None else {"id": prompt.id}),
        **prompt.other_fields,
    }


def is_json(line: bytes) -> bool:
    """Whether a line is valid JSON. The beginning of an object is not."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of the file. Raises ValueError, which names where, unless it has this version's fields."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = {}
    record = record if isinstance(record, dict) else {}
    advice = "nothing is overwritten, so move the file, or give out_file another name"
    if record.get("version", 1 if record.keys() >= VERSION_1_FIELDS else VERSION) != VERSION:
        raise ValueError(f"{where}: another version of sample.py wrote this file, with other fields; {advice}")
    if not (isinstance(record.get("settings"), dict) and isinstance(record.get("checkpoint"), dict)):
        raise ValueError(f"{where}: not written by sample.py; {advice}")
    return record


def encode_json(record: Mapping[str, Any]) -> bytes:
    """A record as a line of UTF-8 without its newline. A lone surrogate becomes an escape, because UTF-8 has none."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", errors="backslashreplace")
