"""Settings files and --key=value arguments -> the globals of a script.

    python sample.py config/greedy.py --start="Once" --top_k=5 --compile

The settings are the script's own global variables above its first function: their values are the
defaults, their comments the help, and a setting takes values of the type it has. One that may also be None
says so in an annotation (top_k: int | None = 200).
"""
import ast
import difflib
import os
import sys
import warnings
from contextlib import redirect_stdout

TAKES = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "text", "list": "a list",
         "None": "None"}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def override(scope, arguments, warn=print):
    """Run settings files and arguments, in order, over scope: the script's globals(), changed in place.

    Returns what changed, by name. ValueError where an argument or a file cannot be used; what is only odd
    goes to warn. --help prints the settings and exits.
    """
    settings = find_settings(scope["__file__"])
    if {"--help", "-h"} & set(arguments):
        print(describe(scope.get("__doc__") or "", settings), end="", flush=True)
        sys.exit(0)
    arguments, changed = list(arguments), {}
    while arguments:
        argument = arguments.pop(0)
        if argument.startswith("--"):
            name, text = split_argument(argument, arguments, settings)
            changes = {name: parse(name, text, settings[name].kinds)}
        else:
            changes = run_file(argument, scope, settings, warn)
        scope.update(changes)
        changed |= changes
    return changed


class Setting:
    """A setting as the script's source shows it: the kinds of value it takes, its default and its comment."""

    def __init__(self, kinds, default, comment):
        self.kinds, self.default, self.comment = kinds, default, comment


def find_settings(path):
    """Name -> Setting for the globals that the script at path assigns above its first function."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    lines, settings = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            break
        if isinstance(node, ast.Assign | ast.AnnAssign):
            default = ast.literal_eval(node.value)
            if isinstance(node, ast.AnnAssign):
                target, kinds = node.target, ast.unparse(node.annotation).split(" | ")
            else:
                target, kinds = node.targets[0], [type(default).__name__]
            comment = lines[node.end_lineno - 1][node.end_col_offset:].strip().removeprefix("#").strip()
            settings[target.id] = Setting(kinds, default, comment)
    return settings


def describe(doc, settings):
    """The help: the script's docstring, then every setting with its default and comment."""
    shown = {f"--{name}={setting.default!r}": setting.comment for name, setting in settings.items()}
    width = max(map(len, shown))
    lines = [f"  {flag:{width}}  {comment}\n" for flag, comment in shown.items()]
    return f"{doc.strip()}\n\nSettings, with their defaults:\n{''.join(lines)}"


def split_argument(argument, rest, settings):
    """--key=value, --key value (taken from rest) or a bare --key -> (name, value's text)."""
    key, equals, text = argument.removeprefix("--").partition("=")
    name = key.replace("-", "_")
    if name not in settings:
        begun = [setting for setting in settings if len(name) > 2 and setting.startswith(name)]
        near = f"; did you mean {begun[0]}?" if begun else nearest(name, settings)
        raise ValueError(f"unknown setting --{key:.100}{near}; --help lists them all")
    if equals:
        return name, text
    if settings[name].kinds == ["bool"]:
        return name, rest.pop(0) if rest and rest[0].lower() in TRUE + FALSE else "True"
    if not rest or rest[0].startswith("--"):
        raise ValueError(f"--{key} needs a value: --{key}=...")
    return name, rest.pop(0)


def parse(name, text, kinds):
    """The value that text stands for in a setting that takes these kinds."""
    if "None" in kinds and text.lower() == "none":
        return None
    if "bool" in kinds and text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    value = literal(text)
    if "str" in kinds:
        return value if isinstance(value, str) else text
    return fit(name, value, kinds, text)


def literal(text):
    """The Python literal that text spells, or text itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # of odd escapes
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError): # {{}} too, and absurdly deep nesting
        return text


def fit(name, value, kinds, shown):
    """The value as its setting takes it, an int where a float stands included."""
    kind = "None" if value is None else type(value).__name__
    if kind == "int" and value.bit_length() > 4000: # Python refuses to write much longer ones
        raise ValueError(f"{name} takes {' or '.join(TAKES[k] for k in kinds)}, got one of {value.bit_length()} bits")
    if kind == "int" and "float" in kinds:
        try:
            return float(value)
        except OverflowError:
            pass
    elif kind in kinds:
        return value
    raise ValueError(f"{name} takes {' or '.join(TAKES[k] for k in kinds)}, got {shown!r:.100}")


def run_file(path, scope, settings, warn):
    """Run a settings file, in the current folder or beside the script -> the settings it changed.

    It is Python and sees the settings as they are so far. It may define anything else (training files
    do), but a near miss of a setting's name is warned of.
    """
    beside = os.path.join(os.path.dirname(os.path.realpath(scope["__file__"])), path)
    found = path if os.path.exists(path) else beside
    try:
        with open(found, "rb") as f:
            source = f.read()
    except (OSError, ValueError) as e: # a path may not even be one
        raise ValueError(f"cannot read the settings file {path!r:.200}: {getattr(e, 'strerror', e)}; "
                         "settings are given as --key=value") from None
    names = dict(scope)
    try:
        code = compile(source, found, "exec")
        if b"torch" in source: # nanoGPT's script has imported it by then, and settings files may use it
            import torch
            names["torch"] = torch
        with redirect_stdout(sys.stderr): # standard output is the script's
            exec(code, names)
    except KeyboardInterrupt:
        raise
    except BaseException as e: # sys.exit() too: a run that ends here has said nothing
        raise ValueError(f"{describe_error(found, e)}; a settings file is Python that assigns settings") from None
    for name, value in names.items():
        if name not in scope and type(value).__name__ in TAKES and (near := nearest(name, settings)):
            warn(f"warning: {found} sets {name}, which is no setting{near}")
    changes = {name: names[name] for name in settings if name in names and differ(names[name], scope[name])}
    try:
        return {name: fit(name, value, settings[name].kinds, value) for name, value in changes.items()}
    except ValueError as e:
        raise ValueError(f"{found}: {e}") from None


def differ(value, other):
    """Whether two settings' values differ, in kind or otherwise."""
    return type(value) is not type(other) or value != other


def describe_error(path, error):
    """One line: the file, the line where it failed, and why."""
    line = getattr(error, "lineno", None)
    traceback = error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {error!s:.300}"


def nearest(name, settings):
    """'; did you mean x?' for the setting whose name is close, or nothing."""
    close = difflib.get_close_matches(name.lower(), settings, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""
