"""The lines of JSON that hold samples: what is in one, and whether it is of the same run."""
import functools
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sampling.inputs.prompts import MULTI_KINDS, parse_start
from sampling.samples import Result, Sample, Score, Token
from sampling.settings import RESULT_FIELDS, SAMPLING_SETTINGS, Settings
from sampling.values import as_list

logger = logging.getLogger(__name__)
Record = dict[str, Any] # a line
VERSION = 5 # changes with the fields of a line
CHECKSUM = "the checkpoint's checksum"
# The fields that every line has, and those for what came of the prompt, with their types.
FIELD_TYPES = {"version": int, "index": int, "prompt": str, "settings": dict, "checkpoint": dict}
SCORE_FIELDS = {"num_tokens": int, "num_bytes": int, "cumulative_logprob": float}
SAMPLE_FIELDS = {"text": str, "num_tokens": int, "finish_reason": str, "cumulative_logprob": float}
SAMPLE_TYPES = FIELD_TYPES | SAMPLE_FIELDS
SCORE_TYPES = FIELD_TYPES | SCORE_FIELDS
# The values of settings that are None: a field has the same type in the lines of all runs.
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Some readers take these characters for the end of a line.
SEPARATORS = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}
REMOVE = "remove it and all lines after it, and give the command that wrote them again"

# How the lines begin that sample.py writes.
LINE_START = b'{"version": %d, "index": ' % VERSION # a line of this version
LINE_START_OF_ANY_VERSION = re.compile(rb'\{"version": \d+, "index": ')


@dataclass
class Run:
    """What decides the samples of a model.

    Makes lines of them, and recognises the lines of the same run.
    """
    checkpoint_id: Record # "path", "crc32", "iter_num" and "val_loss"
    settings: Record # as run_settings returns them

    def line(self, sample: Result) -> bytes:
        record = self.first_fields(sample)
        if isinstance(sample, Score):
            names = SCORE_FIELDS
            logprob = round_score(sample.cumulative_logprob, sample.num_tokens)
        else:
            names = SAMPLE_FIELDS
            logprob = rounded(sample.cumulative_logprob)
        for name in names:
            record[name] = getattr(sample, name)
        record["cumulative_logprob"] = logprob
        num_top = self.settings.get("logprobs")
        if num_top is not None and sample.tokens: # in the form of OpenAI's chat completions
            content = [token_fields(token, num_top) for token in sample.tokens]
            record["logprobs"] = {"content": content}
        if "seed" in self.settings: # scores have none
            record["seed"] = self.settings["seed"]
        record["checkpoint"] = filled(self.checkpoint_id)
        record["settings"] = self.settings
        text = json.dumps(record, ensure_ascii=False).translate(SEPARATORS)
        # UTF-8 has no lone surrogates, so they become escapes.
        return text.encode("utf-8", errors="backslashreplace") + b"\n"

    def check(self, record: Record, sample: Result, where: str) -> None:
        """Raises ValueError, with the difference, unless this is the sample's own record."""
        check_equal(record["settings"], self.settings, where)
        saved = {CHECKSUM: record["checkpoint"].get("crc32")}
        check_equal(saved, {CHECKSUM: self.checkpoint_id["crc32"]}, where)
        check_index(record["index"], sample.index, where)
        wanted = self.first_fields(sample)
        saved = {name: value for name, value in record.items()
                 if name in wanted or name not in RESULT_FIELDS}
        check_equal(saved, wanted, where)

    def first_fields(self, sample: Result) -> Record:
        prompt = sample.prompt
        fields = {"version": VERSION, "index": sample.index}
        if isinstance(sample, Sample):
            # A single prompt may get more samples later.
            num_samples = self.settings.get("num_samples", sys.maxsize)
            fields["prompt_index"], fields["sample_index"] = divmod(sample.index, num_samples)
        fields["prompt"] = prompt.text
        if prompt.id is not None:
            fields["id"] = prompt.id
        return fields | prompt.other_fields


def check_equal(saved: Record, wanted: Record, where: str) -> None:
    """Raises ValueError, with where and the first difference, unless the values are equal.

    logprobs changes no text, so saved lines may have other ones.
    """
    if saved == wanted:
        return
    for name in wanted | saved:
        found = saved.get(name)
        if found != wanted.get(name) and name != "logprobs":
            settings = f"--seed={found}" if name == "seed" else "its settings"
            raise ValueError(f"{where}, is from another run: {name} is {found!r:.100} there, and "
                             f"{wanted.get(name)!r:.100} here; give the file another name, run "
                             f"with {settings}, or replace it with --overwrite")


def check_index(found: int, wanted: int, where: str) -> None:
    """Raises ValueError unless the line at this place has the next sample."""
    if found > wanted:
        raise ValueError(f"{where}: the line of sample {wanted} is missing before it: put that "
                         f"back, or {REMOVE}")
    if found < wanted:
        raise ValueError(f"{where}: it is doubled, or moved: sample {found} comes before sample "
                         f"{wanted}, which should be here; remove the line that is doubled")


def run_settings(settings: Settings, device_type: str, dtype_name: str) -> Record:
    """The settings that decide the text of a sample, and what is saved of it.

    Values with the same meaning become equal.
    """
    kept = {}
    if not settings["score"]:
        for name in SAMPLING_SETTINGS:
            kept[name] = OFF.get(name) if settings[name] is None else settings[name]
        del kept["draft"] # it changes no text
        if parse_start(settings["start"])[0] not in MULTI_KINDS:
            del kept["num_samples"] # a longer run of one prompt may continue the file
        # The JSON is a text: an empty list would be of another type than a list of texts.
        kept["stop"] = json.dumps(as_list(kept["stop"]))
    for name in "compile", "tokenizer", "logprobs":
        kept[name] = settings[name]
    kept["score"] = settings["score"] or None
    kept["device"] = device_type
    kept["dtype"] = dtype_name
    return filled(kept)


def filled(fields: Record) -> Record:
    """The fields that have a value.

    None and an empty list are left out: their types are others than those of the fields in other
    lines.
    """
    return {name: value for name, value in fields.items() if value not in (None, [])}


def token_fields(token: Token, num_top: int = 0) -> Record:
    return filled({"id": token.id, "token": token.text, "logprob": rounded(token.logprob),
                   "top_logprobs": list(map(token_fields, token.top_logprobs[:num_top]))})


def rounded(value: float | None, num_digits: int = 3) -> float | None:
    """A log-probability has three decimals: further ones depend on which samples shared a batch."""
    return None if value is None else round(value, num_digits) + 0.0 # never -0.0


def round_score(logprob: float, num_tokens: int) -> float:
    """The sum over a short text keeps more decimals, because the mean is printed with four."""
    return rounded(logprob, max(3, 6 - len(str(num_tokens))))


def read_records(path: str) -> Iterator[tuple[str, int, bytes, Record]]:
    """For each line, yield its place for messages, its position, the line and its record.

    A truncated last line is left out.
    Raises ValueError if sample.py did not write a line, or if another version did.
    """
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip(): # an editor may add a blank line
                where = f"{path}, line {number}"
                record = parse_line(line)
                if record is None and is_truncated(line):
                    logger.info(f"{where} is truncated, so it is left out")
                    return
                if not is_record(record):
                    reason = "another program, or an editor, wrote it: remove it"
                    if line.startswith(LINE_START):
                        reason = f"it is damaged, or was edited: {REMOVE}"
                    elif LINE_START_OF_ANY_VERSION.match(line):
                        reason = "another version of sample.py wrote it: run that version"
                    raise ValueError(f"{where}: {reason}, or give another file; this one is "
                                     "neither used nor changed")
                yield where, start, line, record
            start += len(line)


def parse_line(line: bytes) -> Record | None:
    """The record in a line; None if the line is damaged.

    Most lines have the same end, which is parsed once: these records share its dicts.
    """
    start, _, end = line.rpartition(b', "checkpoint": ')
    try:
        return json.loads(start.decode() + "}") | parse_end(end)
    except (ValueError, TypeError, RecursionError):
        return None


@functools.lru_cache(100)
def parse_end(end: bytes) -> Record:
    return json.loads(b'{"checkpoint": ' + end)


def is_truncated(line: bytes) -> bool:
    if line.endswith(b"\n"):
        return False
    is_start = LINE_START.startswith(line[:len(LINE_START)])
    return is_start or not line.strip(b"\0") # a crash may leave zeros


def is_record(value: Any) -> bool:
    """Whether a value has the fields of a line of this version."""
    if not isinstance(value, dict) or value.get("version") != VERSION:
        return False
    types = SCORE_TYPES if "num_bytes" in value else SAMPLE_TYPES
    return [type(value.get(name)) for name in types] == [*types.values()]
