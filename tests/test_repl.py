"""The interactive session, on a terminal and with lines from a pipe."""
import io
import os
import re
import signal
import sys
import time
from subprocess import DEVNULL

import pytest

import terminal
from sampling import line_input
from sampling.generation.engine import Engine
from sampling.outputs.printer import Printer
from sampling.repl import run_repl
from script_process import CLOSED, start_script
from terminal import Terminal

SESSION = ("--interactive", "--device=cpu", "--max_new_tokens=30")
RULE = "\n---------------\n"


class SessionTerminal(Terminal):
    """A terminal that interprets the sequences that switch bracketed paste on and off."""

    def read_some(self, seconds=20):
        has_more = super().read_some(seconds)
        self.bytes = re.sub(rb"\x1b\[\?2004[hl]|\r", b"", self.bytes)
        return has_more


@pytest.fixture
def start(char_checkpoint, tiktoken_cache, tmp_path, monkeypatch):
    """Starts a session on a terminal, ready for the first prompt."""
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path)) # for the history
    started = []

    def start(*arguments, **options):
        arguments = [f"--out_dir={char_checkpoint}", *SESSION, *arguments]
        started.append(SessionTerminal(arguments, tiktoken_cache, **options))
        started[-1].wait_for("type a prompt, or :help; Ctrl-D ends the session\n")
        started[-1].wait_for("> ")
        return started[-1]
    yield start
    for one in started:
        one.close()


@pytest.fixture
def session(start):
    """A session on a terminal, ready for the first prompt."""
    return start()


def test_a_session_generates_the_same_samples_as_a_normal_run(session, run_script, char_checkpoint):
    run = f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=2", "--max_new_tokens=30"
    samples = run_script(*run).stdout.split(RULE)
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
    session.wait_for(run_script(f"--out_dir={char_checkpoint}", "--start=O", "--num_samples=1", "--max_new_tokens=12",
                                "--temperature=0.5", "--top_k=3", "--stop=e").stdout)
    session.type(":settings\n")
    session.wait_for("max_new_tokens=12")
    session.wait_for("temperature=0.5")
    session.wait_for("top_k=3")
    session.type(":stop=a = b\n:settings\n")
    session.wait_for("stop='a = b'")


def test_the_session_continues_after_an_error(session):
    session.type(":temprature=1\n")
    session.wait_for("error: unknown command ':temprature'; did you mean temperature?")
    session.wait_for("> ")
    session.type("The \n")
    session.wait_for(RULE)


ANSWERS = { # what a user types, and a part of the message
    ":temperature=cold": "error: temperature takes a number",
    ":temperature=-1": "error: temperature must be 0",
    ":out_dir=x": "error: unknown command ':out_dir'",
    ":": "error: unknown command ':'; :help lists all commands",
    ":stop": "error: :stop needs a value",
    ":x": "put a prompt that begins with a colon in quotes",
    ":again 3": "error: :again takes no value",
    ":help": "Ctrl-D ends the session",
    ":seed=random": "drawn at random; :seed=",
    '""': "error: the prompt is empty, but a sample needs something to continue, such as a newline",
    "¡": "error: the prompt has characters",
    "FILE:-": "error: this session reads standard input itself",
    "FILE:nowhere.txt": "error: cannot read the prompt file 'nowhere.txt'",
    "FILE:a--b.txt": "error: cannot read the prompt file 'a--b.txt'",
    "FILE:--seed.txt": "error: cannot read the prompt file '--seed.txt'",
}


def test_every_line_gets_its_message_and_the_session_continues(run_script, char_checkpoint):
    typed = ":continue\n:again\n" + "".join(f"{typed}\nThe \n" for typed in ANSWERS)
    done = run_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=typed.encode())
    assert done.returncode == 0 and done.stdout.count(RULE) == len(ANSWERS)
    position = 0
    for message in "error: there is no sample yet", "error: there is no sample yet", *ANSWERS.values():
        assert message in done.stderr[position:]
        position = done.stderr.index(message, position) + len(message)


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


def test_ctrl_d_ends_the_session_and_the_line(start):
    session = start()
    session.type("\x04")
    assert session.read_to_end() == "\n"
    assert session.process.returncode == 0


@pytest.mark.parametrize("typed", [":quit", pytest.param(":q", marks=pytest.mark.slow), "exit"])
def test_words_end_the_session(session, typed):
    session.type(f"{typed}\n")
    assert session.read_to_end() == f"{typed}\n"
    assert session.process.returncode == 0


def test_a_sample_can_be_continued(session, run_script, char_checkpoint):
    whole = run_script(f"--out_dir={char_checkpoint}", "--start=The ", "--num_samples=1", "--max_new_tokens=16",
                       "--temperature=0", "--context_shift").stdout
    session.type(":temperature=0\n:context_shift\n:max_new_tokens=8\nThe \n")
    session.wait_for(f"\n{whole[:12]}{RULE}> ")
    session.type(":continue\n")
    session.wait_for(f":continue\n{whole[12:]}> ")
    session.type(":again\n")
    session.wait_for(f":again\n{whole[12:]}> ")


def test_after_a_stop_text_a_sample_continues_what_was_shown(session, run_script, char_checkpoint):
    run = (f"--out_dir={char_checkpoint}", "--num_samples=1", "--max_new_tokens=30", "--temperature=0")
    first = run_script(*run, "--start=The ", "--stop=e").stdout.removesuffix(RULE)
    second = run_script(*run, f"--start={first}").stdout.removeprefix(first)
    session.type(":temperature=0\n:stop=e\nThe \n")
    session.wait_for(first + RULE)
    session.type(":stop=None\n:continue\n")
    session.wait_for(f":continue\n{second}")


def test_probabilities_can_be_switched_on(session):
    session.type(":show_probs\nThe \n")
    session.wait_for("\x1b[38;5;16;48;")
    session.wait_for(RULE)
    session.type(":show_probs=False\nThe \n")
    session.wait_for("The \n")
    session.wait_for(RULE)
    assert "\x1b[38" not in session.text
    session.type(":settings\n")
    session.wait_for("show_probs=False")


def test_history_is_kept_between_sessions(session, start):
    session.type("The \n")
    session.wait_for(RULE)
    session.wait_for("> ")
    session.type("\x04")
    session.read_to_end()
    second = start()
    second.type("\x1b[A") # up
    second.wait_for("The ")


def test_pasted_lines_are_one_prompt(start, monkeypatch):
    def start_on_xterm(*arguments, env, **options):
        return start_script(*arguments, env={**env, "TERM": "xterm"}, **options)
    monkeypatch.setattr(terminal, "start_script", start_on_xterm)
    session = start()
    session.type("\x1b[200~The\n:O\x1b[201~\n")
    session.wait_for("The\n:O") # what was pasted
    session.wait_for("The\n:O")
    session.wait_for(RULE)
    session.wait_for("> ")
    session.type("\x1b[A") # up
    session.wait_for(r"'The\n:O'")


def test_with_samples_in_a_pipe_the_session_asks_on_the_terminal(start):
    session = start(stdout=False)
    session.type("The \n")
    session.wait_for("The \n> ")
    session.type("\x04")
    assert session.read_to_end() == "\n"


def test_the_setting_start_is_the_first_prompt(capsys, monkeypatch, char_checkpoint):
    import sampling
    generator = sampling.load(str(char_checkpoint))
    engine = Engine(generator.model, sampling.SamplingParams(max_new_tokens=5, temperature=0))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for start, prompts in (":The ", [":The ", "O"]), ("\n", ["O"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("O\n"))
        run_repl(engine, Printer(generator.model.tokenizer), start)
        assert [text[:-5] for text in capsys.readouterr().out.split(RULE)[:-1]] == prompts


def test_a_session_reads_lines_from_a_pipe(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=b'The \n\n:top_k=5\n"\\n"\n:nothing\n":O"\n')
    assert done.returncode == 0 and done.stdout.count(RULE) == 3
    assert done.stdout.startswith("The ") and f"{RULE}:O" in done.stdout
    assert "> " not in done.stdout and "error: unknown command ':nothing'" in done.stderr


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order-mark"])
def test_a_session_reads_windows_lines_from_a_pipe(run_script, char_checkpoint, mark):
    done = run_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=mark + b"The \r\n:quit\r\nO\r\n")
    assert done.stdout.count(RULE) == 1 and done.stdout.startswith("The ") and "error" not in done.stderr


def test_a_line_that_is_not_utf8_is_an_error_of_its_own(run_script, char_checkpoint):
    lines, encoding = b"The \nb\xffd\nO\n", "utf-8:strict" # as in most locales
    done = run_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=lines, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and done.stdout.count(RULE) == 2 and "lacks: '\\udcff' at 2" in done.stderr


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_session_needs_both_streams(char_checkpoint, stream):
    process = start_script(f"--out_dir={char_checkpoint}", *SESSION, **{"stdin": DEVNULL, stream: CLOSED})
    _, messages = process.communicate()
    assert process.returncode == 1 and b"error: interactive=True needs standard input and standard output" in messages
    assert b"Traceback" not in messages


def test_ctrl_c_ends_the_wait_for_a_pipe_of_prompts(session, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    session.type(f"FILE:{tmp_path / 'pipe'}\n")
    session.wait_for("pipe\n")
    time.sleep(0.3)
    session.type("\x03")
    session.wait_for("\n> ")
    session.type("O\n")
    session.wait_for(RULE)


@pytest.mark.parametrize("pasted, line", [("The\n", "The"), ("The\nO\n", "The\nO\n"), ("\n", "")], ids=repr)
def test_a_pasted_line_may_have_its_newline(pasted, line, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: pasted)
    monkeypatch.setattr(line_input, "replace_last_history_item", lambda line: None)
    assert line_input.input_line() == line


def test_samples_of_a_failed_prompt_file_count(run_script, char_checkpoint, tmp_path):
    """The samples before the error used their places in the random stream."""
    (tmp_path / "prompts.txt").write_text("The \nO\n¡\n")
    arguments = f"--out_dir={char_checkpoint}", "--max_new_tokens=20", "--device=cpu", "--interactive"
    done = run_script(*arguments, stdin=f"LINES:{tmp_path / 'prompts.txt'}\nThe \n".encode())
    expected = run_script(*arguments, stdin=b"The \nO\nThe \n")
    assert "error: " in done.stderr and done.stdout == expected.stdout
