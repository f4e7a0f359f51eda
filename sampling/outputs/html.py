"""Makes the page of samples from lines of JSON. It shows how likely each token was, and which
others were likely.

    python sampling/outputs/html.py samples.jsonl [more.jsonl ...] page.html (once installed: nanogpt-compare ...)

Samples of the same prompt and index stand side by side if they are from several runs: other
settings, or another checkpoint. The template page.html has three parts: the beginning, one sample,
the end.
"""
import os
import sys

# It runs as a file: this folder has a html.py, which is not the standard library's.
if not __package__:
    sys.path[0] = os.path.realpath(f"{__file__}/../../..")
import base64
import hashlib
import html
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from sampling.outputs.console import name_write_errors, plural, report_user_errors, setup_console
from sampling.outputs.jsonl import PAGE, SCORE_FIELDS, read_records
from sampling.outputs.printer import summary
from sampling.params import Prompt, Score

# Not __name__: this file is also run as a script.
logger = logging.getLogger("sampling.outputs.html")
NUM_ALTERNATIVES = 5 # of the most likely tokens, shown for each token
FINISH_REASONS = {"length": "stopped at the length limit", "stop": "stopped at a stop text"}
# Prompt, index -> number of a run -> file, position in it.
Rows = dict[tuple[str, int], dict[int, tuple[str, int]]]


def find_samples(files: list[str]) -> tuple[Rows, list[dict[str, Any]]]:
    """Find the samples in some files. Returns where they are, and what the page shows about each
    run.
    """
    rows: Rows = {}
    names = dict(zip(files, short_names(list(map(os.path.abspath, files))), strict=True))
    runs: dict[str, tuple[int, dict[str, Any]]] = {}
    for file in files:
        for _, start, _, record in read_records(file):
            checkpoint = record["checkpoint"]
            loss = checkpoint.get("val_loss")
            settings = {name: value for name, value in record["settings"].items() if name != "logprobs"}
            info = {"checkpoint": checkpoint.get("path"), "iteration": checkpoint.get("iter_num"),
                    "validation loss": f"{loss:.4f}" if isinstance(loss, float) else loss, **settings}
            if len(files) > 1:
                info = {"file": names[file], **info}
            key = json.dumps([checkpoint.get("crc32"), info])
            run, _ = runs.setdefault(key, (len(runs), info))
            rows.setdefault((record["prompt"], record["index"]), {})[run] = file, start
    return rows, [info for _, info in runs.values()]


def write_page(path: str | os.PathLike, files: list[str]) -> int:
    """Write the page of the samples in some files, and return how many there are."""
    rows, infos = find_samples(files)
    if not rows:
        raise ValueError(f"{path} is not written, because there is no sample to show")
    values = {name: [info.get(name) for info in infos] for name in dict.fromkeys(chain.from_iterable(infos))}
    models = short_names(values["checkpoint"])
    shown = {**values, "checkpoint": models}
    differing = [name for name in shown if shown[name] != shown[name][:1] * len(infos)]
    labels = [", ".join(shown[name][run] if name in ("file", "checkpoint") else f"{name} {info[name]}"
                        for name in differing if name in info) for run, info in enumerate(infos)]
    texts = {name: list(map(str, values[name])) for name in values}
    settings = {name: " · ".join(of_runs if len(set(of_runs)) > 1 else of_runs[:1]) for name, of_runs in texts.items()}
    noun = "scores" if "score" in infos[0] else "samples"
    kind = noun.capitalize() if len(infos) == 1 else f"Comparison of {noun}"
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    head, article, tail = template.split("<!-- split here -->\n")
    contents = {name: head.partition(f"<{name}>")[2].partition(f"</{name}>")[0] for name in ("style", "script")}
    # The Content-Security-Policy allows the style and the script with these hashes, and no others.
    hashes = {name: "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
              for name, content in contents.items()}
    path = os.path.realpath(path) # a link stays
    temporary = f"{path}.{os.getpid()}.part"
    with name_write_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8", newline="\n") as page:
                page.write(fill(head, title=escape(f"{kind} from {', '.join(dict.fromkeys(models)):.200}"), **hashes,
                                settings="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
                                                   for name, text in settings.items()),
                                layout="side-by-side" if len(infos) > 1 else ""))
                page.writelines(section_html(article, places, labels) for places in rows.values())
                page.write(tail)
            os.replace(temporary, path)
        finally:
            with suppress(OSError): # after an error, it is still there
                os.unlink(temporary)
    return sum(map(len, rows.values()))


def section_html(template: str, places: Mapping[int, tuple[str, int]], labels: list[str]) -> str:
    """HTML for the samples of one prompt and index: one article, or if there are several runs, one
    for each label.
    """
    records = {}
    for run, (path, start) in sorted(places.items()):
        with open(path, "rb") as file:
            file.seek(start)
            records[run] = json.loads(file.readline())
    record = next(iter(records.values())) # all have the same index, id and prompt
    index = record["index"]
    prompt_id = record.get("id")
    is_score = "score" in record["settings"]
    id_text = prompt_id if isinstance(prompt_id, str) else json.dumps(prompt_id, ensure_ascii=False)
    title = f"{'Text' if is_score else 'Sample'} {index}"
    heading = escape(title if prompt_id is None else f"{title}, id {id_text}")
    # A text that is scored contains it.
    prompt = "" if is_score else f"<b>{escape(record['prompt'])}</b>"
    if len(labels) == 1:
        return fill(template, number=str(index), tag="h2", heading=heading, prompt=prompt, label=title.lower(),
                    **article_values(record))
    articles = []
    for run, label in enumerate(labels):
        if run not in records: # its place stays empty, so that columns line up
            articles.append("<div></div>")
            continue
        record = records[run]
        label = escape(label or f"run {run}")
        articles.append(fill(template, number=f"{index}-{run}", tag="h3", heading=label, prompt="",
                             label=f"{title.lower()}, {label}", **article_values(record)))
    return (f'<section><h2>{heading}</h2><div class="text"><p lang="" dir="auto">{prompt}</p></div>'
            f'<div class="runs">\n{"".join(articles)}</div></section>\n')


def article_values(record: Mapping[str, Any]) -> dict[str, str]:
    """The values in an article that come from a record. Raises ValueError if a field is missing or
    of another type.
    """
    try:
        tokens = record.get("logprobs", {"content": []})["content"]
        if "score" in record["settings"]:
            text = "".join(token["token"] for token in tokens) or record["prompt"]
            finish = summary(Score(0, Prompt(text), [], **{name: record[name] for name in SCORE_FIELDS}))
        else:
            text = record["text"]
            reason = FINISH_REASONS[record["finish_reason"]]
            finish = f"{plural(record['num_tokens'], 'token')}, {reason}"
            if num_tokens := record["num_tokens"]:
                mean = math.exp(record["cumulative_logprob"] / num_tokens)
                finish += f", geometric mean probability {100 * mean:.3g}%"
        return {"text": escape(text), "finish": escape(finish), "data": token_data(tokens) if tokens else ""}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"sample {record['index']} lacks a field, or has a wrong one ({error!r:.100}): "
                         "sample.py did not write it") from None


def token_data(tokens: list[Mapping[str, Any]]) -> str:
    """JSON for the page's script: [length, surprisal, text, surprisal, text, surprisal ...] for
    each token.

    The first surprisal is that of the token, the others are those of the most likely tokens. A
    token that ends inside a character has length 0; the token that completes it has all of it.
    """
    data = []
    for token in tokens:
        # As JavaScript counts.
        length = len(token["token"].encode("utf-16-le", "surrogatepass")) // 2
        entry = [length, surprisal(token.get("logprob"))]
        for top in token.get("top_logprobs", [])[:NUM_ALTERNATIVES]:
            entry += [clean(top["token"]), surprisal(top["logprob"])]
        data.append(entry)
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")


def fill(template: str, **values: str) -> str:
    """Replace each {{name}} of a template by its value, which may itself hold {{name}}."""
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def short_names(paths: Sequence[str | None]) -> list[str]:
    """Names for the paths of files or models: the last parts of each, as few as tell them apart,
    without ckpt.pt.
    """
    parts = [[part for part in Path(str(path or "")).parts if part not in ("/", "..", "ckpt.pt")] for path in paths]
    for count in range(1, 2 + max(map(len, parts), default=0)):
        names = ["/".join(last[-count:]) or "a model" for last in parts]
        if len(set(names)) == len(set(map(tuple, parts))):
            break
    return names


def clean(text: str) -> str:
    """The text with replacements for what HTML cannot hold: lone surrogates and NUL."""
    return text.encode("utf-8", errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def escape(text: str) -> str:
    return html.escape(clean(text)).replace("\r", "&#13;").replace("\n", "&#10;")


def surprisal(logprob: float | None) -> int | None:
    """The negated log-probability in whole thousandths, which is short and keeps three digits of
    the probability.
    """
    # min in this order also handles NaN.
    return None if logprob is None else round(min(99999, -1000 * logprob))


@report_user_errors()
def command() -> None:
    setup_console()
    usage = "give one or more files of samples, and the page: samples.jsonl [more.jsonl ...] page.html"
    if {"-h", "--help"} & {*sys.argv[1:]}:
        return print(f"{__doc__.partition(chr(10))[0]}\n{usage}")
    *paths, page = sys.argv[1:] or [""]
    if not paths or page == "-":
        raise ValueError(usage)
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path!r:.200}")
    if os.path.exists(page) and not (os.path.isfile(page) and PAGE.match(Path(page).read_bytes()[:200])):
        raise ValueError(f"{page} is not a page of samples, so it is not replaced: the last name is that of the page")
    logger.info(f"{page}: {plural(write_page(page, paths), 'sample')}")


if __name__ == "__main__":
    command()
