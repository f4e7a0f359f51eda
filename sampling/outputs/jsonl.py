"""The lines of JSON that hold samples: how they are written, and how a later run finds that they are its own."""
import json
from collections.abc import Mapping
from typing import Any

from sampling.inputs.prompts import MULTI_KINDS, RESULT_FIELDS, parse_start
from sampling.params import Sample, SampleRequest, Token, as_list

VERSION = 2 # of the fields of a line

# Settings that each line repeats; reproducibility_settings adds device and dtype. A resumed run has the same values.
REPRODUCIBILITY_KEYS = ("num_samples", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                        "stop", "seed", "compile", "context_shift", "exact", "tokenizer")


class LineFormat:
    """Turns samples into lines, and recognises the lines of the same run.

    Each line holds a sample, checkpoint_id ("path", "crc32" and "iter_num") and settings. logprobs: how many of the
    most likely tokens to save with each sampled token; None: save no tokens.
    """

    def __init__(self, checkpoint_id: dict[str, Any], settings: dict[str, Any], logprobs: int | None = None):
        self.checkpoint_id, self.logprobs = checkpoint_id, logprobs
        # With logprobs among the settings of a run, all lines of a file have the same fields.
        self.settings = settings if logprobs is None else {**settings, "logprobs": logprobs}

    def line(self, sample: Sample) -> bytes:
        logprobs = {} if self.logprobs is None else {"logprobs": token_logprobs(sample.tokens, self.logprobs)}
        return encode_json({
            **request_fields(sample.request), "text": sample.text, "num_tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason, "cumulative_logprob": round_logprob(sample.cumulative_logprob),
            **logprobs, "seed": self.settings["seed"], "checkpoint": self.checkpoint_id, "settings": self.settings,
        }) + b"\n"

    def check(self, line: bytes, request: SampleRequest, where: str) -> None:
        """Raise ValueError, with where and the difference, unless this is the line of this sample of this run."""
        record, wanted = parse_record(line, where), request_fields(request)
        self.check_settings(record, where)
        check_equal("the checkpoint's checksum", record["checkpoint"].get("crc32"), self.checkpoint_id["crc32"], where)
        for name in dict.fromkeys(["index", "prompt", "id", *wanted, *record]):
            if name == "index" or name not in RESULT_FIELDS: # results differ, but index must be equal
                check_equal(name, record.get(name), wanted.get(name), where)

    def check_settings(self, record: Mapping[str, Any], where: str) -> None:
        saved = record["settings"]
        for name in dict.fromkeys([*self.settings, *saved]):
            check_equal(name, saved.get(name), self.settings.get(name), where)


def check_equal(name: str, saved: Any, wanted: Any, where: str) -> None:
    if saved != wanted:
        raise ValueError(f"{where}, is from another run: {name} is {saved!r:.100} there, and {wanted!r:.100} here; "
                         "give out_file another name, run with the settings of the file, or replace it with "
                         "--overwrite")


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
        "stop": as_list(kept["stop"]),
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
    """Round to three decimals, because further ones depend on which samples shared a batch."""
    return round(logprob, 3) + 0.0 # never -0.0


def request_fields(request: SampleRequest) -> dict[str, Any]:
    """The fields with which the line of a sample begins."""
    prompt = request.prompt
    return {
        "version": VERSION, "index": request.index, "prompt": prompt.text,
        **({} if prompt.id is None else {"id": prompt.id}),
        **prompt.other_fields,
    }


def is_truncated_line_of(request: SampleRequest, line: bytes) -> bool:
    """Whether a line is the truncated beginning of the line of this sample."""
    begin = encode_json(request_fields(request))[:-1]
    return not is_complete(line) and line[:len(begin)] == begin[:len(line)]


def is_complete(line: bytes) -> bool:
    """Whether a line is whole. The last line of a file may lack its newline, or more, after a run that was killed."""
    return line.endswith(b"\n") or is_json(line)


def is_json(line: bytes) -> bool:
    """Whether a line is valid JSON. The beginning of an object is not."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """The object in a line. Raises ValueError, which names where, unless it has the fields of this version."""
    record = json.loads(line) if is_json(line) else None
    types = {"version": int, "index": int, "prompt": str, "settings": dict, "checkpoint": dict}
    if not (isinstance(record, dict) and record.get("version") == VERSION
            and all(type(record.get(name)) is kind for name, kind in types.items())):
        raise ValueError(f"{where}: not written by this version of sample.py; nothing is overwritten, so move the "
                         "file, or give another name")
    return record


def encode_json(record: Mapping[str, Any]) -> bytes:
    """A record as a line of UTF-8 without its newline. A lone surrogate becomes an escape, because UTF-8 has none."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", errors="backslashreplace")
