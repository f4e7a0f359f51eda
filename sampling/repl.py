"""The interactive session: the model stays loaded, each line is a prompt, and its sample streams to
the terminal.
"""
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sampling
from sampling.backends.backend_choice import warm_up
from sampling.configurator import find_settings, parse
from sampling.inputs.prompts import make_samples, parse_start, read_prompts
from sampling.inputs.tokenizer import REPLACEMENT
from sampling.outputs.console import end_line, is_tty, name_write_errors
from sampling.outputs.printer import RULE, Printer
from sampling.process import is_out_of_memory
from sampling.samples import Prompt, Sample
from sampling.settings import CONFLICTS, SamplingParams, ScoringParams
from sampling.text_generator import TextGenerator
from sampling.values import suggest

logger = logging.getLogger(__name__)
# sample.py lies beside model.py: see sampling/__init__.py.
SETTINGS = find_settings(f"{sampling.__path__[-1]}/sample.py")
# The settings that a command may change, and their types.
TYPES = {name: setting.types for name, setting in SETTINGS.items()
         if name == "show_probs" or hasattr(SamplingParams, name)}
HELP = """Type a prompt in the form of --start: text, "text\\n" with escapes, or FILE:prompt.txt.
Put a prompt that begins with a colon in quotes: ":like this". Several pasted lines are one prompt.
  :continue          continue the last sample
  :again             sample the last prompt again; after :continue, continue it again
  :score TEXT        say how likely the model finds a text, or FILE:text.txt; alone: the last prompt
                     and sample
  :save FILE         append the last prompt and sample to a file
  :reload            load the model again, such as a newer ckpt.pt
  :temperature       show a setting
  :temperature=0.5   change it; a bare :show_probs or :context_shift means =True
  :stop=None         turn it off; so also :top_k, :top_p and :min_p
  :settings          show these settings; others are fixed in a session
  :help              show this help
  :quit              end the session; :q, exit and Ctrl-D do the same
Tab completes a command, Ctrl-C ends the sample, Ctrl-D ends the session."""


def run_repl(load: Callable[[], TextGenerator], params: SamplingParams, start: str) -> None:
    """Read prompts and commands from standard input until it ends.

    load: loads the model, at the start and for :reload. params: the initial settings. start: the
    first prompt, unless it is blank.
    """
    if sys.stdin is None or sys.stdout is None:
        raise ValueError("interactive=True needs standard input and standard output, but one of "
                         "them is closed")
    if isinstance(sys.stdin, io.TextIOWrapper): # not in a notebook
        # A line that is not UTF-8 is then an error of this line only.
        sys.stdin.reconfigure(errors="surrogateescape")
    with line_editing():
        session = Session(load, params)
        session.reload()
        # Ctrl-C ends what runs, but not the session.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_tty(sys.stdin):
            logger.info("type a prompt, or :help; Ctrl-D ends the session")
        with suppress(EOFError): # the end of the session
            if start.strip(): # by default, it is a newline
                session.attempt(lambda: session.print_samples(start))
            while True:
                session.attempt(lambda: session.respond(read_line()))


@contextmanager
def line_editing() -> Iterator[None]:
    """Inside this block, input() lets the user edit lines, complete commands with Tab, and recall
    lines, also those of earlier sessions. On Windows, the console itself edits lines.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    history = state / "nanogpt-sample" / "history"
    with suppress(ImportError, OSError):
        import readline
        if os.environ.get("TERM") != "dumb":
            # Several pasted lines are one prompt.
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_completer(complete)
        readline.set_completer_delims("") # what Tab completes is all of the line
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        readline.read_history_file(history)
    yield
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
    gpt: TextGenerator | None = None # None while a model is loading, and if that has failed
    printer: Printer | None = None # None before the first model is loaded
    next_index: int = 0 # the index of the next sample
    last: Sample | None = None
    last_text: str = "" # what was printed of it, without the prompt
    shows_prompt: bool = True # whether it was printed with its prompt

    def attempt(self, action: Callable[[], None]) -> None:
        """Call action. Ctrl-C ends it. An error of the user, or a lack of memory, is logged."""
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
            logger.error(f"out of memory ({error!s:.200}): use a shorter prompt, or fewer "
                         "max_new_tokens")

    def respond(self, line: str) -> None:
        if line in ("exit", "help", "?") or (line.startswith(":") and "\n" not in line):
            self.run_command(line.removeprefix(":").strip())
        elif line:
            self.print_samples(parse("start", line, ["str"]))

    @property
    def show_probs(self) -> bool:
        return self.params.num_logprobs is not None

    def require_model(self) -> TextGenerator:
        if self.gpt is None:
            raise ValueError("no model is loaded: repair or replace the checkpoint, then type "
                             ":reload")
        return self.gpt

    def require_sample(self) -> Sample:
        if self.last is None:
            raise ValueError("there is no sample yet: type a prompt")
        return self.last

    def read(self, start: str) -> Iterable[Prompt]:
        if not start:
            raise ValueError("the prompt is empty, but a sample needs something to continue, such "
                             r'as a newline: "\n"')
        kind, path = parse_start(start)
        if kind != "TEXT" and path == "-":
            raise ValueError("this session reads standard input itself; pass the name of a file, "
                             "or the text")
        return read_prompts(start)

    def print_samples(self, start: str) -> None:
        tokenizer = self.require_model().tokenizer
        for sample in make_samples(self.read(start), tokenizer, first_index=self.next_index):
            if not self.print_sample(sample):
                break

    def print_scores(self, start: str) -> None:
        """Print how likely the model finds the texts that start names; if it is empty, the last
        prompt and sample.
        """
        gpt = self.require_model()
        if start:
            prompts = self.read(parse("start", start, ["str"]))
        else:
            prompts = [Prompt(self.require_sample().prompt.text + self.last_text)]
        scores = make_samples(prompts, gpt.tokenizer, is_score=True)
        params = ScoringParams(max_tokens=10**9 if self.show_probs else 0)
        self.printer.sums.clear() # an earlier command has left them
        for score, pieces in gpt.run(scores, params):
            self.printer.update(score, pieces)
        self.printer.print_total()

    def print_sample(self, sample: Sample, shows_prompt: bool = True) -> bool:
        """Generate a sample, and stream it to the terminal.

        Ctrl-C ends it after a step; then return False.
        """
        gpt = self.require_model()
        interrupts = []
        self.last = sample
        self.last_text = ""
        self.next_index = sample.index + 1
        self.shows_prompt = shows_prompt
        # Within a step, an exception could leave the model in an inconsistent state.
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        try:
            with closing(gpt.run([sample], self.params, stream=True)) as steps:
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
        name, separator, text = re.fullmatch(r"(?s)([^\s=]*)(\s*=\s*|\s*)(.*)", command).groups()
        if name not in COMMANDS:
            self.change_or_show(name.replace("-", "_"), separator, text)
        elif "=" in separator:
            raise ValueError(f":{name} is no setting; :help shows how to use it")
        elif name in ("score", "save"):
            COMMANDS[name](self, text)
        elif text:
            raise ValueError(f":{name} takes no value")
        else:
            COMMANDS[name](self)

    def show_settings(self, names: Iterable[str] = TYPES) -> None:
        values = {**vars(self.params), "show_probs": self.show_probs}
        logger.info("\n".join(f"{name}={values[name]!r}" for name in names))

    def change_or_show(self, name: str, separator: str, text: str) -> None:
        """Change a setting if the user gave a value, or if it is a flag. Then show it."""
        require_setting(name)
        if "=" in separator and not text:
            raise ValueError(f":{name}= needs a value; :settings shows those of all settings")
        # A newline is meant: a shell would take the outer quotes away.
        if name == "stop" and text in ("\\n", "'\"\\n\"'"):
            text = '"\\n"'
        if text or TYPES[name] == ["bool"]:
            self.change_params(name, parse(name, text or "True", TYPES[name]))
        self.show_settings([name])

    def change_params(self, name: str, value: Any) -> None:
        change = {name: value}
        if name == "show_probs":
            change = {"num_logprobs": 0 if value else None}
        params = replace(self.params, **change)
        if self.gpt:
            self.gpt.check_params(params)
        self.params = params
        if name == "show_probs":
            self.printer = Printer(self.printer.tokenizer, self.show_probs)
        if name == "seed":
            self.next_index = 0 # the next sample is the first one of this seed

    def sample_again(self) -> None:
        last = self.require_sample()
        sample = Sample(self.next_index, last.prompt, last.prompt_ids)
        self.print_sample(sample, self.shows_prompt)

    def continue_last(self) -> None:
        last = self.require_sample()
        text = last.prompt.text + self.last_text
        if last.finish_reason == "length":
            # A character that was incomplete comes whole with the next tokens.
            text = text.rstrip(REPLACEMENT)
            ids = last.prompt_ids + last.token_ids
        else: # after a stop text or Ctrl-C, token_ids has tokens that the user did not see
            ids = self.printer.tokenizer.encode(text)
        self.print_sample(Sample(self.next_index, Prompt(text), ids), shows_prompt=False)

    def save(self, path: str) -> None:
        if self.last is None or not path:
            raise ValueError("type :save and the name of a file, after a sample")
        end = f"\n{RULE}\n"
        text = f"{self.last.prompt.text}{self.last_text}{end}"
        with name_write_errors(path), open(path, "ab+") as file:
            file.seek(max(0, file.tell() - len(end)))
            if file.read(len(end)) not in (b"", end.encode()): # perhaps a checkpoint
                raise ValueError(f"{path} does not end as :save ends a file, so nothing is added: "
                                 "give the name of a new file")
            file.write(text.encode("utf-8", errors="replace"))
        logger.info(f"added to {path}")

    def reload(self) -> None:
        self.gpt = None # the memory must be free before the next model is loaded
        self.gpt = self.load()
        warm_up(self.gpt.backend)
        new = self.gpt.tokenizer
        old = self.printer and self.printer.tokenizer
        if old and old.fingerprint() != new.fingerprint():
            self.last = None # the ids are those of another vocabulary
        self.printer = Printer(new, self.show_probs)

    def quit(self) -> None:
        raise EOFError


COMMANDS = {
    **dict.fromkeys(["help", "h", "?"], lambda session: logger.info(HELP)),
    "settings": Session.show_settings,
    "again": Session.sample_again,
    "continue": Session.continue_last,
    "score": Session.print_scores,
    "save": Session.save,
    "reload": Session.reload,
    **dict.fromkeys(["quit", "q", "exit"], Session.quit),
}


def require_setting(name: str) -> None:
    """Raises ValueError unless a command may change this setting."""
    if name in TYPES:
        return
    if name in SETTINGS:
        for names, _, remedy in CONFLICTS:
            if {"interactive", name} <= {*names}:
                raise ValueError(remedy)
        raise ValueError(f":{name} is fixed in a session: start another one with --{name}=...")
    near = suggest(name, [*COMMANDS, *TYPES])
    raise ValueError(f"unknown command ':{name:.100}'{near}; :help lists all commands; put a "
                     "prompt that begins with a colon in quotes")


def complete(line: str, index: int) -> str | None:
    """For readline: the command with this index that begins with line. In a prompt, a tab."""
    names = [f":{name}" for name in [*COMMANDS, *TYPES]]
    matches = [name for name in names if name.startswith(line)] or [f"{line}\t"]
    return matches[index] if index < len(matches) else None


def read_line() -> str:
    """Read a line, or several that were pasted. Raises EOFError at Ctrl-D."""
    try:
        line = input("> " if is_tty(sys.stdin) and is_tty(sys.stdout) else "")
    except (EOFError, OSError): # the latter from a closed terminal
        if is_tty(sys.stdin):
            end_line()
        raise EOFError from None
    line = line.removeprefix("\ufeff").removesuffix("\r") # a file may come from Windows
    if line.count("\n") == 1: # a single line, pasted with its newline
        line = line.removesuffix("\n")
    return line
