"""Makes the page of samples from lines of JSON. It shows how likely each token was, and which
others were likely.

    python sampling/outputs/html.py samples.jsonl [more.jsonl ...] page.html
    (once installed: nanogpt-compare ...)

Samples of the same prompt and index stand side by side if they are from several runs: other
settings, or another checkpoint. The template page.html has three parts: the beginning, one sample,
the end.
"""
import os
import sys

if not __package__: # it runs as a file: this folder has a html.py, not the standard library's
    sys.path[0] = os.path.realpath(f"{__file__}/../../..")
import html
import itertools
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sampling.outputs.console import name_write_errors, plural, report_user_errors, setup_console
from sampling.outputs.jsonl import SCORE_FIELDS, Record, read_records
from sampling.outputs.lines_file import PAGE
from sampling.outputs.printer import summary
from sampling.settings import NUM_ALTERNATIVES

# Not __name__: this file is also run as a script.
logger = logging.getLogger("sampling.outputs.html")
FINISH_REASONS = {"length": "stopped at the length limit", "stop": "stopped at a stop text"}
NO_LABEL = "file", "checkpoint" # what names itself
Places = dict[int, tuple[str, int]] # number of a run -> file, position in it
Infos = list[Record] # what the page shows about each run


def find_samples(files: list[str]) -> tuple[dict[tuple[str, int], Places], Infos]:
    """Find the samples in some files: the places of those of each prompt and index, and their runs.
    """
    rows = {}
    infos = []
    runs = {} # checksum and info, as JSON -> number of the run
    for file in files:
        for _, start, _, record in read_records(file):
            checkpoint = record["checkpoint"]
            loss = checkpoint.get("val_loss")
            info = {"file": os.path.abspath(file)} if len(files) > 1 else {}
            info["checkpoint"] = checkpoint.get("path")
            info["iteration"] = checkpoint.get("iter_num")
            info["validation loss"] = f"{loss:.4f}" if isinstance(loss, float) else loss
            info |= record["settings"]
            info.pop("logprobs", None)
            run = runs.setdefault(json.dumps([checkpoint.get("crc32"), info]), len(runs))
            if run == len(infos):
                infos.append(info)
            rows.setdefault((record["prompt"], record["index"]), {})[run] = file, start
    return rows, infos


def describe_runs(infos: Infos) -> tuple[dict[str, str], list[str]]:
    """The table of all settings, and a label for each run, which says what differs."""
    table = {}
    labels = [[] for _ in infos]
    for name in dict.fromkeys(itertools.chain.from_iterable(infos)):
        values = [str(info.get(name)) for info in infos]
        if name == "file":
            values = short_names(values)
        table[name] = " · ".join(values if len(set(values)) > 1 else values[:1])
        if name == "checkpoint":
            values = short_names(values)
        if len(set(values)) > 1:
            for label, info, value in zip(labels, infos, values, strict=True):
                if name in info:
                    label.append(value if name in NO_LABEL else f"{name} {value}")
    return table, list(map(", ".join, labels))


def write_page(path: str, files: list[str]) -> int:
    """Write the page of the samples in some files, and return how many there are."""
    rows, infos = find_samples(files)
    if not rows:
        raise ValueError(f"{path} is not written, because there is no sample to show")
    table, labels = describe_runs(infos)
    settings = [f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in table.items()]
    models = ", ".join(dict.fromkeys(short_names([str(info["checkpoint"]) for info in infos])))
    kind = "scores" if "score" in infos[0] else "samples"
    title = f"{kind.capitalize()} from {models:.200}"
    layout = ""
    if len(infos) > 1:
        title = f"Comparison of {kind} from {models:.200}"
        layout = "side-by-side"
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    head, article, tail = template.split("<!-- split here -->\n")
    path = os.path.realpath(path) # a link stays
    temporary = Path(f"{path}.{os.getpid()}.part")
    with name_write_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8", errors="replace", newline="\n") as page:
                page.write(fill(head, title=escape(title), settings="\n".join(settings),
                                layout=layout))
                for places in rows.values():
                    page.write(section_html(article, places, labels))
                page.write(tail)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True) # after an error, it is still there
    return sum(map(len, rows.values()))


def section_html(template: str, places: Places, labels: list[str]) -> str:
    """HTML for the samples of one prompt and index: one article, or if there are several runs, one
    for each label.
    """
    records = {}
    for run, (path, start) in sorted(places.items()):
        with open(path, "rb") as file:
            file.seek(start)
            records[run] = json.loads(file.readline())
    record = next(iter(records.values())) # all have the same index, id and prompt
    is_score = "score" in record["settings"]
    name = f"{'Text' if is_score else 'Sample'} {record['index']}"
    heading = name
    prompt_id = record.get("id")
    if prompt_id is not None:
        if not isinstance(prompt_id, str):
            prompt_id = json.dumps(prompt_id, ensure_ascii=False)
        heading = escape(f"{name}, id {prompt_id}")
    # The text of a score contains its prompt.
    prompt = "" if is_score else f"<b>{escape(record['prompt'])}</b>"
    name = name.lower()
    if len(labels) == 1:
        return fill(template, number=str(record["index"]), tag="h2", heading=heading, prompt=prompt,
                    label=name, **article_values(record))
    articles = []
    for run, label in enumerate(labels):
        article = "<div></div>" # the place of a missing sample stays empty: columns line up
        if run in records:
            label = escape(label or f"run {run}")
            article = fill(template, number=f"{record['index']}-{run}", tag="h3", heading=label,
                           prompt="", label=f"{name}, {label}", **article_values(records[run]))
        articles.append(article)
    return (f'<section><h2>{heading}</h2><div class="text"><p lang="" dir="auto">{prompt}</p></div>'
            f'<div class="runs">\n{"".join(articles)}</div></section>\n')


def article_values(record: Record) -> dict[str, str]:
    """The values in an article that come from a record.

    Raises ValueError if a field is missing or of another type.
    """
    try:
        tokens = record["logprobs"]["content"] if "logprobs" in record else []
        if "score" in record["settings"]:
            text = "".join(token["token"] for token in tokens) or record["prompt"]
            finish = summary(*(record[name] for name in SCORE_FIELDS))
        else:
            text = record["text"]
            num_tokens = record["num_tokens"]
            finish = f"{plural(num_tokens, 'token')}, {FINISH_REASONS[record['finish_reason']]}"
            if num_tokens:
                mean = math.exp(record["cumulative_logprob"] / num_tokens)
                finish += f", geometric mean probability {100 * mean:.3g}%"
        data = token_data(tokens) if tokens else ""
        return {"text": escape(text), "finish": escape(finish), "data": data}
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"sample {record['index']} lacks a field, or has a wrong one "
                         f"({error!r:.100}): sample.py did not write it") from None


def token_data(tokens: list[Mapping]) -> str:
    """JSON for the page's script: [length, surprisal, text, surprisal, text, surprisal ...] for
    each token.

    The first surprisal is that of the token, the others are those of the most likely tokens. A
    token that ends inside a character has length 0: the token that completes it has all of it.
    """
    data = []
    for token in tokens:
        length = len(token["token"].encode("utf-16-le", "surrogatepass")) // 2 # as in JavaScript
        entry = [length, surprisal(token.get("logprob"))]
        for top in token.get("top_logprobs", [])[:NUM_ALTERNATIVES]:
            entry += [clean(top["token"]), surprisal(top["logprob"])]
        data.append(entry)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", r"\u003c")


def fill(template: str, **values: str) -> str:
    """Replace each {{name}} of a template by its value, which may itself hold {{name}}."""
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def short_names(paths: Sequence[str]) -> list[str]:
    """Names for the paths of files or models: the last parts of each, as few as tell them apart,
    without ckpt.pt.
    """
    names = []
    for path in paths:
        parts = tuple(part for part in Path(path).parts if part not in ("/", "..", "ckpt.pt"))
        names.append(parts or ("a model",))
    for count in itertools.count(1):
        short = ["/".join(parts[-count:]) for parts in names]
        if len(set(short)) == len(set(names)):
            return short


def clean(text: str) -> str:
    """The text with a replacement for NUL, which HTML cannot hold."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def escape(text: str) -> str:
    return html.escape(clean(text)).replace("\r", "&#13;").replace("\n", "&#10;")


def surprisal(logprob: float | None) -> int | None:
    """The negated log-probability in whole thousandths, which is short and keeps three digits of
    the probability.
    """
    if logprob is None:
        return None
    return round(min(99999, -1000 * logprob)) # in this order, min turns NaN into 99999, too


@report_user_errors()
def command() -> None:
    setup_console()
    usage = ("give one or more files of samples, and the page: samples.jsonl [more.jsonl ...] "
             "page.html")
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(f"Makes a page of the samples of one or more runs: {usage}")
        return
    *paths, page = sys.argv[1:] or [""]
    if not (paths and page.endswith(".html")): # the page may have been forgotten
        raise ValueError(usage)
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path!r:.200}")
    is_page = os.path.isfile(page) and PAGE.match(Path(page).read_bytes()[:200])
    if os.path.exists(page) and not is_page:
        raise ValueError(f"{page} is not a page of samples, so it is not replaced: the last name "
                         "is that of the page")
    logger.info(f"{page}: {plural(write_page(page, paths), 'sample')}")


if __name__ == "__main__":
    command()
