"""Runs the user's own Python files: a model.py, or what a settings file imports."""
import ast
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from glob import glob
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from types import ModuleType

from sampling.checkpoints.untrusted_files import UNREADABLE, parse_python
from sampling.process import is_out_of_memory

import_lock = RLock() # sys.path and sys.modules belong to the whole process
imported: set[str] = set() # the modules of the latest model_file


@contextmanager
def import_from(*folders: str, name: str = "") -> Iterator[dict[str, ModuleType]]:
    """Put folders first on sys.path inside this block.

    No module of this package, nor one of this name, hides theirs. At its end, the modules from
    there leave sys.modules, where they would hide others later. The dict gets them.
    """
    found: dict[str, ModuleType] = {}
    taken = {name}
    if any(glob(f"{folder}/{__package__}*") for folder in folders):
        taken.add(__package__)
    hidden = {key: sys.modules.pop(key) for key in [*sys.modules] if key.partition(".")[0] in taken}
    before = {*sys.modules}
    saved = sys.path[:], sys.dont_write_bytecode
    sys.path[:0] = folders
    sys.dont_write_bytecode = True # saved code would hide a second change within a second
    importlib.invalidate_caches()
    try:
        yield found
    finally:
        for key in sys.modules.keys() - before:
            package = sys.modules[key.partition(".")[0]]
            files = getattr(package, "__path__", None) or [str(getattr(package, "__file__", ""))]
            # An environment in the folder lies deeper.
            if {*folders} & {*map(os.path.dirname, files)}:
                found[key] = sys.modules[key]
        for key in found:
            del sys.modules[key]
        sys.modules.update(hidden)
        # Not earlier: the __path__ of a folder without __init__.py follows.
        sys.path[:], sys.dont_write_bytecode = saved


@contextmanager
def importing(path: Path, name: str) -> Iterator[dict[str, ModuleType]]:
    """In this block, a model.py finds its neighbours, but not those of the one before.

    The dict gets the modules of its folder. They stay in sys.modules, where pickles look for them,
    if no other module has the place. A change of the working directory is undone.
    """
    root = path.parents[name.count(".")]
    folders = map(str, (root, path.parent, path.parent.parent))
    working_directory = os.getcwd()
    with import_lock:
        for key in imported:
            sys.modules.pop(key, None)
        try:
            with import_from(*folders, name=name.partition(".")[0]) as modules:
                yield modules
        finally:
            os.chdir(working_directory)
        imported.clear()
        for key, module in modules.items():
            if sys.modules.setdefault(key, module) is module:
                imported.add(key)


def import_file(path: Path, name: str) -> ModuleType:
    """Import a model.py, or the package in a folder, under this name. Its parents come first."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        import_file(path.parent, parent)
    file = path / "__init__.py" if path.is_dir() else path
    loader = SourceFileLoader(name, str(file))
    spec = spec_from_file_location(name, str(file), loader=loader)
    module = sys.modules[name] = module_from_spec(spec)
    if file.exists(): # a folder may have no __init__.py
        loader.exec_module(module)
    return module


def module_name(path: Path) -> str:
    """The name by which train.py imports it, such as model; or gpt.model, if the file has relative
    imports and lies in the folder gpt. A dot inside of a file's name is none of a module's.
    """
    level = 0
    with suppress(*UNREADABLE): # the import says why
        for node in ast.walk(parse_python(path)):
            level = max(level, getattr(node, "level", 0))
    parts = [*path.parts[1:][-1 - level:-1], path.stem]
    return ".".join(part.replace(".", "_") for part in parts)


@contextmanager
def running(path: Path, what: str = "") -> Iterator[None]:
    """Run the user's code in this block.

    What it prints goes to standard error. An exception becomes a ValueError that names the file and
    its line.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error: # also SystemExit, and types of its own
        if is_out_of_memory(error):
            raise
        where = path
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SyntaxError): # Python has no frame of its line
            frames.append(traceback.FrameSummary(error.filename or "", error.lineno, ""))
        for frame in frames:
            if Path(frame.filename).is_relative_to(path):
                where = f"{path}, line {frame.lineno}"
        # Unlike str, this never raises.
        reason = " ".join(traceback.format_exception_only(error)[-1].split())
        what = f"{what}: " if what else ""
        raise ValueError(f"{where}: {what}{reason:.300}") from None
