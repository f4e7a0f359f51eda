"""Makes the page of samples from lines of JSON. It shows how likely each token was, and which others were likely.

    python -m sampling.outputs.html samples.jsonl [more.jsonl ...] page.html

Samples of the same prompt and index stand side by side if they are from several runs: other settings, or another
checkpoint. The template page.html has three parts: the beginning, one sample, the end.
"""
import base64
import hashlib
import html
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sampling.outputs.console import log, plural, report_user_errors, setup_console
from sampling.outputs.jsonl import is_complete, parse_record
from sampling.outputs.output_file import PAGE, name_write_errors

NUM_ALTERNATIVES = 5 # of the most likely tokens, shown for each token
FINISH_REASONS = {"length": "stopped at the length limit", "stop": "stopped at a stop text"}


class Runs:
    """Finds the samples in some files, and which runs they belong to.

    files: {name on the page: open file}. Raises ValueError, which names the line, if sample.py did not write it.
    """

    def __init__(self, files: Mapping[str, BinaryIO]):
        self.rows: dict[tuple[str, int], dict[int, tuple[BinaryIO, int]]] = {} # prompt, index -> run -> where it is
        self.infos: list[dict[str, Any]] = [] # what the page shows about each run
        run_numbers: dict[str, int] = {}
        for name, file in files.items():
            for start, record in read_records(file, name):
                info = run_info(record, name if len(files) > 1 else None)
                key = json.dumps([name, record["checkpoint"].get("crc32"), info])
                if key not in run_numbers:
                    run_numbers[key] = len(self.infos)
                    self.infos.append(info)
                row = self.rows.setdefault((record["prompt"], record["index"]), {})
                row[run_numbers[key]] = file, start
        self.shared = {name: value for name, value in (self.infos[0] if self.infos else {}).items()
                       if all(name in info and info[name] == value for info in self.infos)}
        self.differing = [{name: value for name, value in info.items() if name not in self.shared}
                          for info in self.infos]

    def records(self) -> Iterator[dict[int, dict[str, Any]]]:
        """Yield for each prompt and index the samples of its runs: {number of the run: record}."""
        for places in self.rows.values():
            records = {}
            for run, (file, start) in sorted(places.items()):
                file.seek(start)
                records[run] = json.loads(file.readline())
            yield records


def read_records(file: BinaryIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the position and the record of each line, except a truncated last line."""
    start = 0
    file.seek(0)
    for number, line in enumerate(filter(is_complete, file), 1):
        yield start, parse_record(line, f"{name}, line {number}")
        start += len(line)


def run_info(record: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    settings = {setting: value for setting, value in record["settings"].items() if setting != "logprobs"}
    return {**({"file": name} if name else {}), "checkpoint": record["checkpoint"].get("path"),
            "iteration": record["checkpoint"].get("iter_num"), **settings}


def write_page(path: str | os.PathLike, files: Mapping[str, BinaryIO]) -> int:
    """Write the page of these files, {name on the page: open file}, and return its number of samples."""
    runs = Runs(files)
    if not runs.rows:
        raise ValueError(f"{', '.join(files)}: no sample is there, so the page is not written")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    head, article, tail = template.split("<!-- split here -->\n")
    # The browser applies the style and runs the script with these hashes, and no others.
    hashes = {element: content_hash(head, element) for element in ("style", "script")}
    path = os.path.realpath(path) # a link stays
    temporary = f"{path}.part"
    with name_write_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8", newline="\n") as page:
                page.write(fill(head, title=escape(title(runs.infos)), settings=definition_list(runs),
                                layout="side-by-side" if len(runs.infos) > 1 else "", **hashes))
                page.writelines(section_html(article, records, runs.differing) for records in runs.records())
                page.write(tail)
            os.replace(temporary, path)
        finally:
            with suppress(OSError): # after an error, it is still there
                os.unlink(temporary)
    return sum(map(len, runs.rows.values()))


def section_html(article: str, records: Mapping[int, Mapping[str, Any]], differing: list[dict[str, Any]]) -> str:
    """HTML for the samples of one prompt and index. If there is only one run, it is one article."""
    first = next(iter(records.values()))
    index, heading = first["index"], escape(f"Sample {first['index']}{shown_id(first.get('id'))}")
    prompt = f"<b>{escape(first['prompt'])}</b>"
    if len(differing) == 1:
        return fill(article, number=str(index), heading=f'<h2 id="title-{index}">{heading}</h2>', prompt=prompt,
                    label=f"sample {index}", **article_values(first))
    articles = []
    for run, record in records.items():
        label = escape(", ".join(map(setting_text, differing[run].items())) or f"run {run}")
        articles.append(fill(article, number=f"{index}-{run}", heading=f'<h3 id="title-{index}-{run}">{label}</h3>',
                             prompt="", label=f"sample {index}, {label}", **article_values(record)))
    return (f'<section><h2>{heading}</h2><div class="text"><p lang="" dir="auto">{prompt}</p></div>'
            f'<div class="runs">\n{"".join(articles)}</div></section>\n')


def article_values(record: Mapping[str, Any]) -> dict[str, str]:
    """The values in an article that come from a record. Raises ValueError if a field is missing or of another type."""
    try:
        tokens, reason = record.get("logprobs", {"content": []})["content"], record["finish_reason"]
        return {"text": escape(record["text"]), "num_tokens": escape(plural(record["num_tokens"], "token")),
                "finish_reason": FINISH_REASONS[reason], "data": token_data(tokens) if tokens else ""}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"sample {record['index']} lacks a field, or has a wrong one ({error!r:.100}): "
                         "sample.py did not write it") from None


def token_data(tokens: list[Mapping[str, Any]]) -> str:
    """JSON for the page's script: [length, surprisal, text, surprisal, text, surprisal ...] for each token.

    The first surprisal is that of the token, the others are those of the most likely tokens. A surprisal is a
    neg_millilogprob. A token that ends inside a character has length 0; the token that completes it has all of it.
    """
    data = []
    for token in tokens:
        entry = [utf16_length(token["token"]), neg_millilogprob(token["logprob"])]
        for top in token["top_logprobs"][:NUM_ALTERNATIVES]:
            entry += [clean(top["token"]), neg_millilogprob(top["logprob"])]
        data.append(entry)
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")


def fill(template: str, **values: str) -> str:
    """Replace each {{name}} of a template by its value, which may itself hold {{name}}."""
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def content_hash(page: str, element: str) -> str:
    """The hash of an element's text, as a Content-Security-Policy has it."""
    text = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def title(infos: list[dict[str, Any]]) -> str:
    """The page's title, which names the models: of a path, it shows only the last part."""
    names = []
    for info in infos:
        path = Path(str(info["checkpoint"] or ""))
        folder = path.parent if path.name == "ckpt.pt" else path
        names.append(folder.name or "a model")
    return f"Samples from {', '.join(dict.fromkeys(names)) or 'a model':.200}"


def shown_id(prompt_id: Any) -> str:
    if prompt_id is None:
        return ""
    return f", id {prompt_id if isinstance(prompt_id, str) else json.dumps(prompt_id, ensure_ascii=False)}"


def setting_text(item: tuple[str, Any]) -> str:
    name, value = item
    return str(value) if name in ("file", "checkpoint") else f"{name} {value}"


def definition_list(runs: Runs) -> str:
    """HTML for the terms and values of a <dl>: one value if all runs have it, otherwise that of each run."""
    values = {name: repr(value) for name, value in runs.shared.items()}
    for name in dict.fromkeys(name for info in runs.differing for name in info):
        values[name] = " · ".join(repr(info.get(name)) for info in runs.differing)
    return "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())


def clean(text: str) -> str:
    """The text with replacements for what HTML cannot hold: lone surrogates and NUL."""
    return text.encode("utf-8", errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def escape(text: str) -> str:
    return html.escape(clean(text)).replace("\r", "&#13;").replace("\n", "&#10;")


def utf16_length(text: str) -> int:
    return len(text) + sum(char > "\uffff" for char in text)


def neg_millilogprob(logprob: float) -> int:
    """A negated log-probability in whole thousandths, which is short and keeps three digits of the probability."""
    return round(min(99999, -1000 * logprob)) # min in this order also handles NaN


def main() -> None:
    *paths, page = sys.argv[1:] or [""]
    if not paths:
        raise ValueError("give one or more files of samples, and the page: "
                         "python -m sampling.outputs.html samples.jsonl page.html")
    if os.path.exists(page) and not PAGE.match(Path(page).read_bytes()[:200]):
        raise ValueError(f"{page} is not a page of samples, so it is not replaced: give another name")
    with ExitStack() as stack:
        files = {path: stack.enter_context(open(path, "rb")) for path in paths}
        log(f"{page}: {plural(write_page(page, files), 'sample')}")


if __name__ == "__main__":
    setup_console()
    with report_user_errors():
        main()
