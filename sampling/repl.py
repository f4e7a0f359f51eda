"""The interactive session: the model stays loaded, each line is a prompt, and its sample streams to the terminal."""
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import get_args

from configurator import parse, suggest
from sampling.generation.engine import Engine
from sampling.inputs.prompts import (
    PromptSource,
    log_cropped,
    log_trailing_space,
    parse_start,
    warn_about_stop_texts,
)
from sampling.line_input import input_line, keep_invalid_bytes, line_editing
from sampling.outputs.console import end_line, is_tty, log, set_progress_bar
from sampling.outputs.printer import Printer
from sampling.params import Prompt, Sample, SampleRequest, SamplingParams, choose_seed


def type_names(annotation: type) -> list[str]:
    """The names that configurator gives to the types of a setting."""
    return [t.__name__.removesuffix("Type") for t in get_args(annotation) or [annotation]]


# The settings that a command may change, and the types of their values.
REPL_TYPES = {f.name: type_names(f.type) for f in fields(SamplingParams) if f.name != "num_logprobs"}
REPL_TYPES["show_probs"] = ["bool"]
SETTING_FLAG = re.compile(rf"(?<!\S)--(?=({'|'.join(REPL_TYPES)})\b)") # in a session, settings begin with a colon
DEFAULT_START = "\n" # the default of the setting start
QUIT = ":quit", ":q", ":exit", "exit"
COMMANDS = "continue", "again", "settings", "help", "quit"
GREETING = "type a prompt, or :help; Ctrl-D ends the session"
HELP = f"""Type a prompt in the form of --start: text, "text\\n" with escapes, or FILE:prompt.txt.
Put a prompt that begins with a colon in quotes: ":like this". Several pasted lines are one prompt.
  :continue          continue the last sample
  :again             generate another sample for the last prompt
  :temperature=0.5   change a setting: {', '.join(REPL_TYPES)}
  :settings          show these settings
  :help              show this help
  :quit              end the session; :q, exit and Ctrl-D do the same
Ctrl-C ends the sample, Ctrl-D ends the session."""


def run_repl(engine: Engine, printer: Printer, start: str) -> None:
    """Read prompts and commands from standard input until it ends. start: the first prompt, unless it is DEFAULT_START.

    engine has the initial settings. Raises ValueError if standard input or output is closed.
    """
    if sys.stdin is None or sys.stdout is None:
        raise ValueError("interactive=True needs standard input and standard output, but one of them is closed")
    keep_invalid_bytes()
    set_progress_bar(None) # a progress bar would mix with what the user types
    session = Session(replace(engine, stream=True, on_tokens=lambda num_tokens: None), printer)
    handler = signal.getsignal(signal.SIGINT)
    session.record_interrupts()
    if is_tty(sys.stdin):
        log(GREETING)
    try:
        with line_editing():
            if start != DEFAULT_START:
                session.respond(repr(start)) # quoted, because respond parses it again
            while (line := session.read_line()) not in (None, *QUIT):
                session.respond(line)
    finally:
        signal.signal(signal.SIGINT, handler) # a notebook goes on


@dataclass
class Session:
    """The state of a session, which prompts and commands change."""
    engine: Engine
    printer: Printer
    next_index: int = 0 # the index of the next sample
    last: Sample | None = None
    shows_prompt: bool = True # whether the last sample was printed with its prompt
    is_interrupted: bool = False # Ctrl-C was pressed since the latest line was read

    def record_interrupts(self) -> None:
        """From now on, only record Ctrl-C. An exception during generation could make the model's state inconsistent."""
        self.is_interrupted = False
        signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, *_) -> None:
        """A signal handler: end the sample after its latest token."""
        self.is_interrupted = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In this block, Ctrl-C raises KeyboardInterrupt: it may wait for the user, or for another program."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            yield
        finally:
            self.record_interrupts()

    def read_line(self) -> str | None:
        """Read the next line; None after the last one. Ctrl-C discards the line and starts a new one."""
        while True:
            try:
                with self.interruptible():
                    return input_line()
            except KeyboardInterrupt:
                end_line()
            except EOFError:
                if is_tty(sys.stdin):
                    end_line()
                return None

    def respond(self, line: str) -> None:
        """Run a command, or print a sample for a prompt. Logs an error if the line is wrong."""
        try:
            if line.startswith(":") and "\n" not in line:
                self.run_command(line[1:].strip())
            elif line:
                self.print_samples(parse("start", line, ["str"]))
        except KeyboardInterrupt: # while a prompt file was read
            end_line()
        except ValueError as error:
            log_for_session(f"error: {error}")
        self.printer.reset()

    def print_samples(self, start: str) -> None:
        """Print a sample for each prompt that start names. Raises ValueError if there is none."""
        if not start:
            raise ValueError('the prompt is empty, but a sample needs something to continue, such as a newline: "\\n"')
        kind, path = parse_start(start)
        if kind != "TEXT" and path == "-":
            raise ValueError("this session reads standard input itself; pass the name of a file, or the text")
        with self.interruptible(): # a file may be a pipe that nobody writes to
            source = PromptSource(start)
        model = self.engine.model
        requests = source.requests(model.tokenizer, 1, self.next_index)
        requests = log_trailing_space(requests, model.tokenizer, log)
        for request in log_cropped(requests, model.tokenizer, model.backend.config.block_size, log):
            self.print_sample(request)
            if self.is_interrupted:
                return

    def print_sample(self, request: SampleRequest, shows_prompt: bool = True) -> None:
        """Generate a sample, and stream it to the terminal. Ctrl-C ends it."""
        self.next_index, self.shows_prompt = request.index + 1, shows_prompt
        # The same engine for every prompt: its CUDA graphs are kept, and the next sample follows in its random stream.
        for sample in self.engine.generate([request]):
            self.last = sample
            self.printer.update(sample, shows_prompt)
            if self.is_interrupted:
                print(flush=True)
                return

    def run_command(self, command: str) -> None:
        """Run the command that was typed after the colon. Raises ValueError if it is unknown or its value is wrong."""
        commands = {"help": show_help, "h": show_help, "?": show_help, "settings": self.show_settings,
                    "again": self.sample_again, "continue": self.continue_last}
        word, *rest = command.split() or [""]
        if word in commands:
            if rest:
                raise ValueError(f":{word} takes no value")
            commands[word]()
        else:
            name, text = (*re.split(r"\s*=\s*|\s+", command, maxsplit=1), "")[:2]
            self.change_setting(name.replace("-", "_"), text)

    def show_settings(self) -> None:
        """List the settings that a command may change."""
        values = {**vars(self.engine.params), "show_probs": self.printer.show_probs}
        log("\n".join(f"  {name}={values[name]!r}" for name in REPL_TYPES))

    def change_setting(self, name: str, text: str) -> None:
        """Change one setting. Raises ValueError if there is no such setting, or the value is not allowed."""
        if name not in REPL_TYPES:
            raise ValueError(f"unknown command ':{name:.100}'{suggest(name, [*COMMANDS, *REPL_TYPES])}; :help lists "
                             "all commands; put a prompt that begins with a colon in quotes")
        if not text and REPL_TYPES[name] != ["bool"]:
            raise ValueError(f"--{name} needs a value: --{name}=...")
        is_random = name == "seed" and text == "random"
        value = choose_seed(text, log_for_session) if is_random else parse(name, text or "True", REPL_TYPES[name])
        changes = {name: value}
        if name == "show_probs":
            self.printer.set_show_probs(value)
            changes = {"num_logprobs": 0 if value else None}
        self.engine = replace(self.engine, params=replace(self.engine.params, **changes))
        if name == "seed":
            self.next_index = 0 # the next sample is the first one of this seed
        if name == "stop":
            warn_about_stop_texts(self.engine.params.stop_texts, self.engine.model.tokenizer, log)

    def sample_again(self) -> None:
        """Print another sample for the last prompt. Raises ValueError if there is none."""
        self.print_sample(replace(self.last_sample().request, index=self.next_index), self.shows_prompt)

    def continue_last(self) -> None:
        """Continue the last sample. Raises ValueError if there is none, or if its text cannot be encoded."""
        sample = self.last_sample()
        text = sample.prompt.text + sample.text[:sample.num_emittable_chars]
        # After a stop text or Ctrl-C, token_ids has tokens that the user did not see.
        shows_all = sample.finish_reason == "length"
        ids = sample.request.prompt_ids + sample.token_ids if shows_all else self.engine.model.tokenizer.encode(text)
        self.print_sample(SampleRequest(self.next_index, Prompt(text), ids), shows_prompt=False)

    def last_sample(self) -> Sample:
        """The last sample. Raises ValueError if there is none."""
        if self.last is None:
            raise ValueError("there is no sample yet: type a prompt")
        return self.last


def log_for_session(text: str) -> None:
    """Log a message that names settings as --seed=1: in a session, it is :seed=1."""
    log(SETTING_FLAG.sub(":", text))


def show_help() -> None:
    """Show the help."""
    log(HELP)
