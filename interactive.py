"""A session: the network stays loaded, every line typed is a prompt, and its sample is shown as it is drawn."""
import signal
import sys
from contextlib import suppress

import rules
from batches import Sample
from configurator import override, parse
from console import on_terminal, say
from prompts import Prompts

HELP = f"""Type a prompt, as --start takes it: text, "text\\n" with escapes, FILE:prompt.txt.
  :temperature=0.5   change a setting: {', '.join(rules.FREE)}
  :settings          show them
  :help              this
Ctrl-C ends the sample, Ctrl-D leaves."""


def converse(scope, make_drawer, tokenizer, printer):
    """Read prompts and commands from standard input until it ends; scope holds the settings, which may change."""
    with suppress(ImportError): # Windows' console edits lines by itself
        import readline  # noqa: F401, gives input() its history and its editing
    drawn, interrupts = 0, []
    if by_hand():
        say("type a prompt, or :help")
    while True:
        try:
            line = ask(interrupts)
        except KeyboardInterrupt: # takes back what was typed
            say("")
            continue
        except EOFError:
            return
        try:
            if line.startswith(":"):
                if obey(line[1:].strip(), scope) == "seed":
                    drawn = 0 # its first sample is next
            elif line.startswith(("FILE:-", "LINES:-", "JSONL:-")):
                raise ValueError("standard input is where you type: give a file's name, or the text itself")
            elif line:
                for prompt in Prompts(parse("start", line, ["str"])):
                    asked_for, drawn = Sample(drawn, prompt, prompt.encode(tokenizer)), drawn + 1
                    for sample in make_drawer(live=True).draw([asked_for]):
                        printer.show(sample)
                        if interrupts:
                            break
                    if interrupts:
                        print(flush=True)
                        break
        except ValueError as error:
            say(f"error: {error}".replace("--", ":")) # which settings begin with here
        printer.begin()


def by_hand():
    """Whether somebody types, and sees what comes."""
    return on_terminal(sys.stdin) and on_terminal(sys.stdout)


def ask(interrupts):
    """The next line. Ctrl-C raises KeyboardInterrupt here alone; afterwards it is noted: it may come at any place."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input("> " if by_hand() else "")
    finally:
        interrupts.clear()
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))


def obey(command, scope):
    """Carry out what was typed after a colon; returns the setting that it names. ValueError where that cannot be."""
    name, _, value = command.replace("=", " ", 1).partition(" ")
    name = name.replace("-", "_")
    if command in ("help", "h", "?"):
        say(HELP)
    elif command == "settings":
        say("\n".join(f"  {name}={scope[name]!r}" for name in rules.FREE))
    elif name in scope and name not in rules.FREE:
        raise ValueError(f"{name} cannot be changed here; what can: {', '.join(rules.FREE)}")
    else:
        before = {name: scope[name] for name in rules.FREE}
        try:
            override(scope, [f"--{name}", value.strip()] if value else [f"--{name}"], warn=say)
            rules.check(scope)
        except ValueError:
            scope.update(before)
            raise
    return name
