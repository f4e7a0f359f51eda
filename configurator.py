"""Applies settings files and --key=value arguments to the global variables of a script.

The settings are the script's own global variables above its first function. Their values are the
defaults. A setting takes values of its default's type, or of the types in its annotation (top_k:
int | None = 200). Its help is the comment after it, with the indented comments below; an unindented
one above it begins a group. A user's error is a ValueError.
"""
import ast
import importlib
import json
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

# nanoGPT's scripts execute a file of this name among their own globals.
if not __name__.endswith("configurator"):
    sys.exit("error: this configurator.py is not nanoGPT's: git checkout configurator.py model.py "
             "restores its files")
from sampling.user_code import import_from
from sampling.values import as_list, plain, suggest

logger = logging.getLogger(__name__)
TYPE_NAMES = {
    "int": "a whole number", "float": "a number", "bool": "True or False", "str": "text",
    "list": "a list", "NoneType": "None",
}
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
ADVICE = ("a settings file is Python that assigns settings, such as temperature = 0.8; "
          'in the command, settings are --key="a value", and a model is --out_dir=PATH')


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

    validate gets all settings, and the names of those that flags set. Its ValueError has the
    attribute names: which settings it is about. aliases: what to suggest for names of other
    programs. foreign: names of another program's settings, each with one of ours that means
    something else there: a file that sets the first does not set the second. Logs the changes. An
    error leaves scope as it was. --help and --version print, and exit.
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
        print(help_text(docstring_of(scope), settings, shutil.get_terminal_size().columns), end="",
              flush=True)
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
            is_from_file = files.pop(name, None)
            earlier = changes.get(name)
            # A list adds to that of an earlier flag. All else replaces it, and what a file sets.
            if "list" in settings[name].types and not is_from_file and None not in (earlier, value):
                value = as_list(earlier) + as_list(value)
            changes[name] = value
        else:
            path, source = read_file(arguments.pop(0), scope["__file__"])
            found = run_file(path, source, scope | changes, settings, foreign)
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


def docstring_of(scope: Mapping[str, Any]) -> str:
    """A script's docstring, also with python -OO. An installed command calls it by its own name."""
    doc = ast.get_docstring(ast.parse(Path(scope["__file__"]).read_text(encoding="utf-8"))) or ""
    if scope.get("__name__") == "__main__":
        return doc
    script = os.path.basename(scope["__file__"])
    return doc.replace(f"python {script}", Path(sys.argv[0]).stem)


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
    return "\n".join(lines) + "\n"


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
        if "list" in types and re.fullmatch(r"(?s)\[.+]", text):
            value = [parse_item(name, item.strip()) for item in text[1:-1].split(",")]
            logger.info(f"{name} is the list {value!r:.100}; for the text, quote it in Python: "
                        f"'\"{text:.100}\"'")
        elif "list" in types and re.match(r"\[\s*[\"']", text):
            raise ValueError(f"{name}: the list {text!r:.100} has no end: add it") from None
    if text.startswith("("):
        value = plain(value)
    if "str" in types and type(value).__name__ not in types:
        return text
    return coerce(name, value, types, text)


def parse_item(name: str, text: str) -> str:
    """The text that an item of a list means, with quotes, without them, or as it stands."""
    for literal in text, f'"{text}"':
        value = parse(name, literal, ["str"])
        if value != literal:
            return value
    return text


def coerce(label: str, value: Any, types: list[str], given: Any) -> Any:
    """The value, if it has one of these types; a float for an int. label, given: for the error."""
    try:
        value = plain(value)
    except RecursionError:
        raise ValueError(f"{label} takes no list that contains itself, got "
                         f"{given!r:.100}") from None
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
        # nanoGPT's configurator would run its script again and again.
        if re.search(rb"open\(.configurator\.py", source):
            raise ValueError("it is a script with settings of its own")
        return found, source
    except (OSError, ValueError) as e: # ValueError: also for a path with a null byte
        raise ValueError(f"cannot read the settings file {path!r:.200}: "
                         f"{getattr(e, 'strerror', e)}; {ADVICE}") from None


def run_file(path: str, source: bytes, scope: dict[str, Any],
             settings: dict[str, Setting], foreign: Mapping[str, str]) -> dict[str, Any]:
    """Run a settings file and return the settings that it changes. foreign: as for override.

    The file can use the names in scope, and may define other names, as training files do. Logs a
    warning for a name like a setting's, or if it sets nothing.
    """
    names = dict(scope)
    try:
        code = compile(source, path, "exec")
        # Standard output is only for samples.
        with import_from(os.getcwd()), redirect_stdout(sys.stderr):
            try:
                exec(code, names)
            except NameError as e:
                if e.name != "torch":
                    raise
                # nanoGPT's script has imported it by now, which takes a second.
                names = scope | {"torch": importlib.import_module("torch")}
                exec(code, names)
    except (Exception, SystemExit) as e: # SystemExit would end the script without a message
        numbers = [frame.lineno for frame in traceback.extract_tb(e.__traceback__)
                   if frame.filename == path]
        if isinstance(e, SyntaxError):
            numbers = [e.lineno]
        where = f"{path}, line {numbers[-1]}" if numbers and numbers[-1] else path
        raise ValueError(f"{where}: {type(e).__name__}: {e!s:.300}; {ADVICE}") from None
    others = {name for name in names.keys() - scope.keys() if not name.startswith("__")}
    for name in sorted(others):
        hint = suggest(name, settings, prefixes=False)
        if hint and type(names[name]).__name__ in TYPE_NAMES:
            logger.warning(f"{path} sets {name}, which is not a setting{hint}")
    for name in others & foreign.keys():
        names.pop(foreign[name], None)
    # 1 == True, but as settings they differ.
    changes = {name: names[name] for name in settings if name in names
               and (type(names[name]), names[name]) != (type(scope[name]), scope[name])}
    if not (changes or others or settings.keys() & set(code.co_names)):
        if not path.endswith(".py"): # such as JSON
            raise ValueError(f"{path} sets nothing; {ADVICE}")
        logger.warning(f"{path} sets nothing; {ADVICE}")
    return {name: coerce(f"{path}: {name}", value, settings[name].types, value)
            for name, value in changes.items()}
