"""The interactive session: at a terminal as people use it, and with lines from a pipe."""
import sys
import time

import pytest

from terminal import Terminal

SESSION = ("--interactive", "--device=cpu", "--max_new_tokens=30")
RULE = "\n---------------\n"


@pytest.fixture
def session(letters, vocabulary):
    """A session at a terminal, ready for the first prompt."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    terminal = Terminal([f"--out_dir={letters}", *SESSION], vocabulary)
    terminal.until("type a prompt, or :help")
    terminal.until("> ")
    yield terminal
    terminal.close()


def test_a_prompt_is_answered_with_the_samples_of_the_script(session, sample, letters):
    samples = sample(f"--out_dir={letters}", "--start=The ", "--num_samples=2", "--max_new_tokens=30").stdout.split(RULE)
    session.type("The \n")
    session.until("The \n") # what was typed
    session.until(samples[0] + RULE)
    session.type("The \n") # the same prompt again gets the next sample
    session.until("The \n")
    session.until(samples[1] + RULE)
    session.type(":seed=1337\n") # a seed begins its samples anew
    session.until("> ")
    session.type("The \n")
    session.until(samples[0] + RULE)


def test_commands_change_the_settings(session, sample, letters):
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


@pytest.mark.parametrize("typed, message", [
    (":temprature=1", "error: a session has no setting temprature; did you mean temperature?"),
    (":temperature=cold", "error: temperature takes a number"),
    (":temperature=-1", "error: temperature must be 0"),
    (":out_dir=x", "error: a session has no setting out_dir"),
    (":", "error: a session has no setting"), (":stop", "error: :stop needs a value"),
    ("FILE:-", "error: this session reads standard input itself"),
    ("¡", "error: the prompt has characters"),
    ("FILE:nowhere.txt", "error: cannot read the prompt file"),
    ('""', "error: "),
    (":help", "Ctrl-D ends the session"),
], ids=str)
def test_after_a_mistake_the_session_goes_on(session, typed, message):
    session.type(typed + "\n")
    session.until(message)
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
    time.sleep(0.3) # Python's readline keeps a signal that comes in the microseconds after a key until the next signal
    session.type("\x03")
    session.until("\n> ")
    session.type(":max_new_tokens=3\nO\n")
    session.until(RULE)
    session.until("> ")
    session.type("\x04")
    session.rest()
    assert session.process.returncode == 0


def test_lines_can_be_edited_and_recalled(session):
    session.type("Thx\x7fe \n") # a backspace
    session.until(RULE)
    session.type("\x1b[A") # up
    session.until("The ")
    session.type("\x04\n")
    session.until(RULE)


@pytest.mark.parametrize("separate", [False, True], ids=["fork", "separate"])
def test_ctrl_d_ends_the_session(letters, vocabulary, separate):
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    terminal = Terminal([f"--out_dir={letters}", *SESSION], vocabulary, separate=separate)
    terminal.until("> ")
    terminal.type("\x04")
    terminal.rest()
    terminal.close()
    assert terminal.process.returncode == 0


def test_lines_may_come_from_a_pipe(sample, letters):
    done = sample(f"--out_dir={letters}", *SESSION, stdin=b'The \n\n:top_k=5\n"\\n"\n:nothing\n')
    assert done.returncode == 0 and done.stdout.count(RULE) == 2 and done.stdout.startswith("The ")
    assert "> " not in done.stdout and "error: a session has no setting nothing" in done.stderr
