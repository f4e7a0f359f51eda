"""The interactive session: the model stays loaded, each line is a prompt, and its sample streams to the terminal."""
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from typing import get_args

from configurator import parse, suggest
from sampling.generation.engine import Engine
from sampling.inputs.prompts import PromptSource, parse_start
from sampling.outputs.console import is_tty, log
from sampling.outputs.printer import Printer
from sampling.params import SamplingParams

# The settings that a command may change, and the types of their values.
REPL_TYPES = {field.name: [type_.__name__.removesuffix("Type") for type_ in get_args(field.type) or [field.type]]
              for field in fields(SamplingParams) if field.name != "num_logprobs"}
HELP = f"""Type a prompt in the form of --start: text, "text\\n" with escapes, or FILE:prompt.txt.
  :temperature=0.5   change a setting: {', '.join(REPL_TYPES)}
  :settings          show these settings
  :help              show this help
Ctrl-C ends the sample, Ctrl-D ends the session."""


def run_repl(engine: Engine, printer: Printer) -> None:
    """Read prompts and commands from standard input until it ends. engine has the initial settings."""
    with suppress(ImportError): # on Windows the console itself edits lines
        import readline  # noqa: F401, gives input() line editing and history
    if is_tty_session():
        log("type a prompt, or :help")
    engine = replace(engine, stream=True)
    interrupts, indices = [], count()
    while True:
        try:
            line = read_line(interrupts)
        except KeyboardInterrupt: # the user discards this line
            log("")
            continue
        except EOFError:
            return
        try:
            if line.startswith(":"):
                name, params = run_command(line[1:].strip(), engine.params)
                engine = replace(engine, params=params)
                if name == "seed":
                    indices = count() # the next sample is the first one of this seed
            elif line:
                answer(line, engine, printer, indices, interrupts)
        except ValueError as error:
            log(f"error: {error}".replace("--", ":")) # settings begin with : here
        printer.reset()


def answer(line: str, engine: Engine, printer: Printer, indices: Iterator[int], interrupts: list) -> None:
    """Print a sample for each prompt of the line, which has the form of the setting start. indices numbers the samples.

    Raises ValueError if the line names no prompt that can be read.
    """
    start = parse("start", line, ["str"])
    kind, path = parse_start(start)
    if kind != "TEXT" and path == "-":
        raise ValueError("this session reads standard input itself: give the name of a file, or the text")
    for request in PromptSource(start).requests(engine.tokenizer, 1):
        request = replace(request, index=next(indices))
        for sample in replace(engine).generate([request]): # a new engine starts at the seed again
            printer.update(sample)
            if interrupts:
                print(flush=True)
                return


def run_command(command: str, params: SamplingParams) -> tuple[str, SamplingParams]:
    """Run the command that was typed after the colon. Returns the command's name and the new parameters.

    Raises ValueError if there is no such command, or if its value is not allowed.
    """
    name, _, text = command.replace("=", " ", 1).partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if command in ("help", "h", "?"):
        log(HELP)
        return name, params
    if command == "settings":
        log("\n".join(f"  {name}={getattr(params, name)!r}" for name in REPL_TYPES))
        return name, params
    if name not in REPL_TYPES:
        raise ValueError(f"a session has no setting {name:.100}{suggest(name, REPL_TYPES)}; "
                         f"it has {', '.join(REPL_TYPES)}")
    if not text and REPL_TYPES[name] != ["bool"]:
        raise ValueError(f"--{name} needs a value: --{name}=...")
    return name, replace(params, **{name: parse(name, text or "True", REPL_TYPES[name])})


def is_tty_session() -> bool:
    """Whether a user types at a terminal and sees the samples there."""
    return is_tty(sys.stdin) and is_tty(sys.stdout)


def read_line(interrupts: list) -> str:
    """Read a line. Ctrl-C raises KeyboardInterrupt only here.

    Elsewhere, Ctrl-C appends to interrupts: an exception in the middle of generation could leave the model's state
    inconsistent.
    """
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input("> " if is_tty_session() else "")
    finally:
        interrupts.clear()
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
