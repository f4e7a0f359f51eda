"""The interactive session, on a terminal and with lines from a pipe."""
import os
import pickle
import shutil
import time
from contextlib import ExitStack
from subprocess import DEVNULL

import pytest

from models import make_gpt, save_checkpoint, save_meta, save_repeating
from script_process import CLOSED, start_script
from terminal import Terminal

SESSION = ("--interactive", "--device=cpu", "--max_new_tokens=30")
RULE = "\n---------------\n"


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
    return lambda *arguments: run_script(f"--out_dir={char_checkpoint}", "--max_new_tokens=30", *arguments).stdout


@pytest.fixture
def reply(run_script, char_checkpoint):
    """A session that reads lines from a pipe: reply(typed, *arguments)."""
    return lambda typed, *arguments, **environment: run_script(
        f"--out_dir={char_checkpoint}", *SESSION, *arguments, stdin=typed.encode("utf-8", "surrogateescape"),
        **environment)


def test_a_session_generates_the_same_samples_as_a_normal_run_and_saves_them_below_others(reply, run, tmp_path):
    first, second, _ = run("--start=The ", "--num_samples=2").split(RULE)
    # The same prompt again gets the next sample. A new seed restarts the random stream.
    done, path = reply(f"The \nThe \n:save {tmp_path}/a\n:seed=1337\nThe \n:save {tmp_path}/a\n"), tmp_path / "a"
    assert done.stdout.split(RULE) == [first, second, first, ""]
    assert path.read_text() == second + RULE + first + RULE


def test_commands_change_the_settings(reply, run):
    done = reply(":temperature=0.5\n:top_k 3\n:max-new-tokens=12\n:stop=e\nO\n:stop=a = b\n:settings\n")
    assert done.stdout == run("--start=O", "--num_samples=1", "--max_new_tokens=12", "--temperature=0.5", "--top_k=3",
                              "--stop=e")
    for setting in "max_new_tokens=12", "temperature=0.5", "top_k=3", "stop='a = b'", "show_probs=False":
        assert f"\n{setting}\n" in done.stderr


ANSWERS = { # what a user types, and a part of the message
    ":temprature=1": "error: unknown command ':temprature'; did you mean temperature?",
    ":temperature=-1": "error: temperature must be 0",
    ":out_dir=foo": "error: :out_dir is fixed in a session: start another one with --out_dir=...",
    ":html-file a": "error: :html_file is fixed in a session",
    ":stop": "stop=None",
    ":stop=\\n": "stop='\\n'\n",
    """:stop='"\\n"'""": "stop='\\n'\n",
    ":stop=a\\n": """write the text in quotes, as Python does: :stop="\\n"\n""",
    ":again 3": "error: :again takes no value",
    **dict.fromkeys([":help", "help", "?"], "Ctrl-D ends the session."),
    ":score=True": "error: :score is no setting",
    ":seed=random": "drawn at random; :seed=",
    '""': "error: the prompt is empty, but a sample needs something to continue, such as a newline",
    "b\udcffd": "lacks: '\\udcff' at 2", # a byte that is not UTF-8
    "FILE:-": "error: this session reads standard input itself",
    ":save": "error: type :save and the name of a file",
    "FILE:--seed.txt": "error: cannot read the prompt file '--seed.txt'",
}


def test_every_line_gets_its_message_and_the_session_continues(reply):
    done = reply(":continue\n:again\n" + "".join(f"{typed}\nThe \n" for typed in ANSWERS))
    assert done.returncode == 0 and done.stdout.count(RULE) == len(ANSWERS)
    position = 0
    for message in "error: there is no sample yet", "error: there is no sample yet", *ANSWERS.values():
        assert message in done.stderr[position:]
        position = done.stderr.index(message, position) + len(message)


def test_tab_completes_commands_and_is_a_character_in_a_prompt(start):
    session = start()
    session.type(":help\n")
    session.wait_for("Ctrl-D ends the session.\n> ")
    session.type(":tem\t=0.5\n")
    session.wait_for("\ntemperature=0.5\n")
    session.type("The\tO\n")
    session.wait_for("lacks: '\\t' at 4")


def test_ctrl_c_stops_the_sample_but_not_the_session(start, tmp_path):
    session = start("--max_new_tokens=1000000", "--context_shift")
    os.mkfifo(tmp_path / "pipe")
    # A sample, a line, a file that nobody writes to.
    for typed, end in ("O\n", RULE), ("not sent", "\n"), (f"FILE:{tmp_path}/pipe\n", "^C\n"):
        session.type(typed)
        session.wait_for(typed)
        time.sleep(0.5) # within microseconds after a key, Python's readline delays a signal until the next one
        session.type("\x03")
        session.wait_for(f"{end}> ")
    session.type(":max_new_tokens=3\nO\n")
    session.wait_for("> O\nO") # a new sample, with its prompt
    session.wait_for(RULE + "> ")


def test_lines_can_be_edited_and_recalled_also_by_a_later_session_and_ctrl_d_ends_it(start):
    session = start()
    for typed, shown in ("Thx\x7fe \n", RULE + "> "), ("\x1b[A", "The "), ("\n", RULE + "> "): # a backspace; up
        session.type(typed)
        session.wait_for(shown)
    session.type("\x04")
    assert session.read_to_end() == "\n" and session.process.returncode == 0
    later = start()
    later.type("\x1b[A")
    later.wait_for("The ")


def test_a_sample_can_be_continued_and_its_continuation_again(reply, run):
    whole = run("--start=The ", "--num_samples=1", "--max_new_tokens=16", "--temperature=0", "--context_shift")
    done = reply(":temperature=0\n:context_shift\n:max_new_tokens=8\nThe \n:continue\n:again\n")
    assert done.stdout == whole[:12] + RULE + whole[12:] + whole[12:]


def test_a_character_that_a_sample_began_comes_whole_when_it_is_continued(run_script, tmp_path):
    save_repeating(tmp_path, [*"🙂".encode()], 256)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    done = run_script(f"--out_dir={tmp_path}", "--interactive", "--device=cpu", "--max_new_tokens=6", "--temperature=0",
                      stdin="🙂\n:continue\n:max_new_tokens=1\n:continue\n:continue\n".encode())
    assert done.stdout.split(RULE) == ["🙂🙂\ufffd", "🙂🙂", "\ufffd", "", ""]


def test_after_a_stop_text_a_sample_continues_what_was_shown(reply, run):
    greedy = "--num_samples=1", "--temperature=0", "--repetition_penalty=10"
    whole = run(*greedy, "--start=The ")
    first, stop = whole[:8], whole[8]
    second = run(*greedy, f"--start={first}").removeprefix(first)
    assert second.startswith(stop)
    typed = f":temperature=0\n:repetition_penalty=10\n:stop={stop}\nThe \n:stop=None\n:continue\n"
    assert reply(typed).stdout == first + RULE + second


def test_probabilities_can_be_switched_on_and_off(reply):
    coloured, plain, _ = reply(":show_probs\nThe \n:show_probs=False\nThe \n", FORCE_COLOR="1").stdout.split(RULE)
    assert "\x1b[38;5;16;48;" in coloured and "\x1b" not in plain


def test_reload_loads_a_newer_checkpoint_and_keeps_the_settings(start, run, char_checkpoint, tmp_path):
    out = shutil.copytree(char_checkpoint, tmp_path / "out")
    session = start(f"--out_dir={out}", "--max_new_tokens=9")

    def check(*shown, typed=(":reload\n", ":again\n")):
        for line, text in zip(typed, shown, strict=True):
            session.type(line)
            session.wait_for(text)
    check(RULE, "\ntemperature=0.0\n", typed=("The \n", ":temperature=0\n"))
    save_checkpoint(out, make_gpt(seed=9), iter_num=200)
    greedy = "--start=The ", "--num_samples=1", "--max_new_tokens=9", "--temperature=0"
    check("iteration 200", run(f"--out_dir={out}", *greedy))
    (out / "ckpt.pt").write_bytes(b"")
    check("error: cannot read", "error: no model is loaded: repair or replace the checkpoint")
    save_checkpoint(out, make_gpt(vocab_size=3))
    save_meta(out / "meta.pkl", "abc")
    check("3 tokens", "error: there is no sample yet") # the last sample's ids are of another vocabulary


def test_pasted_lines_are_one_prompt(start):
    session = start(term="xterm")
    session.type("\x1b[200~The\n:O\x1b[201~\n")
    session.wait_for("The\n:O") # what was pasted
    session.wait_for(RULE + "\x1b[?2004h") # which switches bracketed paste on
    session.type(":again\n")
    session.wait_for("The\n:O")


def test_a_session_reads_lines_from_a_pipe_after_the_setting_start(reply):
    done = reply('\ufeffThe \r\n\n:top_k=5\n"\\n"\n":O"\r\nexit\r\nO\n', "--start=:The ")
    assert done.returncode == 0 and done.stdout.count(RULE) == 4 and "error" not in done.stderr
    assert done.stdout.startswith(":The ") and f"{RULE}:O" in done.stdout and "> " not in done.stdout


def test_a_session_needs_both_streams_and_no_number_of_samples(reply, char_checkpoint):
    assert reply("", "--num_samples=2").stderr.startswith("error: interactive=True prints one sample for each prompt")
    process = start_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=DEVNULL, stdout=CLOSED)
    _, messages = process.communicate()
    assert process.returncode == 1 and b"error: interactive=True needs standard input and standard output" in messages


def test_a_text_or_the_last_sample_is_scored(reply, run, run_script, char_checkpoint, tmp_path):
    """The lines are those of sample.py --score."""
    def score(text):
        return run_script(f"--out_dir={char_checkpoint}", f"--start={text}", "--score").stdout
    sample, lines = run("--start=The ", "--num_samples=1"), f"LINES:{tmp_path}/two.txt"
    (tmp_path / "two.txt").write_text("The \nThou\n")
    done = reply(f":score\n:score What is it?\nThe \n:score\n:score {lines}\n:score {lines}\n")
    assert "error: there is no sample yet: type a prompt, or :score and a text" in done.stderr
    assert done.stdout == score("What is it?") + sample + score(sample.removesuffix(RULE)) + 2 * score(lines)
