"""Applies settings files and --key=value arguments to the global variables of a script.

The settings are the script's own global variables above its first function. Their values are the
defaults. A setting takes values of its default's type, or of the types in its annotation (top_k:
int | None = 200). Its help is the comment after it, with the indented comments below; an unindented
one above it begins a group. A user's error is a ValueError.
"""
import ast
import dis
import importlib
import json
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

# nanoGPT's scripts execute a file of this name among their own globals.
if not __name__.endswith("configurator"):
    sys.exit("error: this configurator.py is not nanoGPT's: git checkout configurator.py model.py "
             "restores its files")
from sampling.user_code import import_from, running
from sampling.values import as_list, as_plain, suggest

logger = logging.getLogger(__name__)
TYPE_NAMES = {
    "int": "a whole number", "float": "a number", "bool": "True or False", "str": "text",
    "list": "a list", "NoneType": "None",
}
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
ADVICE = ("a settings file is Python that assigns settings, such as temperature = 0.8; "
          'in the command, settings are --key="a value", a model is --out_dir=PATH, and a model.py '
          "--model_file=PATH")


class Setting(NamedTuple):
    """A setting as the script's source shows it."""
    types: list[str] # keys of TYPE_NAMES
    default: Any
    comment: str
    group: str = ""


def override(scope: dict[str, Any], arguments: Iterable[str],
             validate: Callable = lambda values, flags: None,
             aliases: Mapping[str, str] = {},
             foreign: Mapping[str, str] = {}) -> dict[str, Any]:
    """Apply settings files and arguments, in order, to a script's globals(). Returns all settings.

    validate gets all settings, and the names of those that flags set; its ValueError has the
    attribute names: the settings at fault. aliases: what to suggest for names of other programs.
    foreign: names that only the files of another program set, each with a setting that means
    something else there, which such a file does not change. An error leaves scope as it was. --help
    and --version print, and exit.
    """
    try:
        os.getcwd()
    except FileNotFoundError: # neither files nor torch work there
        raise ValueError("the working directory was deleted: change to another one") from None
    settings = find_settings(scope["__file__"])
    arguments = list(arguments)
    answer(arguments, scope, settings)
    changes, files = read_arguments(arguments, scope, settings, aliases, foreign)
    values = {name: scope[name] for name in settings} | changes
    try:
        validate(values, changes.keys() - files.keys())
    except ValueError as error:
        for name in getattr(error, "names", ()):
            if name in files:
                raise ValueError(f"{files[name]}: {error}") from None
        raise
    if changes:
        shown = ", ".join(f"{name}={value!r:.100}" for name, value in changes.items())
        logger.info(f"settings: {shown}")
    scope.update(changes)
    return values


def answer(arguments: list[str], scope: dict[str, Any], settings: dict[str, Setting]) -> None:
    """Print what --version or --help asks for, and exit."""
    if "--version" in arguments:
        print(scope.get("__version__"), flush=True)
    elif {"--help", "-h"} & set(arguments):
        doc = scope.get("__doc__") or "" # python -OO leaves it out
        if scope.get("__name__") != "__main__": # an installed command, which has its own name
            script = os.path.basename(scope["__file__"])
            doc = doc.replace(f"python {script}", Path(sys.argv[0]).stem)
        print(help_text(doc, settings, shutil.get_terminal_size().columns), end="", flush=True)
    else:
        return
    sys.exit(0)


def read_arguments(arguments: list[str], scope: dict[str, Any], settings: dict[str, Setting],
                   aliases: Mapping[str, str],
                   foreign: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the arguments change, and the file of each setting that a file sets."""
    if broken := [argument for argument in arguments if argument.endswith("\r")]:
        raise ValueError(f"{broken[0]!r:.200} ends in a carriage return: save your script with "
                         "Unix line ends (LF)")
    changes = {}
    files = {} # setting -> the path of the file that changed it
    while arguments:
        first = arguments[0]
        if first.startswith("--") or (first.startswith("-") and not os.path.exists(first)):
            name, value = parse_argument(arguments, settings, aliases)
            earlier = None if files.pop(name, None) else changes.get(name)
            # A list adds to that of an earlier flag. All else replaces it, and what a file sets.
            if "list" in settings[name].types and None not in (earlier, value):
                value = as_list(earlier) + as_list(value)
            changes[name] = value
        else:
            path, source = read_file(arguments.pop(0), scope["__file__"])
            found = run_file(path, source, scope | changes, settings, aliases, foreign)
            changes |= found
            files |= dict.fromkeys(found, path)
    return changes, files


def find_settings(path: str | os.PathLike) -> dict[str, Setting]:
    """Find the settings of the script at path, by name."""
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    settings = {}
    group = ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            break
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        default = ast.literal_eval(node.value)
        types = type(default).__name__
        if isinstance(node, ast.AnnAssign):
            types = ast.unparse(node.annotation).replace("None", "NoneType")
        above = lines[max(0, node.lineno - 2)]
        if above.startswith("#"):
            group = above.strip("# ")
        comment = [lines[node.end_lineno - 1][node.end_col_offset:]]
        comment += takewhile(re.compile(" +#").match, lines[node.end_lineno:])
        comment = " ".join(line.strip("# ") for line in comment)
        target, = getattr(node, "targets", None) or [node.target]
        settings[target.id] = Setting(types.split(" | "), default, comment, group)
    return settings


def help_text(doc: str, settings: dict[str, Setting], width: int) -> str:
    """The docstring, then each setting in its group, with its default and its comment."""
    width = min(max(width, 40), 120)
    group = ""
    paragraphs = [text if text.startswith(" ") else textwrap.fill(text, width)
                  for text in doc.strip().split("\n\n")]
    lines = ["\n\n".join(paragraphs), "", "Settings, with their defaults:"]
    flags = {name: f"  {to_argument(name, setting)}  " for name, setting in settings.items()}
    indent = min(max(map(len, flags.values())), width // 2)
    for name, setting in settings.items():
        if setting.group != group:
            group = setting.group
            lines += ["", f"{group}:"]
        lines += textwrap.wrap(setting.comment or "-", width, break_long_words=False,
                               break_on_hyphens=False, initial_indent=flags[name].ljust(indent),
                               subsequent_indent=" " * indent)
    return "\n".join(lines).lstrip("\n") + "\n"


def to_argument(name: str, setting: Setting) -> str:
    """The argument that gives a setting its default, quoted for a shell."""
    text = setting.default if isinstance(setting.default, str) else repr(setting.default)
    if not text.isprintable() or parse(name, text, setting.types) != setting.default:
        text = json.dumps(text, ensure_ascii=False) # a Python literal too
    return f"--{name}={shlex.quote(text)}"


def parse_argument(arguments: list[str], settings: dict[str, Setting],
                   aliases: Mapping[str, str]) -> tuple[str, Any]:
    """Pop --key=value, --key value or a bare --key (for True) off arguments: name and value."""
    key, equals, text = arguments.pop(0).partition("=")
    name = key.removeprefix("--").replace("-", "_")
    if name not in settings:
        hint = suggest(name.removeprefix("_"), settings, aliases)
        if not key.startswith("--"):
            hint += "; settings begin with --"
        raise ValueError(f"unknown setting {key:.200}{hint}; --help lists all settings")
    types = settings[name].types
    if equals:
        return name, parse(name, text, types)
    if types == ["bool"] and not (arguments and arguments[0].lower() in TRUE + FALSE):
        return name, True
    if not arguments or arguments[0].startswith("--"):
        raise ValueError(f"{key} needs a value: {key}=...")
    return name, parse(name, arguments.pop(0), types)


def parse(name: str, text: str, types: list[str]) -> Any:
    """Convert text to a value of one of these types."""
    if "NoneType" in types and text.lower() == "none":
        return None
    if "bool" in types and text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # about unknown escapes
            # 01 is 1, as in a shell.
            value = ast.literal_eval(re.sub(r"^([+-]?)0+(?=\d)", r"\1", text))
    # There are five types of errors, such as for "{{}}" or very deep nesting.
    except Exception:
        value = text
        # A shell removes the quotes inside a list.
        if "list" in types and re.match(r"(?s)\[.+]$|\[\s*[\"']", text):
            quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
            raise ValueError(f"{name}: {text!r:.100} is no list: write [\"A\", \"B\"], in a shell "
                             f"'[\"A\", \"B\"]'; for the text itself, {quoted}") from None
    value = as_plain(value)
    if "str" in types and type(value).__name__ not in types:
        return text
    return coerce(name, value, types, text)


def coerce(label: str, value: Any, types: list[str], given: Any) -> Any:
    """The value, if it has one of these types; a float for an int. label, given: for the error."""
    if type(value) is int and "int" not in types and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value).__name__ in types:
        return value
    allowed = " or ".join(map(TYPE_NAMES.get, types))
    raise ValueError(f"{label} takes {allowed}, got {given!r:.100}")


def read_file(path: str, script: str) -> tuple[str, bytes]:
    """The path and content of a settings file, which is looked up here, then beside the script."""
    found = path
    if not os.path.exists(path):
        found = os.path.join(os.path.dirname(os.path.realpath(script)), path)
    try:
        source = Path(found).read_bytes()
        # This script, or one of nanoGPT's, would run itself again and again.
        is_ours = os.path.realpath(found) == os.path.realpath(script)
        if is_ours or re.search(rb"open\(.configurator\.py", source):
            raise ValueError("it is a script with settings of its own")
        return found, source
    except (OSError, ValueError) as e: # ValueError: also for a path with a null byte
        raise ValueError(f"cannot read the settings file {path!r:.200}: "
                         f"{getattr(e, 'strerror', e)}; {ADVICE}") from None


def run_file(path: str, source: bytes, scope: dict[str, Any], settings: dict[str, Setting],
             aliases: Mapping[str, str], foreign: Mapping[str, str]) -> dict[str, Any]:
    """Run a settings file and return the settings that it changes. aliases, foreign: as for
    override.

    The file can use the names in scope, and may define other names, as training files do. Logs a
    warning for a name like a setting's, or if it sets nothing.
    """
    names = dict(scope)
    try:
        with import_from(os.getcwd()), running(Path(path)):
            tree = ast.parse(source, path)
            if any(getattr(node, "id", "") == "torch" for node in ast.walk(tree)):
                # nanoGPT's script has imported it by now, which takes a second.
                names["torch"] = importlib.import_module("torch")
            code = compile(tree, path, "exec")
            exec(code, names)
            found = as_plain({name: names[name] for name in settings if name in names})
    except ValueError as e:
        raise ValueError(f"{e}; {ADVICE}") from None
    others = {name for name in names.keys() - scope.keys()
              if type(names[name]).__name__ in TYPE_NAMES}
    for name in sorted(others):
        if hint := suggest(name, settings, aliases, prefixes=False):
            logger.warning(f"{path} sets {name}, which is not a setting{hint}")
    for name in others & foreign.keys():
        found.pop(foreign[name], None)
    # 1 == True, but as settings they differ.
    changes = {name: value for name, value in found.items()
               if (type(value), value) != (type(scope[name]), scope[name])}
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    if not (changes or settings.keys() & assigned):
        has_class = any(isinstance(node, ast.ClassDef) for node in tree.body) # as a model.py has
        if has_class or not (others or path.endswith(".py")): # or JSON
            raise ValueError(f"{path} sets nothing; {ADVICE}")
        if not others:
            logger.warning(f"{path} sets nothing; {ADVICE}")
    return {name: coerce(f"{path}: {name}", value, settings[name].types, value)
            for name, value in changes.items()}
