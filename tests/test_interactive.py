"""A session: at a terminal as people use it, and with its lines from a pipe."""
import sys
import time

import pytest

from conftest import Terminal

HERE = ("--interactive", "--device=cpu", "--max_new_tokens=30")
RULE = "\n---------------\n"


@pytest.fixture
def session(letters, vocabulary):
    """An interactive session on a terminal, ready for the first prompt."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    terminal = Terminal([f"--out_dir={letters}", *HERE], vocabulary)
    terminal.until("type a prompt, or :help")
    terminal.until("> ")
    yield terminal
    terminal.close()


def test_a_prompt_is_answered_as_the_script_would(session, sample, letters):
    both = sample(f"--out_dir={letters}", "--start=The ", "--num_samples=2", "--max_new_tokens=30").stdout.split(RULE)
    session.type("The \n")
    session.until("The \n") # what was typed
    session.until(both[0] + RULE)
    session.type("The \n") # again: the next sample
    session.until("The \n")
    session.until(both[1] + RULE)
    session.type(":seed=1337\n") # and from the start
    session.until("> ")
    session.type("The \n")
    session.until(both[0] + RULE)


def test_settings_change(session, sample, letters):
    for command in ":temperature=0.5", ":top_k 3", ":max-new-tokens=12", ":stop=e":
        session.type(command + "\n")
        session.until(command + "\n> ")
    session.type("O\n")
    session.until(sample(f"--out_dir={letters}", "--start=O", "--num_samples=1", "--max_new_tokens=12", "--temperature=0.5",
                         "--top_k=3", "--stop=e").stdout)
    session.type(":settings\n")
    session.until("max_new_tokens=12")
    session.until("temperature=0.5")
    session.until("top_k=3")


@pytest.mark.parametrize("typed, said", [
    (":temprature=1", "error: unknown setting :temprature; did you mean temperature?; :help lists"),
    (":temperature=cold", "error: temperature takes a number"),
    (":temperature=-1", "error: temperature must be 0"),
    (":out_dir=x", "error: out_dir cannot be changed here"),
    (":", "error: unknown setting :"), (":stop", "error: :stop needs a value"), ("FILE:-", "error: standard input is where you type"),
    ("¡", "error: the prompt has characters"),
    ("FILE:nowhere.txt", "error: cannot read the prompt file"),
    ('""', "error: "),
    (":help", "Ctrl-D leaves"),
], ids=str)
def test_a_mistake_is_told_and_the_session_goes_on(session, typed, said):
    session.type(typed + "\n")
    session.until(said)
    session.until("> ")
    session.type("The \n")
    session.until(RULE)


def test_ctrl_c_ends_the_sample_and_not_the_session(session):
    session.type(":max_new_tokens=1000000\n:context_shift\nO\n")
    session.until("context_shift\n> O\n")
    session.until("O")
    time.sleep(0.5)
    session.type("\x03")
    session.until("\n> ")
    session.type("not sent")
    session.until("not sent")
    time.sleep(0.3) # a signal in the microseconds after a key waits for the next one, in Python's readline
    session.type("\x03")
    session.until("\n> ")
    session.type(":max_new_tokens=3\nO\n")
    session.until(RULE)
    session.until("> ")
    session.type("\x04")
    session.rest()
    assert session.process.returncode == 0


def test_lines_are_edited_and_remembered(session):
    session.type("Thx\x7fe \n") # a backspace
    session.until(RULE)
    session.type("\x1b[A") # up
    session.until("The ")
    session.type("\x04\n")
    session.until(RULE)


def test_ctrl_d_leaves(session):
    session.type("\x04")
    session.rest()
    assert session.process.returncode == 0


def test_lines_may_come_from_a_pipe(sample, letters):
    done = sample(f"--out_dir={letters}", *HERE, stdin=b'The \n\n:top_k=5\n"\\n"\n:nothing\n')
    assert done.returncode == 0 and done.stdout.count(RULE) == 2 and done.stdout.startswith("The ")
    assert "> " not in done.stdout and "error: unknown setting :nothing" in done.stderr
