"""The interactive session, on a terminal and with lines from a pipe."""
import os
import pickle
import time
from contextlib import ExitStack
from shutil import copytree

import pytest

from attacks import write_settled
from models import make_gpt, save_checkpoint, save_meta, save_repeating
from project import RULE
from script_process import run_in_shell
from terminal import Terminal

SESSION = "--interactive", "--device=cpu", "--max_new_tokens=30"
END = f"\n{RULE}\n"
GREEDY = "--num_samples=1", "--temperature=0"


@pytest.fixture
def start(char_checkpoint, tiktoken_cache, tmp_path, monkeypatch):
    """Starts a session on a terminal, ready for the first prompt."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path)) # for the history
    with ExitStack() as stack:
        def start(*arguments, term="dumb"):
            run = f"--out_dir={char_checkpoint}", *SESSION, *arguments
            terminal = Terminal(run, tiktoken_cache, term=term)
            stack.callback(terminal.close)
            terminal.wait_for("type a prompt, or :help; Ctrl-D ends the session\n")
            terminal.wait_for("> ")
            return terminal
        yield start


@pytest.fixture
def run(run_script, char_checkpoint):
    """run(*arguments) runs sample.py without a session. Returns what it prints."""
    run = f"--out_dir={char_checkpoint}", "--max_new_tokens=30"
    return lambda *arguments: run_script(*run, *arguments).stdout


@pytest.fixture
def reply(run_script, char_checkpoint):
    """A session that reads lines from a pipe: reply(typed, *arguments)."""
    def reply(typed, *arguments, **environment):
        stdin = typed.encode("utf-8", "surrogateescape")
        run = f"--out_dir={char_checkpoint}", *SESSION, *arguments
        return run_script(*run, stdin=stdin, **environment)
    return reply


def test_a_session_generates_the_samples_of_a_normal_run_and_saves_them_below_others(
        reply, run, tmp_path):
    first, second, _ = run("--start=The ", "--num_samples=2").split(END)
    # The same prompt again gets the next sample. A new seed restarts the random stream.
    save = f":save {tmp_path}/a\n"
    done = reply(f"The \nThe \n{save}:seed=1337\nThe \n{save}")
    assert done.stdout.split(END) == [first, second, first, ""]
    assert (tmp_path / "a").read_text() == second + END + first + END
    assert done.stderr.count(f"\nadded to {tmp_path}/a\n") == 2


def test_a_sample_is_not_added_to_a_checkpoint_or_another_file(reply, char_checkpoint, tmp_path):
    checkpoint = char_checkpoint / "ckpt.pt"
    before = checkpoint.read_bytes()
    (tmp_path / "notes").write_text("a")
    done = reply(f"The \n:save {checkpoint}\n:save {tmp_path}/notes\n")
    assert done.stderr.count("does not end as :save ends a file, so nothing is added") == 2
    assert checkpoint.read_bytes() == before
    assert (tmp_path / "notes").read_text() == "a"


def test_commands_change_the_settings(reply, run):
    typed = ":temperature=0.5\n:top_k 3\n:max-new-tokens=12\n:stop=e\nO\n:stop=a = b\n:settings\n"
    done = reply(typed)
    assert done.stdout == run("--start=O", "--num_samples=1", "--max_new_tokens=12",
                              "--temperature=0.5", "--top_k=3", "--stop=e")
    for setting in ("max_new_tokens=12", "temperature=0.5", "top_k=3", "stop='a = b'",
                    "show_probs=False"):
        assert f"\n{setting}\n" in done.stderr


HELP = "Ctrl-D ends the session."
ANSWERS = { # what a user types, and a part of the message
    ":temprature=1": "error: unknown command ':temprature'; did you mean temperature?",
    ":temperature=-1": "error: temperature must be 0",
    ":out_dir=foo": "error: :out_dir is fixed in a session: start another one with --out_dir=...",
    ":html-file a": "error: interactive=True saves no samples: leave out out_file, html_file",
    ":num_samples=3": "leave out num_samples, and type :again for another",
    ":watch": "in a session, type :reload",
    ":stop": "stop=None",
    ":temperature=": "error: :temperature= needs a value",
    ':stop=["a"': "error: stop: '[\"a\"' is no list",
    ":stop=\\n": "stop='\\n'\n",
    """:stop='"\\n"'""": "stop='\\n'\n",
    ":stop=a\\n": """as Python does: --stop='"\\n"' in a shell, :stop="\\n" in a session""",
    ":again 3": "error: :again takes no value",
    ":help": HELP,
    "help": HELP,
    "?": HELP,
    ":score=True": "error: :score is no setting",
    ":seed=random": "drawn at random; seed=",
    '""': "error: the prompt is empty, but a sample needs something to continue, such as a newline",
    "b\udcffd": "lacks: '\\udcff' at 2", # a byte that is not UTF-8
    "FILE:-": "error: this session reads standard input itself",
    ":save": "error: type :save and the name of a file",
    "FILE:--seed.txt": "error: cannot read the prompt file '--seed.txt'",
}


def test_every_line_gets_its_message_and_the_session_continues(reply):
    done = reply(":continue\n:again\n" + "".join(f"{typed}\nThe \n" for typed in ANSWERS))
    assert done.returncode == 0
    assert done.stdout.count(END) == len(ANSWERS)
    rest = done.stderr
    for message in 2 * ["error: there is no sample yet"] + [*ANSWERS.values()]:
        assert message in rest
        rest = rest.partition(message)[2]


def test_tab_completes_commands_and_is_a_character_in_a_prompt(start):
    session = start()
    session.type(":help\n")
    session.wait_for(f"{HELP}\n> ")
    session.type(":tem\t=0.5\n")
    session.wait_for("\ntemperature=0.5\n")
    session.type("The\tO\n")
    session.wait_for("lacks: '\\t' at 4")


def test_ctrl_c_stops_the_sample_but_not_the_session(start, tmp_path):
    session = start("--max_new_tokens=1000000", "--context_shift")
    os.mkfifo(tmp_path / "pipe")
    # A sample, a line, a file that nobody writes to.
    for typed, end in ("O\n", END), ("not sent", "\n"), (f"FILE:{tmp_path}/pipe\n", "^C\n"):
        session.type(typed)
        session.wait_for(typed)
        # Within microseconds after a key, Python's readline delays a signal until the next one.
        time.sleep(0.5)
        session.type("\x03")
        session.wait_for(f"{end}> ")
    session.type(":max_new_tokens=3\nO\n")
    session.wait_for("> O\nO") # a new sample, with its prompt
    session.wait_for(f"{END}> ")


def test_lines_can_be_edited_and_recalled_also_by_a_later_session_and_ctrl_d_ends_it(start):
    session = start()
    backspace = "\x7f"
    up = "\x1b[A"
    for typed, shown in (f"Thx{backspace}e \n", f"{END}> "), (up, "The "), ("\n", f"{END}> "):
        session.type(typed)
        session.wait_for(shown)
    session.type("\x04") # Ctrl-D
    assert session.read_to_end() == "\n"
    assert session.process.returncode == 0
    later = start()
    later.type(up)
    later.wait_for("The ")


def test_a_sample_can_be_continued_and_its_continuation_again(reply, run):
    whole = run("--start=The ", *GREEDY, "--max_new_tokens=16", "--context_shift")
    settings = ":temperature=0\n:context_shift\n:max_new_tokens=8\n"
    done = reply(f"{settings}The \n:continue\n:again\n")
    assert done.stdout == whole[:12] + END + 2 * whole[12:]


def test_a_character_that_a_sample_began_comes_whole_when_it_is_continued(run_script, tmp_path):
    save_repeating(tmp_path, [*"🙂".encode()], 256)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    typed = "🙂\n:continue\n:max_new_tokens=1\n:continue\n:continue\n"
    done = run_script(f"--out_dir={tmp_path}", *SESSION, "--max_new_tokens=6", "--temperature=0",
                      stdin=typed.encode())
    assert done.stdout.split(END) == ["🙂🙂\ufffd", "🙂🙂", "\ufffd", "", ""]


def test_after_a_stop_text_a_sample_continues_what_was_shown(reply, run):
    greedy = *GREEDY, "--repetition_penalty=10"
    whole = run(*greedy, "--start=The ")
    first = whole[:8]
    stop = whole[8]
    second = run(*greedy, f"--start={first}").removeprefix(first)
    assert second.startswith(stop)
    done = reply(f":stop={stop}\nThe \n:stop=None\n:continue\n", *greedy[1:])
    assert done.stdout == first + END + second


def test_probabilities_can_be_switched_on_and_off(reply):
    done = reply(":show_probs\nThe \n:show_probs=False\nThe \n", FORCE_COLOR="1")
    coloured, plain, _ = done.stdout.split(END)
    assert "\x1b[38;5;16;48;" in coloured
    assert "\x1b" not in plain


def test_reload_loads_a_newer_checkpoint_and_keeps_the_settings(
        start, run, char_checkpoint, tmp_path):
    out = copytree(char_checkpoint, tmp_path / "out")
    session = start(f"--out_dir={out}", "--max_new_tokens=9")

    def check(typed, shown):
        session.type(typed)
        session.wait_for(shown)
    check("The \n", END)
    check(":temperature=0\n", "\ntemperature=0.0\n")
    save_checkpoint(out, make_gpt(seed=9), iter_num=200)
    check(":reload\n", "iteration 200")
    check(":again\n", run(f"--out_dir={out}", *GREEDY, "--start=The ", "--max_new_tokens=9"))
    write_settled(out / "ckpt.pt", b"")
    check(":reload\n", "error: cannot read")
    check(":again\n", "error: no model is loaded: repair or replace the checkpoint")
    save_checkpoint(out, make_gpt(vocab_size=3))
    save_meta(out / "meta.pkl", "abc")
    check(":reload\n", "3 tokens")
    check(":again\n", "error: there is no sample yet") # the ids were of another vocabulary


def test_pasted_lines_are_one_prompt(start):
    session = start(term="xterm")
    session.type("\x1b[200~:top_k\n\x1b[201~\n") # a single one, with its end, is a command
    session.wait_for("top_k=200\n")
    session.type("\x1b[200~The\n:O\x1b[201~\n")
    session.wait_for("The\n:O") # what was pasted
    session.wait_for(f"{END}\x1b[?2004h") # which switches bracketed paste on
    session.type(":again\n")
    session.wait_for("The\n:O")


def test_a_session_reads_lines_from_a_pipe_after_the_setting_start(reply):
    done = reply('\ufeffThe \r\n\n:top_k=5\n"\\n"\n":O"\r\nexit\r\nO\n', "--start=:The ")
    assert done.returncode == 0
    assert "error" not in done.stderr
    assert done.stdout.count(END) == 4
    assert done.stdout.startswith(":The ")
    assert f"{END}:O" in done.stdout
    assert "> " not in done.stdout


def test_a_session_needs_both_streams_and_no_number_of_samples(reply, char_checkpoint):
    message = "error: interactive=True prints one sample for each prompt"
    assert reply("", "--num_samples=2").stderr.startswith(message)
    assert reply("The ", "--num_samples=1").stdout.count(END) == 1
    run = f"--out_dir={char_checkpoint}", *SESSION
    messages = run_in_shell(">&-", *run, status=1).stderr
    assert "error: interactive=True needs standard input and standard output" in messages


def test_a_text_or_the_last_sample_is_scored(reply, run, run_script, char_checkpoint, tmp_path):
    """The lines are those of sample.py --score."""
    def score(text):
        return run_script(f"--out_dir={char_checkpoint}", f"--start={text}", "--score").stdout
    sample = run("--start=The ", "--num_samples=1")
    lines = f"LINES:{tmp_path}/two.txt"
    (tmp_path / "two.txt").write_text("The \nThou\n")
    typed = f":score\n:score What is it?\nThe \n:score\n:score {lines}\n:score {lines}\n"
    done = reply(typed)
    assert "error: there is no sample yet: type a prompt" in done.stderr
    text_score = score("What is it?")
    sample_score = score(sample.removesuffix(END))
    assert done.stdout == text_score + sample + sample_score + 2 * score(lines)
