"""sample.py --score."""
import json
import math

import pytest

from models import CHARS, make_gpt, save_checkpoint, save_meta
from pages import CodePointTokenizer
from sampling.outputs import html
from sampling.outputs.printer import Printer, Progress, name_of, summary
from sampling.params import Prompt, Score
from script_process import PIPE, start_script


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "prompts.txt").write_text("The \nO\nWhat is it?\nThou\n")
    (tmp_path / "single.txt").write_text("T\nO\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The ", "id": "act 2", "by": "me"}\n{"prompt": "Thou"}\n')
    return tmp_path


def names(stdout):
    return [line.rsplit(": ", 1)[0] for line in stdout.splitlines()]


@pytest.mark.parametrize("start, expected", [
    ("The ", ["'The '"]), ("FILE:-", ["standard input"]),
    ("LINES:single.txt", ["single.txt, line 1", "single.txt, line 2"]), # no token is scored, so there is no sum
    ("LINES:prompts.txt", [f"prompts.txt, line {i}" for i in (1, 2, 3, 4)] + ["all"]),
    ("JSONL:prompts.jsonl", ["act 2", "prompts.jsonl, line 2", "all"]),
])
def test_each_text_is_a_line_with_its_name(run_script, folder, start, expected):
    done = run_script(f"--start={start}", "--score", stdin=b"yes, ", cwd=folder)
    assert done.returncode == 0 and names(done.stdout) == expected, done.stderr


def test_the_numbers_are_those_of_equal_probabilities(run_script, tmp_path):
    """A model of zeros finds all 62 characters equally likely. An e with an accent has two bytes."""
    model = make_gpt(vocab_size=62)
    weights = {name: weight * 0 for name, weight in model.state_dict().items()}
    save_checkpoint(tmp_path / "out", model, model=weights)
    save_meta(tmp_path / "out" / "meta.pkl", CHARS[:61] + "é")
    done = run_script("--start=The éé", "--score", cwd=tmp_path)
    nats, bits = math.log(62), 5 * math.log2(62) / 7
    assert done.stdout == f"'The éé': 5 tokens, {nats:.4f} nats a token, perplexity 62.00, {bits:.2f} bits a byte\n"


def test_a_file_of_scores_resumes_with_the_same_sums(run_script, folder):
    command = "--start=LINES:prompts.txt", "--score", "--out_file=scores.jsonl"
    whole, lines = run_script(*command, cwd=folder), (folder / "scores.jsonl").read_bytes()
    assert [json.loads(line)["num_tokens"] for line in lines.splitlines()] == [3, 0, 10, 3]
    (folder / "scores.jsonl").write_bytes(b"".join(lines.splitlines(keepends=True)[:2]))
    rest = run_script(*command, cwd=folder)
    assert (folder / "scores.jsonl").read_bytes() == lines
    assert rest.stdout.splitlines() == whole.stdout.splitlines()[2:]
    samples = run_script(*command[::2], "--num_samples=1", cwd=folder)
    assert samples.returncode == 1 and "is from another run" in samples.stderr


@pytest.mark.parametrize("name, value", [("num_tokens", None), ("num_bytes", "5"), ("cumulative_logprob", 10**400)])
def test_a_file_with_other_sums_is_not_resumed(run_script, folder, name, value):
    command = "--start=The ", "--score", "--out_file=scores.jsonl"
    run_script(*command, cwd=folder)
    record = json.loads((folder / "scores.jsonl").read_text())
    (folder / "scores.jsonl").write_text(json.dumps({**record, name: value}) + "\n")
    done = run_script(*command, cwd=folder)
    assert (done.returncode, done.stdout) == (1, "") and "line 1: its sums are not those" in done.stderr


def test_lines_and_the_page_have_each_token(run_script, folder):
    done = run_script("--start=JSONL:prompts.jsonl", "--score", "--out_file=a.jsonl", "--logprobs=2",
                      "--html_file=page.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "a.jsonl").read_text().splitlines()[0])
    first, *others = record["logprobs"]["content"]
    assert "".join(token["token"] for token in [first, *others]) == record["prompt"] == "The "
    assert first.keys() == {"id", "token"}, "nothing comes before it"
    assert sum(t["logprob"] for t in others) == pytest.approx(record["cumulative_logprob"], abs=0.01)
    assert record["by"] == "me" and "text" not in record and record["settings"].keys() == {
        "score", "compile", "device", "dtype", "logprobs"}
    page = (folder / "page.html").read_text()
    assert '<span>The </span>' in page and "[1,null]" in page and "<h1>Scores from out</h1>" in page
    assert f'finish">3 tokens, {-sum(t["logprob"] for t in others) / 3:.2f}' in page


def test_without_alternatives_lines_have_the_tokens_and_a_page_the_text(run_script, folder):
    run_script("--start=The ", "--score", "--out_file=a.jsonl", "--logprobs=0", cwd=folder)
    content = json.loads((folder / "a.jsonl").read_text())["logprobs"]["content"]
    assert [token["token"] for token in content] == list("The ")
    run_script("--start=The ", "--score", "--out_file=b.jsonl", cwd=folder)
    assert html.write_page(folder / "b.html", [str(folder / "b.jsonl")]) == 1
    assert "<span>The </span>" in (folder / "b.html").read_text()


def test_with_a_batch_size_of_one_a_pipe_gets_each_score_at_once(folder):
    process = start_script(f"--out_dir={folder / 'out'}", "--start=LINES:-", "--score", "--batch_size=1", stdin=PIPE)
    for text, expected in (b"The \n", b"line 1: 3 tokens"), (b"yes\n", b"line 2: 2 tokens"):
        process.stdin.write(text)
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"standard input, " + expected)
    process.communicate()


def test_a_very_unlikely_text_has_a_score():
    line = summary(Score(0, Prompt("a"), [], num_tokens=1, num_bytes=1, cumulative_logprob=-1e6))
    assert line.startswith("1 token, 1000000.0000 nats a token, perplexity inf, ")
    assert [name_of(Prompt("a", name)) for name in ("act 2", "a\nb", "", 7)] == ["act 2", r"'a\nb'", "''", "7"]


def test_the_total_is_of_the_sums_that_the_lines_of_texts_are_of(capsys):
    printer = Printer(CodePointTokenizer())
    for logprob in -0.0010049, -0.0010049: # which out_file has as -0.001
        printer.update(Score(0, Prompt("a"), [], finish_reason="length", num_tokens=1, num_bytes=1,
                             cumulative_logprob=logprob), [])
    printer.print_total()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[1] for line in lines] == ["0.0010 nats a token"] * 3


def test_show_probs_colours_the_text(run_script, folder):
    plain = run_script("--start=The ", "--score", cwd=folder).stdout
    done = run_script("--start=The ", "--score", "--show_probs", cwd=folder, FORCE_COLOR="1")
    assert done.stdout.startswith("T\x1b[") and done.stdout.endswith(f"\n{plain}")


def test_settings_that_only_sampling_has_are_an_error_on_the_command_line_only(run_script, folder):
    (folder / "my.py").write_text("batch_size = 1\ntemperature = 0.5\ndraft = True\n")
    from_file = run_script("my.py", "--start=The ", "--score", cwd=folder)
    assert from_file.returncode == 0 and names(from_file.stdout) == ["'The '"], from_file.stderr
    wrong = run_script("--start=The ", "--score", "--temperature=0.8", "--num_samples=3", cwd=folder)
    assert wrong.returncode == 2 and not wrong.stdout
    assert wrong.stderr == "error: score=True generates no samples: leave out num_samples, temperature, or score\n"


def test_the_bar_ends_at_the_number_of_scored_tokens():
    progress = Progress(2, None)
    texts = progress.follow(Score(i, Prompt("a"), [], ids=[1] * 5) for i in range(2))
    next(texts)
    assert progress.expect_tokens() is None # the second text was not read yet
    next(texts)
    assert progress.expect_tokens() == 8


@pytest.mark.slow
def test_a_terminal_has_a_bar_while_a_long_text_is_scored(folder, tiktoken_cache):
    terminal = pytest.importorskip("terminal")
    (folder / "book.txt").write_text("What is it? " * 30_000)
    screen = terminal.Terminal([f"--out_dir={folder / 'out'}", f"--start=FILE:{folder / 'book.txt'}", "--score",
                                "--device=cpu"], tiktoken_cache)
    shown = screen.read_to_end()
    screen.close()
    assert "/360k [" in shown and f"\r{folder / 'book.txt'}: 359,999 tokens, " in shown # the line replaces the bar
