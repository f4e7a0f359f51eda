"""Applies settings files and --key=value arguments to the global variables of a script.

    python sample.py config/greedy.py --start="Once" --top_k=5 --compile

The settings are the script's own global variables above its first function. Their values are the defaults, and their
comments are the help text. A setting takes values of its default's type, or of the types in its annotation
(top_k: int | None = 200).
"""
import ast
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "text", "list": "a list",
              "None": "None"}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
MAX_INT_BITS = 4000 # Python refuses to print much longer integers

Log = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """A setting as the script's source shows it."""
    types: list[str] # keys of TYPE_NAMES
    default: Any
    comment: str


def override(scope: dict[str, Any], arguments: Iterable[str], validate: Callable[[dict[str, Any]], None] | None = None,
             log: Log = print) -> dict[str, Any]:
    """Apply settings files and arguments, in order, to a script's globals(); return all settings by name.

    validate gets all settings and raises ValueError if it refuses them. log gets warnings, and one line that lists
    the changes. Raises ValueError, without changing scope, if an argument or a file cannot be used. --help prints the
    settings and exits.
    """
    settings = find_settings(scope["__file__"])
    arguments = list(arguments)
    if {"--help", "-h"} & set(arguments):
        print(help_text(scope.get("__doc__") or "", settings), end="", flush=True)
        sys.exit(0)
    changes = {}
    while arguments:
        if arguments[0].startswith("--"):
            name, value = parse_argument(arguments, settings)
            changes[name] = value
        else:
            changes |= run_file(arguments.pop(0), scope | changes, settings, log)
    values = {name: scope[name] for name in settings} | changes
    if validate is not None:
        validate(values)
    scope.update(changes)
    if changes:
        log("settings: " + ", ".join(f"{name}={value!r:.100}" for name, value in changes.items()))
    return values


def find_settings(path: str | os.PathLike) -> dict[str, Setting]:
    """Find the settings of the script at path, by name."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    lines, settings = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            break
        if isinstance(node, ast.Assign | ast.AnnAssign):
            default = ast.literal_eval(node.value)
            if isinstance(node, ast.AnnAssign):
                target, types = node.target, ast.unparse(node.annotation).split(" | ")
            else:
                target, types = node.targets[0], [type(default).__name__]
            comment = lines[node.end_lineno - 1][node.end_col_offset:].strip().removeprefix("#").strip()
            settings[target.id] = Setting(types, default, comment)
    return settings


def help_text(doc: str, settings: dict[str, Setting]) -> str:
    """Return the script's docstring, followed by every setting with its default and comment."""
    flags = {f"--{name}={setting.default!r}": setting.comment for name, setting in settings.items()}
    width = max(map(len, flags))
    lines = [f"  {flag:{width}}  {comment}\n" for flag, comment in flags.items()]
    return f"{doc.strip()}\n\nSettings, with their defaults:\n{''.join(lines)}"


def parse_argument(arguments: list[str], settings: dict[str, Setting]) -> tuple[str, Any]:
    """Pop --key=value, --key value or a bare --key from the front of arguments; return the setting's name and value.

    Raises ValueError if there is no such setting, or if it does not take the value.
    """
    key, equals, text = arguments.pop(0).removeprefix("--").partition("=")
    name = key.replace("-", "_")
    if name not in settings:
        raise ValueError(f"unknown setting --{key:.100}{suggest(name, settings)}; --help lists all settings")
    types = settings[name].types
    if not equals:
        text = take_value(key, types, arguments)
    return name, parse(name, text, types)


def take_value(key: str, types: list[str], arguments: list[str]) -> str:
    """Pop the text of --key's value from the front of arguments. A bare --key of a bool setting means True.

    Raises ValueError if the value is missing.
    """
    if types == ["bool"]:
        return arguments.pop(0) if arguments and arguments[0].lower() in TRUE + FALSE else "True"
    if not arguments or arguments[0].startswith("--"):
        raise ValueError(f"--{key} needs a value: --{key}=...")
    return arguments.pop(0)


def parse(name: str, text: str, types: list[str]) -> Any:
    """Convert text to a value of one of these types. Raises ValueError, which names the setting, if that fails."""
    if "None" in types and text.lower() == "none":
        return None
    if "bool" in types and text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    value = parse_literal(text)
    if "str" in types:
        return value if isinstance(value, str) else text
    return coerce(name, value, types, text)


def parse_literal(text: str) -> Any:
    """Return the value of a Python literal, or the text itself if it is not a literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # about unknown escapes
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError): # such as "{{}}" or very deep nesting
        return text


def coerce(name: str, value: Any, types: list[str], given: Any) -> Any:
    """Return value if it has one of these types; an int becomes a float if only a float is allowed.

    Raises ValueError, which shows given, if the value has another type.
    """
    type_name = "None" if value is None else type(value).__name__
    allowed = f"{name} takes {' or '.join(TYPE_NAMES[t] for t in types)}"
    if type_name == "int" and value.bit_length() > MAX_INT_BITS:
        raise ValueError(f"{allowed}, got an integer of {value.bit_length()} bits")
    if type_name == "int" and "float" in types:
        try:
            return float(value)
        except OverflowError:
            pass
    elif type_name in types:
        return value
    raise ValueError(f"{allowed}, got {given!r:.100}")


def run_file(path: str, scope: dict[str, Any], settings: dict[str, Setting], log: Log) -> dict[str, Any]:
    """Run a settings file and return the settings that it changes. The file can use the names in scope.

    The file may define other names too, as training files do. A name that is similar to a setting's gets a warning.
    Raises ValueError if the file cannot be read, raises an exception, or assigns a value of a wrong type.
    """
    found = path if os.path.exists(path) else os.path.join(os.path.dirname(os.path.realpath(scope["__file__"])), path)
    names = execute(path, found, scope)
    for name in sorted(names.keys() - scope.keys()):
        if type(names[name]).__name__ in TYPE_NAMES and (hint := suggest(name, settings, prefixes=False)):
            log(f"warning: {found} sets {name}, which is not a setting{hint}")
    changes = {name: names[name] for name in settings if name in names and differ(names[name], scope[name])}
    try:
        return {name: coerce(name, value, settings[name].types, value) for name, value in changes.items()}
    except ValueError as e:
        raise ValueError(f"{found}: {e}") from None


def execute(path: str, found: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Run the file at found in a copy of scope, and return the copy. path is the path that the user gave.

    Raises ValueError if the file cannot be read, or raises an exception.
    """
    try:
        with open(found, "rb") as f:
            source = f.read()
    except (OSError, ValueError) as e: # ValueError: the path holds a NUL
        why = e.strerror if isinstance(e, OSError) else e
        raise ValueError(f"cannot read the settings file {path!r:.200}: {why}; give settings as --key=value") from None
    names = dict(scope)
    try:
        code = compile(source, found, "exec")
        if b"torch" in source: # nanoGPT's script has imported torch by now, and settings files may use it
            import torch
            names["torch"] = torch
        with redirect_stdout(sys.stderr): # standard output is only for samples
            exec(code, names)
    except KeyboardInterrupt:
        raise
    except BaseException as e: # also SystemExit, which would end the script without a message
        raise ValueError(f"{describe_error(found, e)}; a settings file is Python that assigns settings") from None
    return names


def differ(value: Any, other: Any) -> bool:
    """Whether two values differ in type or value: 1 == True, but as settings they differ."""
    return type(value) is not type(other) or value != other


def describe_error(path: str, error: BaseException) -> str:
    """Return the file, the line that failed, and the error, as one line."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    traceback = error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {error!s:.300}"


def suggest(name: str, settings: Collection[str], prefixes: bool = True) -> str:
    """Return '; did you mean x?' for a setting that starts with name (if prefixes) or is similar to it, else ''."""
    begun = [setting for setting in settings if prefixes and len(name) > 2 and setting.startswith(name)]
    found = begun or difflib.get_close_matches(name.lower(), settings, n=1, cutoff=0.75)
    return f"; did you mean {found[0]}?" if found else ""
