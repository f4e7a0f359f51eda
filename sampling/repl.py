"""The interactive session: the model stays loaded, each line is a prompt, and its sample streams to
the terminal.
"""
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import sampling
from sampling.configurator import find_settings, parse, suggest
from sampling.inputs.prompts import make_samples, parse_start, read_prompts
from sampling.inputs.tokenizer import REPLACEMENT
from sampling.outputs.console import end_line, is_tty, name_write_errors
from sampling.outputs.printer import RULE, Printer
from sampling.params import (
    Prompt,
    Sample,
    SamplingParams,
    ScoringParams,
    choose_seed,
    warn_about_stops,
)
from sampling.process import is_out_of_memory
from sampling.text_generator import TextGenerator

logger = logging.getLogger(__name__)
# The settings that a command may change, and the names that configurator gives to the types of
# their values.
TYPES = {f.name: [t.__name__ for t in get_args(f.type) or [f.type]]
         for f in fields(SamplingParams) if f.name != "num_logprobs"} | {"show_probs": ["bool"]}
HELP = """Type a prompt in the form of --start: text, "text\\n" with escapes, or FILE:prompt.txt.
Put a prompt that begins with a colon in quotes: ":like this". Several pasted lines are one prompt.
  :continue          continue the last sample
  :again             generate another sample for the last prompt; after :continue, another continuation
  :score TEXT        say how likely the model finds a text, or FILE:text.txt; without one, the last prompt and sample
  :save FILE         append the last prompt and sample to a file
  :reload            load the model again, such as a newer ckpt.pt
  :temperature       show a setting
  :temperature=0.5   change it; a bare :show_probs or :context_shift means =True, as on the command line
  :settings          show these settings; others are fixed in a session
  :help              show this help
  :quit              end the session; :q, exit and Ctrl-D do the same
Tab completes a command, Ctrl-C ends the sample, Ctrl-D ends the session."""


def run_repl(load: Callable[[], TextGenerator], params: SamplingParams, show_probs: bool,
             start: str) -> None:
    """Read prompts and commands from standard input until it ends. load: loads the model, at the
    start and for :reload. params, show_probs: the initial settings. start: the first prompt, unless
    it is blank.
    """
    if sys.stdin is None or sys.stdout is None:
        raise ValueError("interactive=True needs standard input and standard output, but one of them is closed")
    if isinstance(sys.stdin, io.TextIOWrapper): # not in a notebook
        # So that only a line that is not UTF-8 is an error.
        sys.stdin.reconfigure(errors="surrogateescape")
    history = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "nanogpt-sample" / "history"
    # It gives input() line editing; on Windows, the console itself edits lines.
    with suppress(ImportError, OSError):
        import readline
        if os.environ.get("TERM") != "dumb":
            # Several pasted lines are one prompt.
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_completer(complete)
        readline.set_completer_delims("") # what Tab completes is all of the line
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
        readline.read_history_file(history)
    session = Session(load, params, show_probs)
    session.reload()
    # It ends what runs, but not the session.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_tty(sys.stdin):
        logger.info("type a prompt, or :help; Ctrl-D ends the session")
    with suppress(EOFError): # the end of the session
        if start.strip(): # by default, it is a newline
            session.attempt(lambda: session.print_samples(start))
        while True:
            session.attempt(lambda: session.respond(read_line()))
    with suppress(ImportError, OSError): # without a home folder, the history ends with the session
        import readline
        if readline.get_current_history_length(): # only lines that were typed
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(history)


@dataclass
class Session:
    """The state of a session, which prompts and commands change."""
    load: Callable[[], TextGenerator]
    params: SamplingParams
    show_probs: bool
    gpt: TextGenerator | None = None # None while the model is loaded, and after that has failed
    printer: Printer | None = None # None before the first model is loaded
    next_index: int = 0 # the index of the next sample
    last: Sample | None = None
    last_text: str = "" # what was printed of it, without the prompt
    shows_prompt: bool = True # whether it was printed with its prompt

    def attempt(self, action: Callable[[], None]) -> None:
        """Call action. Log an error of the user, or a lack of memory, and end it at Ctrl-C."""
        try:
            action()
        except KeyboardInterrupt:
            end_line()
        except BrokenPipeError: # nobody reads the samples any more
            raise
        except (ValueError, OSError) as error:
            logger.error(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            logger.error(f"out of memory ({error!s:.200}): use a shorter prompt, or fewer max_new_tokens")

    def respond(self, line: str) -> None:
        if line in ("exit", "help", "?") or (line.startswith(":") and "\n" not in line):
            self.run_command(line.removeprefix(":").strip())
        elif line:
            self.print_samples(parse("start", line, ["str"]))

    def check_model(self) -> None:
        if self.gpt is None:
            raise ValueError("no model is loaded: repair or replace the checkpoint, then type :reload")

    def read(self, start: str) -> Iterable[Prompt]:
        if not start:
            raise ValueError('the prompt is empty, but a sample needs something to continue, such as a newline: "\\n"')
        kind, path = parse_start(start)
        if kind != "TEXT" and path == "-":
            raise ValueError("this session reads standard input itself; pass the name of a file, or the text")
        return read_prompts(start)

    def print_samples(self, start: str) -> None:
        prompts = self.read(start)
        for sample in make_samples(prompts, self.printer.tokenizer, first_index=self.next_index):
            if not self.print_sample(sample):
                break

    def print_scores(self, start: str) -> None:
        """Print how likely the model finds the texts that start names; if it is empty, the last
        prompt and sample.
        """
        self.check_model()
        if not start and self.last is None:
            raise ValueError("there is no sample yet: type a prompt, or :score and a text")
        if start:
            prompts = self.read(parse("start", start, ["str"]))
        else:
            prompts = [Prompt(self.last.prompt.text + self.last_text)]
        scores = make_samples(prompts, self.printer.tokenizer, is_score=True)
        params = ScoringParams(max_tokens=10**9 if self.show_probs else 0)
        self.printer.reset_total() # Ctrl-C may have ended the one before
        for score, pieces in self.gpt.run(scores, params):
            self.printer.update(score, pieces)
        self.printer.print_total()

    def print_sample(self, sample: Sample, shows_prompt: bool = True) -> bool:
        """Generate a sample, and stream it to the terminal. Ctrl-C ends it after a step; then
        return False.
        """
        self.check_model()
        interrupts = []
        self.last = sample
        self.last_text = ""
        self.next_index = sample.index + 1
        self.shows_prompt = shows_prompt
        # Within a step, an exception could leave the model in an inconsistent state.
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        try:
            with closing(self.gpt.run([sample], self.params, batch_size=1, stream=True)) as steps:
                for _, pieces in steps:
                    if interrupts and sample.finish_reason is None:
                        self.printer.write(f"\n{RULE}\n")
                        break
                    self.printer.update(sample, pieces, shows_prompt)
                    self.last_text += "".join(piece.text for piece in pieces)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return not interrupts

    def run_command(self, command: str) -> None:
        name, text = (*re.split(r"\s*=\s*|\s+", command, maxsplit=1), "")[:2]
        if name not in COMMANDS:
            self.change_setting(name.replace("-", "_"), text)
        elif name == "score" and re.match(r"score\s*=", command):
            raise ValueError(":score is no setting: type :score and a text, or :score alone for the last sample")
        elif name in ("score", "save"):
            (self.print_scores if name == "score" else self.save)(text)
        elif text:
            raise ValueError(f":{name} takes no value")
        elif name in ("again", "continue") and self.last is None:
            raise ValueError("there is no sample yet: type a prompt")
        else:
            COMMANDS[name](self)

    def show_help(self) -> None:
        logger.info(HELP)

    def show_settings(self, names: Iterable[str] = TYPES) -> None:
        values = {**vars(self.params), "show_probs": self.show_probs}
        logger.info("\n".join(f"{name}={values[name]!r}" for name in names))

    def change_setting(self, name: str, text: str) -> None:
        if name not in TYPES:
            if name in find_settings(f"{sampling.__path__[-1]}/sample.py"):
                raise ValueError(f":{name} is fixed in a session: start another one with --{name}=...")
            raise ValueError(f"unknown command ':{name:.100}'{suggest(name, [*COMMANDS, *TYPES])}; :help lists "
                             "all commands; put a prompt that begins with a colon in quotes")
        if not text and TYPES[name] != ["bool"]:
            return self.show_settings([name])
        if name == "stop": # a newline is meant, and a shell would take the outer quotes away
            text = '"\\n"' if text in ("\\n", "'\"\\n\"'") else text
        is_random = name == "seed" and text == "random"
        value = choose_seed(text, ":seed") if is_random else parse(name, text or "True", TYPES[name])
        change = {"num_logprobs": 0 if value else None} if name == "show_probs" else {name: value}
        params = replace(self.params, **change)
        if self.gpt:
            self.gpt.check_params(params)
        self.params = params
        if name == "show_probs":
            self.show_probs = value
            self.printer = Printer(self.printer.tokenizer, value)
        if name == "seed":
            self.next_index = 0 # the next sample is the first one of this seed
        if name == "stop":
            warn_about_stops(params.stop_texts, ':stop="\\n"')
        self.show_settings([name])

    def sample_again(self) -> None:
        self.print_sample(Sample(self.next_index, self.last.prompt, self.last.prompt_ids), self.shows_prompt)

    def continue_last(self) -> None:
        sample = self.last
        text = self.last.prompt.text + self.last_text
        # A character that was incomplete comes whole with the next tokens.
        if sample.finish_reason == "length":
            text = text.rstrip(REPLACEMENT)
            ids = sample.prompt_ids + sample.token_ids
        else: # after a stop text or Ctrl-C, token_ids has tokens that the user did not see
            ids = self.printer.tokenizer.encode(text)
        self.print_sample(Sample(self.next_index, Prompt(text), ids), shows_prompt=False)

    def save(self, path: str) -> None:
        if self.last is None or not path:
            raise ValueError("type :save and the name of a file, after a sample")
        with name_write_errors(path), open(path, "a", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(f"{self.last.prompt.text}{self.last_text}\n{RULE}\n")

    def reload(self) -> None:
        self.gpt = None # its memory must be free before the next model is loaded
        self.gpt = self.load()
        new = self.gpt.tokenizer
        old = self.printer and self.printer.tokenizer
        if old and (old.source, old.size) != (new.source, new.size):
            self.last = None # its ids are of another vocabulary
        self.printer = Printer(new, self.show_probs)

    def quit(self) -> None:
        raise EOFError


COMMANDS = {**dict.fromkeys(["help", "h", "?"], Session.show_help), "settings": Session.show_settings,
            "again": Session.sample_again, "continue": Session.continue_last, "score": Session.print_scores,
            "save": Session.save, "reload": Session.reload, **dict.fromkeys(["quit", "q", "exit"], Session.quit)}


def complete(line: str, index: int) -> str | None:
    """For readline: the command with this index among those that begin with line. In a prompt, Tab
    is a character.
    """
    commands = [f":{name}" for name in [*COMMANDS, *TYPES] if len(name) > 1 and f":{name}".startswith(line)]
    return [*(commands or [f"{line}\t"]), None][index]


def read_line() -> str:
    """Read a line, or several that were pasted. A user at a terminal sees "> " first. Raises
    EOFError at Ctrl-D.
    """
    try:
        line = input("> " if is_tty(sys.stdin) and is_tty(sys.stdout) else "")
    except (EOFError, OSError): # the latter from a closed terminal
        if is_tty(sys.stdin):
            end_line()
        raise EOFError from None
    line = line.removeprefix("\ufeff").removesuffix("\r") # a file may come from Windows
    # A single line, pasted with its newline.
    return line.removesuffix("\n") if line.count("\n") == 1 else line
