"""The interactive session, on a terminal and with lines from a pipe."""
import sys
import time

import pytest

from terminal import Terminal

SESSION = ("--interactive", "--device=cpu", "--max_new_tokens=30")
RULE = "\n---------------\n"


@pytest.fixture
def session(char_checkpoint, tiktoken_cache):
    """A session on a terminal, ready for the first prompt."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    terminal = Terminal([f"--out_dir={char_checkpoint}", *SESSION], tiktoken_cache)
    terminal.wait_for("type a prompt, or :help")
    terminal.wait_for("> ")
    yield terminal
    terminal.close()


def test_a_session_generates_the_same_samples_as_a_normal_run(session, run_script, char_checkpoint):
    samples = run_script(f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=2", "--max_new_tokens=30").stdout.split(RULE)
    session.type("The \n")
    session.wait_for("The \n") # the terminal shows the typed text
    session.wait_for(samples[0] + RULE)
    session.type("The \n") # the same prompt again gets the next sample
    session.wait_for("The \n")
    session.wait_for(samples[1] + RULE)
    session.type(":seed=1337\n") # a new seed restarts the random stream
    session.wait_for("> ")
    session.type("The \n")
    session.wait_for(samples[0] + RULE)


def test_commands_change_the_settings(session, run_script, char_checkpoint):
    for command in ":temperature=0.5", ":top_k 3", ":max-new-tokens=12", ":stop=e":
        session.type(command + "\n")
        session.wait_for(command + "\n> ")
    session.type("O\n")
    session.wait_for(run_script(f"--out_dir={char_checkpoint}", "--start=O", "--num_samples=1", "--max_new_tokens=12", "--temperature=0.5",
                         "--top_k=3", "--stop=e").stdout)
    session.type(":settings\n")
    session.wait_for("max_new_tokens=12")
    session.wait_for("temperature=0.5")
    session.wait_for("top_k=3")


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
def test_the_session_continues_after_an_error(session, typed, message):
    session.type(typed + "\n")
    session.wait_for(message)
    session.wait_for("> ")
    session.type("The \n")
    session.wait_for(RULE)


def test_ctrl_c_stops_the_sample_but_not_the_session(session):
    session.type(":max_new_tokens=1000000\n:context_shift\nO\n")
    session.wait_for("context_shift\n> O\n")
    session.wait_for("O")
    time.sleep(0.5)
    session.type("\x03")
    session.wait_for("\n> ")
    session.type("not sent")
    session.wait_for("not sent")
    time.sleep(0.3) # within microseconds after a key, Python's readline delays a signal until the next one
    session.type("\x03")
    session.wait_for("\n> ")
    session.type(":max_new_tokens=3\nO\n")
    session.wait_for(RULE)
    session.wait_for("> ")
    session.type("\x04")
    session.read_to_end()
    assert session.process.returncode == 0


def test_lines_can_be_edited_and_recalled(session):
    session.type("Thx\x7fe \n") # a backspace
    session.wait_for(RULE)
    session.type("\x1b[A") # up
    session.wait_for("The ")
    session.type("\x04\n")
    session.wait_for(RULE)


@pytest.mark.parametrize("separate", [False, True], ids=["fork", "separate"])
def test_ctrl_d_ends_the_session(char_checkpoint, tiktoken_cache, separate):
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    terminal = Terminal([f"--out_dir={char_checkpoint}", *SESSION], tiktoken_cache, separate=separate)
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.read_to_end()
    terminal.close()
    assert terminal.process.returncode == 0


def test_a_session_reads_lines_from_a_pipe(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=b'The \n\n:top_k=5\n"\\n"\n:nothing\n')
    assert done.returncode == 0 and done.stdout.count(RULE) == 2 and done.stdout.startswith("The ")
    assert "> " not in done.stdout and "error: a session has no setting nothing" in done.stderr


def test_samples_of_a_failed_prompt_file_count(run_script, char_checkpoint, tmp_path):
    """The samples before the error used their places in the random stream."""
    (tmp_path / "prompts.txt").write_text("The \nO\n¡\n")
    arguments = f"--out_dir={char_checkpoint}", "--max_new_tokens=20", "--device=cpu", "--interactive"
    done = run_script(*arguments, stdin=f"LINES:{tmp_path / 'prompts.txt'}\nThe \n".encode())
    expected = run_script(*arguments, stdin=b"The \nO\nThe \n")
    assert "error: " in done.stderr and done.stdout == expected.stdout
