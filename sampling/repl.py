"""The interactive session: the model stays loaded, each line is a prompt, and its sample streams to the terminal."""
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

from configurator import parse, suggest
from sampling.generation.engine import Engine, LoadedModel
from sampling.inputs.prompts import PromptSource, log_notices, make_requests, parse_start, warn_about_stop_texts
from sampling.outputs.console import end_line, is_tty, log, set_progress_bar
from sampling.outputs.printer import Printer
from sampling.params import Prompt, Sample, SampleRequest, SamplingParams, choose_seed

# The settings that a command may change, and the names that configurator gives to the types of their values.
TYPES = {f.name: [t.__name__.removesuffix("Type") for t in get_args(f.type) or [f.type]]
         for f in fields(SamplingParams) if f.name != "num_logprobs"} | {"show_probs": ["bool"]}
DEFAULT_START = "\n" # as in sample.py
QUIT = ":quit", ":q", ":exit", "exit"
GREETING = "type a prompt, or :help; Ctrl-D ends the session"
HELP = f"""Type a prompt in the form of --start: text, "text\\n" with escapes, or FILE:prompt.txt.
Put a prompt that begins with a colon in quotes: ":like this". Several pasted lines are one prompt.
  :continue          continue the last sample
  :again             generate another sample for the last prompt
  :reload            load the model again, such as a newer ckpt.pt
  :temperature=0.5   change a setting: {', '.join(TYPES)}
  :settings          show these settings
  :help              show this help
  :quit              end the session; :q, exit and Ctrl-D do the same
Ctrl-C ends the sample, Ctrl-D ends the session."""


def run_repl(load: Callable[[], LoadedModel], params: SamplingParams, show_probs: bool, start: str) -> None:
    """Read prompts and commands from standard input until it ends. start: the first prompt, unless it is DEFAULT_START.

    load: loads the model, at the start and for :reload. params, show_probs: the initial settings.
    """
    if sys.stdin is None or sys.stdout is None:
        raise ValueError("interactive=True needs standard input and standard output, but one of them is closed")
    if isinstance(sys.stdin, io.TextIOWrapper): # not in a notebook
        sys.stdin.reconfigure(errors="surrogateescape") # so that only a line that is not UTF-8 is an error
    set_progress_bar(None) # a progress bar would mix with what the user types
    model = load()
    engine, printer = Engine(model, params, stream=True, log=log), Printer(model.tokenizer, show_probs)
    session = Session(load, params, engine, printer)
    del model, engine # :reload needs their memory
    handler = signal.signal(signal.SIGINT, signal.default_int_handler) # it ends what runs, but not the session
    if is_tty(sys.stdin):
        log(GREETING)
    try:
        with line_editing():
            if start != DEFAULT_START:
                session.attempt(session.print_samples, start)
            while (line := read_line()) not in (None, *QUIT):
                session.respond(line)
    finally:
        signal.signal(signal.SIGINT, handler) # a notebook goes on
    if session.engine and session.engine.model.speculation:
        log(session.engine.model.speculation.summary())


@dataclass
class Session:
    """The state of a session, which prompts and commands change."""
    load: Callable[[], LoadedModel]
    params: SamplingParams
    engine: Engine | None # None while the model is loaded again, and after that has failed
    printer: Printer
    next_index: int = 0 # the index of the next sample
    last: Sample | None = None
    shows_prompt: bool = True # whether the last sample was printed with its prompt

    def respond(self, line: str) -> None:
        """Run a command, or print a sample for a prompt."""
        if line.startswith(":") and "\n" not in line:
            self.attempt(self.run_command, line[1:].strip())
        elif line:
            self.attempt(self.print_samples, parse("start", line, ["str"]))

    def attempt(self, action: Callable[[str], None], text: str) -> None:
        """Call action(text). Log an error of the user, and end it at Ctrl-C."""
        try:
            action(text)
        except KeyboardInterrupt:
            end_line()
        except (ValueError, OSError) as error:
            log(f"error: {error}")
        self.printer.reset()

    def print_samples(self, start: str) -> None:
        """Print a sample for each prompt that start names."""
        if not start:
            raise ValueError('the prompt is empty, but a sample needs something to continue, such as a newline: "\\n"')
        kind, path = parse_start(start)
        if kind != "TEXT" and path == "-":
            raise ValueError("this session reads standard input itself; pass the name of a file, or the text")
        model = self.require_engine().model
        requests = make_requests(PromptSource(start), model.tokenizer, 1, self.next_index)
        for request in log_notices(requests, model.tokenizer, model.backend.config.block_size, log):
            if not self.print_sample(request):
                return

    def print_sample(self, request: SampleRequest, shows_prompt: bool = True) -> bool:
        """Generate a sample, and stream it to the terminal. Returns False if Ctrl-C has ended it."""
        engine = self.require_engine()
        self.next_index, self.shows_prompt = request.index + 1, shows_prompt
        # The same engine for every prompt: its CUDA graphs are kept, and the next sample follows in its random stream.
        with recorded_interrupts() as interrupts, engine.model.autocast():
            for sample in engine.generate([request]):
                self.last = sample
                self.printer.update(sample, shows_prompt)
                if interrupts:
                    print(flush=True)
                    return False
        return True

    def require_engine(self) -> Engine:
        if self.engine is None:
            raise ValueError("no model is loaded: repair or replace the checkpoint, then type :reload")
        return self.engine

    def run_command(self, command: str) -> None:
        """Run the command that was typed after the colon."""
        word, *rest = command.split() or [""]
        if word in COMMANDS:
            if rest:
                raise ValueError(f":{word} takes no value")
            COMMANDS[word](self)
        else:
            name, text = (*re.split(r"\s*=\s*|\s+", command, maxsplit=1), "")[:2]
            self.change_setting(name.replace("-", "_"), text)

    def show_settings(self) -> None:
        values = {**vars(self.params), "show_probs": self.printer.show_probs}
        log("\n".join(f"  {name}={values[name]!r}" for name in TYPES))

    def change_setting(self, name: str, text: str) -> None:
        if name not in TYPES:
            raise ValueError(f"unknown command ':{name:.100}'{suggest(name, [*COMMANDS, 'quit', *TYPES])}; :help lists "
                             "all commands; put a prompt that begins with a colon in quotes")
        if not text and TYPES[name] != ["bool"]:
            raise ValueError(f":{name} needs a value: :{name}=...")
        is_random = name == "seed" and text == "random"
        value = choose_seed(text, log, ":seed") if is_random else parse(name, text or "True", TYPES[name])
        change = {"num_logprobs": 0 if value else None} if name == "show_probs" else {name: value}
        params = replace(self.params, **change)
        self.engine = replace(self.require_engine(), params=params) # an exact model refuses some values
        self.params = params
        if name == "show_probs":
            self.printer.set_show_probs(value)
        if name == "seed":
            self.next_index = 0 # the next sample is the first one of this seed
        if name == "stop":
            warn_about_stop_texts(params.stop_texts, self.printer.tokenizer, log)

    def sample_again(self) -> None:
        self.print_sample(replace(self.require_sample().request, index=self.next_index), self.shows_prompt)

    def continue_last(self) -> None:
        sample = self.require_sample()
        text = sample.prompt.text + sample.text[:sample.num_emittable_chars]
        # After a stop text or Ctrl-C, token_ids has tokens that the user did not see.
        shows_all = sample.finish_reason == "length"
        ids = sample.request.prompt_ids + sample.token_ids if shows_all else self.printer.tokenizer.encode(text)
        self.print_sample(SampleRequest(self.next_index, Prompt(text), ids), shows_prompt=False)

    def require_sample(self) -> Sample:
        if self.last is None:
            raise ValueError("there is no sample yet: type a prompt")
        return self.last

    def reload(self) -> None:
        """Load the model again, with the settings of the session."""
        self.engine = None # its memory must be free before the next model is loaded
        model = self.load()
        before, self.printer.tokenizer = self.printer.tokenizer, model.tokenizer
        if (before.source, before.size) != (model.tokenizer.source, model.tokenizer.size):
            self.last = None # its ids are of another vocabulary
        self.engine = Engine(model, self.params, stream=True, log=log)


COMMANDS = {**dict.fromkeys(["help", "h", "?"], lambda session: log(HELP)), "settings": Session.show_settings,
            "again": Session.sample_again, "continue": Session.continue_last, "reload": Session.reload}


@contextmanager
def recorded_interrupts() -> Iterator[list]:
    """In this block, Ctrl-C only adds to a list: an exception could leave the model in an inconsistent state."""
    interrupts = []
    try:
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- reading lines

def read_line() -> str | None:
    """Read the next line; None after the last one. Ctrl-C discards the line and starts a new one."""
    while True:
        try:
            return input_line()
        except KeyboardInterrupt:
            end_line()
        except EOFError:
            if is_tty(sys.stdin):
                end_line()
            return None


def input_line() -> str:
    """Read a line, or several that were pasted. A user at a terminal sees "> " first."""
    line = input("> " if is_tty(sys.stdin) and is_tty(sys.stdout) else "")
    line = line.removeprefix("\ufeff").removesuffix("\r") # a file may come from Windows
    if line.count("\n") == 1: # a single line, pasted with its newline
        line = line.removesuffix("\n")
    if "\n" in line: # the history file, which the arrow keys recall, holds one entry per line
        import readline
        if length := readline.get_current_history_length():
            readline.replace_history_item(length - 1, repr(line))
    return line


@contextmanager
def line_editing() -> Iterator[None]:
    """Give input() on a terminal line editing, the history of earlier sessions, and multi-line paste."""
    try:
        import readline
    except ImportError: # on Windows the console itself edits lines
        readline = None
    if readline is None or not (is_tty(sys.stdin) and is_tty(sys.stdout)):
        yield
        return
    if os.environ.get("TERM") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on") # Python disables it
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser() # the XDG base directories
    path = Path(state) / "nanogpt-sample" / "history"
    with suppress(OSError): # there may be no history yet
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with suppress(OSError): # without a home folder, the history ends with the session
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
