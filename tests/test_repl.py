"""The interactive session, on a terminal and with lines from a pipe."""
import os
import pickle
import re
import shutil
import time
from contextlib import ExitStack
from subprocess import DEVNULL

import pytest

import terminal
from configurator import find_settings
from models import make_gpt, save_checkpoint, save_meta, save_repeating
from project import SCRIPT
from sampling import repl
from script_process import CLOSED, start_script
from terminal import Terminal

SESSION = ("--interactive", "--device=cpu", "--max_new_tokens=30")
RULE = "\n---------------\n"


class SessionTerminal(Terminal):
    """A terminal that interprets the sequences that switch bracketed paste on and off."""
    has_bracketed_paste = False # whether it was switched on

    def read_some(self, seconds=20):
        has_more = super().read_some(seconds)
        self.has_bracketed_paste |= b"\x1b[?2004h" in self.bytes
        self.bytes = re.sub(rb"\x1b\[\?2004[hl]|\r", b"", self.bytes)
        return has_more

    def answer(self, typed, *texts):
        """Type a line, and wait until the terminal shows it, then these texts."""
        self.type(typed + "\n")
        for text in typed + "\n", *texts:
            self.wait_for(text)


@pytest.fixture
def start(char_checkpoint, tiktoken_cache, tmp_path, monkeypatch):
    """Starts a session on a terminal, ready for the first prompt."""
    pytest.importorskip("pty")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path)) # for the history
    with ExitStack() as stack:
        def start(*arguments):
            terminal = SessionTerminal([f"--out_dir={char_checkpoint}", *SESSION, *arguments], tiktoken_cache)
            stack.callback(terminal.close)
            terminal.wait_for("type a prompt, or :help; Ctrl-D ends the session\n")
            terminal.wait_for("> ")
            return terminal
        yield start


@pytest.fixture
def session(start):
    """A session on a terminal, ready for the first prompt."""
    return start()


@pytest.fixture
def run(run_script, char_checkpoint):
    """The output of a normal run: run(*arguments)."""
    return lambda *arguments: run_script(f"--out_dir={char_checkpoint}", "--max_new_tokens=30", *arguments).stdout


@pytest.fixture
def reply(run_script, char_checkpoint):
    """A session that reads lines from a pipe: reply(typed, *arguments)."""
    return lambda typed, *arguments, **environment: run_script(
        f"--out_dir={char_checkpoint}", *SESSION, *arguments, stdin=typed, **environment)


def test_a_session_generates_the_same_samples_as_a_normal_run(session, run):
    samples = run("--start=The ", "--num_samples=2").split(RULE)
    session.answer("The ", samples[0] + RULE)
    session.answer("The ", samples[1] + RULE) # the same prompt again gets the next sample
    session.answer(":seed=1337", "> ") # a new seed restarts the random stream
    session.answer("The ", samples[0] + RULE)


def test_commands_change_the_settings(session, run):
    for command in ":temperature=0.5", ":top_k 3", ":max-new-tokens=12", ":stop=e":
        session.answer(command, "> ")
    session.answer("O", run("--start=O", "--num_samples=1", "--max_new_tokens=12", "--temperature=0.5", "--top_k=3",
                            "--stop=e"))
    session.answer(":settings", "max_new_tokens=12", "temperature=0.5", "top_k=3")
    session.answer(":stop=a = b", "> ")
    session.answer(":settings", "stop='a = b'")


ANSWERS = { # what a user types, and a part of the message
    ":temprature=1": "error: unknown command ':temprature'; did you mean temperature?",
    ":temperature=cold": "error: temperature takes a number",
    ":temperature=-1": "error: temperature must be 0",
    ":": "error: unknown command ':'; :help lists all commands",
    ":stop": "error: :stop needs a value: :stop=...",
    ":again 3": "error: :again takes no value",
    ":quit now": "error: :quit takes no value",
    ":help": "Ctrl-D ends the session",
    ":seed=random": "drawn at random; :seed=",
    ":stop=¡": "warning: the stop text '¡' cannot end a sample",
    '""': "error: the prompt is empty, but a sample needs something to continue, such as a newline",
    "¡": "error: the prompt has characters",
    "FILE:-": "error: this session reads standard input itself",
    "FILE:--seed.txt": "error: cannot read the prompt file '--seed.txt'",
}


def test_every_line_gets_its_message_and_the_session_continues(reply):
    typed = ":continue\n:again\n" + "".join(f"{typed}\nThe \n" for typed in ANSWERS)
    done = reply(typed.encode())
    assert done.returncode == 0 and done.stdout.count(RULE) == len(ANSWERS)
    position = 0
    for message in "error: there is no sample yet", "error: there is no sample yet", *ANSWERS.values():
        assert message in done.stderr[position:]
        position = done.stderr.index(message, position) + len(message)


def test_ctrl_c_stops_the_sample_but_not_the_session(session, tmp_path):
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
    os.mkfifo(tmp_path / "pipe")
    session.type(f"FILE:{tmp_path / 'pipe'}\n") # which nobody writes to
    session.wait_for("pipe\n")
    time.sleep(0.3)
    session.type("\x03")
    session.wait_for("\n> ")
    session.type(":max_new_tokens=3\nO\n")
    session.wait_for("> O\nO") # a new sample, with its prompt
    session.wait_for(RULE + "> ")


@pytest.mark.parametrize("typed", ["\x04", ":q\n"])
def test_ctrl_d_and_words_end_the_session_and_the_line(session, typed):
    session.type(typed)
    assert session.read_to_end() == typed.replace("\x04", "\n") and session.process.returncode == 0


def test_lines_can_be_edited_and_recalled_also_by_a_later_session(start, session):
    session.type("Thx\x7fe \n") # a backspace
    session.wait_for(RULE + "> ")
    session.type("\x1b[A") # up
    session.wait_for("The ")
    session.type("\n")
    session.wait_for(RULE + "> ")
    session.type("exit\n")
    session.read_to_end()
    later = start()
    later.type("\x1b[A\x1b[A") # beyond "exit"
    later.wait_for("The ")


def test_a_sample_can_be_continued(session, run):
    whole = run("--start=The ", "--num_samples=1", "--max_new_tokens=16", "--temperature=0", "--context_shift")
    session.type(":temperature=0\n:context_shift\n:max_new_tokens=8\nThe \n")
    session.wait_for(f"\n{whole[:12]}{RULE}> ")
    for command in ":continue\n", ":again\n":
        session.type(command)
        session.wait_for(f"{command}{whole[12:]}> ")


def test_a_character_that_a_sample_began_comes_whole_when_it_is_continued(run_script, tmp_path):
    save_repeating(tmp_path, [*"🙂".encode()], 256)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    done = run_script(f"--out_dir={tmp_path}", "--interactive", "--device=cpu", "--max_new_tokens=6", "--temperature=0",
                      stdin="🙂\n:continue\n:max_new_tokens=1\n:continue\n:continue\n".encode())
    assert done.stdout.split(RULE) == ["🙂🙂\ufffd", "🙂🙂", "\ufffd", "", ""]


def test_after_a_stop_text_a_sample_continues_what_was_shown(session, run):
    greedy = "--num_samples=1", "--temperature=0", "--repetition_penalty=10"
    whole = run(*greedy, "--start=The ")
    first, stop = whole[:8], whole[8]
    second = run(*greedy, f"--start={first}").removeprefix(first)
    assert second.startswith(stop)
    session.type(f":temperature=0\n:repetition_penalty=10\n:stop={stop}\nThe \n")
    session.wait_for(first + RULE)
    session.type(":stop=None\n:continue\n")
    session.wait_for(f":continue\n{second}")


def test_probabilities_can_be_switched_on_and_off(session):
    session.answer(":show_probs", "> ")
    session.answer("The ", "\x1b[38;5;16;48;", RULE)
    session.answer(":show_probs=False", "> ")
    session.answer("The ", RULE)
    assert "\x1b[38" not in session.text
    session.answer(":settings", "show_probs=False")


def test_reload_loads_a_newer_checkpoint_and_keeps_the_settings(start, run, char_checkpoint, tmp_path):
    folder = shutil.copytree(char_checkpoint, tmp_path / "out")
    session = start(f"--out_dir={folder}")
    greedy = (f"--out_dir={folder}", "--start=The ", "--num_samples=1", "--max_new_tokens=9", "--temperature=0")
    session.type(":temperature=0\n:max_new_tokens=9\nThe \n")
    session.wait_for(run(*greedy) + "> ")
    save_checkpoint(folder, make_gpt(seed=9), iter_num=200)
    newer = run(*greedy)
    session.answer(":reload", f"{folder}/ckpt.pt: iteration 200, validation loss 1.5000\n", "> ")
    session.answer(":again", newer + "> ")
    whole = (folder / "ckpt.pt").read_bytes()
    (folder / "ckpt.pt").write_bytes(b"not a checkpoint")
    os.utime(folder / "ckpt.pt", (1, 1)) # the loader waits for a file that has just changed
    session.answer(":reload", "error: cannot read ", "> ")
    session.answer(":again", "error: no model is loaded: repair or replace the checkpoint, then type :reload\n> ")
    (folder / "ckpt.pt").write_bytes(whole)
    session.answer(":reload", "> ")
    session.answer("The ", newer + "> ")
    save_checkpoint(folder, make_gpt(vocab_size=3))
    save_meta(folder / "meta.pkl", "abc")
    session.answer(":reload", "> ")
    session.answer(":again", "error: there is no sample yet: type a prompt\n> ") # its ids are of another vocabulary


def test_pasted_lines_are_one_prompt(start, monkeypatch):
    def start_on_xterm(*arguments, env, **options):
        return start_script(*arguments, env={**env, "TERM": "xterm"}, **options)
    monkeypatch.setattr(terminal, "start_script", start_on_xterm)
    session = start()
    session.type("\x1b[200~The\n:O\x1b[201~\n")
    session.wait_for("The\n:O") # what was pasted
    session.wait_for(RULE + "> ")
    session.answer(":again", "The\n:O")
    assert session.has_bracketed_paste
    monkeypatch.setattr("builtins.input", lambda prompt: "The\n") # a single line, pasted with its newline
    assert repl.read_line() == "The"


def test_the_setting_start_is_the_first_prompt(reply):
    texts = reply(b"O\n", "--start=:The ", "--temperature=0").stdout.split(RULE)
    assert len(texts) == 3 and texts[0].startswith(":The ") and texts[1].startswith("O")
    assert find_settings(SCRIPT)["start"].default == repl.DEFAULT_START # which is no prompt


def test_a_session_reads_lines_from_a_pipe(reply):
    done = reply(b'\xef\xbb\xbfThe \r\n\n:top_k=5\n"\\n"\n":O"\r\n:quit\r\nO\n')
    assert done.returncode == 0 and done.stdout.count(RULE) == 3 and "error" not in done.stderr
    assert done.stdout.startswith("The ") and f"{RULE}:O" in done.stdout and "> " not in done.stdout


def test_a_line_that_is_not_utf8_is_an_error_of_its_own(reply):
    done = reply(b"The \nb\xffd\nO\n", PYTHONIOENCODING="utf-8:strict") # as in most locales
    assert done.returncode == 0 and done.stdout.count(RULE) == 2 and "lacks: '\\udcff' at 2" in done.stderr


def test_a_session_needs_both_streams(char_checkpoint):
    process = start_script(f"--out_dir={char_checkpoint}", *SESSION, stdin=DEVNULL, stdout=CLOSED)
    _, messages = process.communicate()
    assert process.returncode == 1 and b"error: interactive=True needs standard input and standard output" in messages
