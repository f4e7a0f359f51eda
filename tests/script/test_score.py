"""sample.py --score."""
import json
import math

import pytest

from models import CHARS, make_gpt, save_checkpoint, save_meta
from script_process import PIPE, start_script
from terminal import Terminal

THE = "--start=The ", "--score"


@pytest.fixture(autouse=True)
def texts(tmp_path):
    (tmp_path / "single.txt").write_text("T\nO\n")
    (tmp_path / "prompts.jsonl").write_text("""
{"prompt": "The ", "id": "act 2", "by": "me"}
{"prompt": "Thou"}
{"prompt": "a", "id": "a\\nb"}
{"prompt": "a", "id": ""}
{"prompt": "a", "id": 7}
""")


@pytest.fixture
def score(run_script, folder):
    """score(*arguments) runs sample.py --score in the folder."""
    return lambda *arguments, **settings: run_script("--score", *arguments, cwd=folder, **settings)


def names(stdout):
    return [line.rsplit(": ", 1)[0] for line in stdout.splitlines()]


@pytest.mark.parametrize("start, expected", [
    ("The ", ["'The '"]),
    ("FILE:-", ["standard input"]),
    # No token is scored, so there is no sum.
    ("LINES:single.txt", ["single.txt, line 1", "single.txt, line 2"]),
    ("LINES:prompts.txt", [*(f"prompts.txt, line {i}" for i in range(1, 6)), "all"]),
    ("JSONL:prompts.jsonl",
     ["act 2", "prompts.jsonl, line 3", r"'a\nb'", "''", "7", "all"]),
])
def test_each_text_is_a_line_with_its_name(score, start, expected):
    assert names(score(f"--start={start}", stdin=b"yes, ").stdout) == expected


def test_the_numbers_are_those_of_equal_probabilities(score, folder):
    """A model of zeros finds all 62 characters equally likely. An é has two bytes."""
    model = make_gpt(vocab_size=62)
    for parameter in model.parameters():
        parameter.data.zero_()
    save_checkpoint(folder / "out", model)
    save_meta(folder / "out" / "meta.pkl", CHARS[:61] + "é")
    nats = math.log(62)
    bits = 5 * math.log2(62) / 7
    numbers = f"5 tokens, {nats:.4f} nats a token, perplexity 62.00, {bits:.2f} bits a byte"
    assert score("--start=The éé").stdout == f"'The éé': {numbers}\n"


def test_a_very_unlikely_text_has_a_score(score, folder):
    model = make_gpt()
    model.transformer.ln_f.weight.data *= 1e6
    save_checkpoint(folder / "out", model)
    done = score(*THE)
    assert ", perplexity inf, " in done.stdout, done.stderr


def test_a_file_of_scores_resumes_with_the_same_sums(score, run_script, folder):
    command = "--start=LINES:prompts.txt", "--out_file=scores.jsonl"
    path = folder / "scores.jsonl"
    whole = score(*command).stdout.splitlines()
    content = path.read_text()
    records = [json.loads(line) for line in content.splitlines()]
    assert [record["num_tokens"] for record in records] == [3, 0, 10, 2, 28]
    # The total is of the sums that the file has, which are rounded.
    total = round(sum(record["cumulative_logprob"] for record in records), 4)
    assert whole[-1].startswith(f"all: 43 tokens, {-total / 43:.4f} nats a token, ")
    path.write_text("".join(content.splitlines(keepends=True)[:2]))
    assert score(*command).stdout.splitlines() == whole[2:]
    samples = run_script(*command, "--num_samples=1", cwd=folder)
    assert "is from another run" in samples.stderr
    assert path.read_text() == content


@pytest.mark.parametrize("name, value", [
    ("num_tokens", None), ("num_bytes", "5"), ("cumulative_logprob", 10**400)])
def test_a_file_with_other_sums_is_not_resumed(score, folder, name, value):
    command = *THE, "--out_file=scores.jsonl"
    path = folder / "scores.jsonl"
    score(*command)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {name: value}) + "\n")
    done = score(*command)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "line 1: it is damaged, or was edited" in done.stderr


def test_lines_and_the_page_have_each_token(score, folder):
    score("--start=JSONL:prompts.jsonl", "--out_file=a.jsonl", "--logprobs=2",
          "--html_file=page.html")
    record = json.loads((folder / "a.jsonl").read_text().splitlines()[0])
    first, *others = record["logprobs"]["content"]
    assert "".join(token["token"] for token in [first, *others]) == record["prompt"] == "The "
    assert first.keys() == {"id", "token"}, "nothing comes before it"
    total = sum(token["logprob"] for token in others)
    assert total == pytest.approx(record["cumulative_logprob"], abs=0.01)
    assert record["by"] == "me"
    assert "text" not in record
    assert record["settings"].keys() == {"score", "compile", "device", "dtype", "logprobs"}
    page = (folder / "page.html").read_text()
    for part in ('<span>The </span>', "[1,null]", "<h1>Scores from out</h1>",
                 f'finish">3 tokens, {-total / 3:.2f}'):
        assert part in page


def test_with_a_batch_size_of_one_a_pipe_gets_each_score_at_once(folder):
    process = start_script("--start=LINES:-", "--score", "--batch_size=1", cwd=folder, stdin=PIPE)
    for text, expected in (b"The \n", b"line 1: 3 tokens"), (b"yes\n", b"line 2: 2 tokens"):
        process.stdin.write(text)
        assert process.stdout.readline().startswith(b"standard input, " + expected)
    process.communicate()


def test_show_probs_colours_the_text(score):
    plain = score(*THE).stdout
    shown = score(*THE, "--show_probs", FORCE_COLOR="1").stdout
    assert shown.startswith("T\x1b[")
    assert shown.endswith(f"\n{plain}")


def test_settings_that_only_sampling_has_are_an_error_on_the_command_line_only(score, folder):
    (folder / "my.py").write_text("batch_size = 1\ntemperature = 0.5\ndraft = True\n")
    from_file = score("my.py", *THE)
    assert names(from_file.stdout) == ["'The '"], from_file.stderr
    wrong = score(*THE, "--temperature=0.8", "--num_samples=3")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr == (
        "error: score=True generates no samples: leave out score, or num_samples and "
        "temperature\n")


@pytest.mark.slow
def test_a_terminal_has_a_bar_while_a_long_text_is_scored(folder, tiktoken_cache):
    book = folder / "book.txt"
    book.write_text("What is it? " * 8000)
    run = f"--out_dir={folder / 'out'}", f"--start=FILE:{book}", "--score", "--device=cpu"
    screen = Terminal(run, tiktoken_cache)
    shown = screen.read_to_end()
    screen.close()
    assert "/96.0k [" in shown
    assert f"\r{book}: 95,999 tokens, " in shown # the line replaces the bar
