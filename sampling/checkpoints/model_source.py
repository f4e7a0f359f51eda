"""Reads a model.py as data, without running it: does its GPT compute what nanoGPT's own does?

nanoGPT is there to be edited, and an edit that adds no tensor leaves no trace in a ckpt.pt. So the
model.py near a checkpoint is parsed. Its units, the functions and classes that decide the logits,
are compared one by one with those of all versions of nanoGPT since 2023-01-27: by digests of
their syntax trees, without what changes no logits (comments, docstrings, annotations, assert,
print).
"""
import ast
import builtins
import hashlib
import logging
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from sampling import model as this_model

logger = logging.getLogger(__name__)
NANOGPT = "nanogpt" # the value of model_file that stands for nanoGPT's own model.py
# nanoGPT's file has 17 KB, and those of its forks up to 60. A large file would take long to parse.
MAX_SOURCE_BYTES = 2**17
# Python joins the parts of an imported name at each dot: 40,000 of them would take a gigabyte.
LONG_NAME = re.compile(rb"(\.[\s\\]*\w+[\s\\]*){50}")
# Unit -> digests of nanoGPT's versions, the newest first, and of this project's model.py.
# Import -> what it imports.
KNOWN = {
    "GPT": "2dd0a542", # the bases, and what the body has besides methods
    "GPT.__init__": "2f124ded 0b057bf0 1c4b4ddb 2728835d 1a6b09c1 3cad6b78",
    "GPT._init_weights": "ed6338ff ad8e96c9 f8f207bf",
    "GPT.init_weights": "433141da",
    "GPT.forward": "0bf54c61 3bb6c019 a054596a",
    "GPT.generate": "3ad788ef 257eec9c",
    "GPTConfig": "4f53cda1", # what its body has besides fields
    "Block": "a50d843b ddb391eb 77f68195 d968b919 b2834907",
    "CausalSelfAttention": "a2e797b0 64f8f9a8 8fac24ab a8c30d8b 6582d110 42addc62 6e73700c",
    "LayerNorm": "90e26e18 0334b29e",
    "LayerNormNoBias": "c7759c7d",
    "MLP": "f0bc925a a7722f6f bbd012c0 63a7e4d2 4d428e31",
    "new_gelu": "0476ae3e", # the tanh form, which nanoGPT had until June 2023
    "F": "torch.nn.functional", "math": "math", "nn": "torch.nn", "torch": "torch",
}
# The units that compute. The others build or import.
ARITHMETIC = {"GPT.forward", "Block", "CausalSelfAttention", "LayerNorm", "MLP"}
# Attention as it was for some weeks until April 2023.
DROPS_WHILE_SAMPLING = "64f8f9a8"
# Functions, also as decorators, whose calls change no logits.
HARMLESS = re.compile(
    r"print|len|int|float|str|bool|dict|list|set|tuple|range|min|max|getattr|hasattr|Path"
    r"|classmethod|staticmethod|property|(dataclasses\.)?(dataclass|field)"
    r"|(warnings|logging|sys|os|re|math|time|functools|typing)(\.\w+)+"
    r"|torch\.(device|tensor|no_grad|inference_mode|cuda\.\w+)")
# What a file may import that changes no logits, unless it is a neighbour of that name.
HARMLESS_MODULES = {"torch", "numpy", *sys.stdlib_module_names}


class ModelSource(NamedTuple):
    """What a model.py shows."""
    path: Path
    differences: list[str] # the units that are not nanoGPT's
    edits_generate: bool = False # such an edit changes no logits
    gelu: str = "none" # as in GPTConfig
    drops_while_sampling: bool = False # unless its dropout is 0

    def warn_of_generate(self) -> None:
        """Say so if its loop is not nanoGPT's: it is never called."""
        if self.edits_generate:
            logger.warning(f"{self.path}: its generate was edited, and is not called: nanoGPT's "
                           "own loop samples")

    def reject(self, differences: list[str]) -> None:
        """Raises ValueError if there are differences."""
        if differences:
            # A package is run by the name of its folder.
            path = self.path.parent if self.path.stem == "__init__" else self.path
            raise ValueError(
                f"{path} is not nanoGPT's model.py (it differs in {', '.join(differences):.300}); "
                f"if the checkpoint was trained with it, pass --model_file={quote(str(path))}, "
                f"which runs it; if with nanoGPT's own, pass --model_file={NANOGPT}")


UNEDITED = ModelSource(Path(NANOGPT), []) # nanoGPT's newest


def require_unedited() -> None:
    """Raises ValueError if this project's model.py was edited: not all backends would follow."""
    path = this_model.__file__
    source = read_source(Path(path))
    if source is None or source.differences:
        raise ValueError(f"{path}, the model.py of this project, was edited: restore it (git "
                         "checkout model.py), or, for a ckpt.pt, pass "
                         f"--model_file={quote(path)}, which runs it")


def find_source(checkpoint: Path) -> ModelSource:
    """The model.py that belongs to a ckpt.pt, or the package model, which Python prefers: in its
    folder, in the parent of that, or in the working directory if the file lies in it, or if a
    train.py is there. If no file there has a GPT, it is nanoGPT's newest. Raises ValueError if it
    is edited.
    """
    folders = []
    for file in Path(os.path.abspath(checkpoint)), checkpoint.resolve(): # one may be a link
        folders += file.parents[:2]
        if Path.cwd() in file.parents:
            folders.append(Path.cwd())
    if Path("train.py").is_file(): # a clone of nanoGPT, whose out_dir may lie anywhere
        folders.append(Path.cwd())
    names = "model/__init__.py", "model.py"
    for path in [folder / name for folder in dict.fromkeys(folders) for name in names]:
        source = read_source(path) if path.is_file() else None
        if source:
            source.reject(source.differences)
            source.warn_of_generate()
            if source.gelu == "tanh":
                logger.info(f"{path} is nanoGPT's from before June 2023: using its GELU, the tanh "
                            "form")
            return source
    return UNEDITED


def read_source(path: Path) -> ModelSource | None:
    """What the file at path shows; None if it does not define or import a GPT."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SOURCE_BYTES + 1)
        if len(content) > MAX_SOURCE_BYTES:
            raise ValueError(f"more than {MAX_SOURCE_BYTES} bytes")
        if LONG_NAME.search(content):
            raise ValueError("a name with more than 50 dots")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # about unknown escapes
            body = ast.parse(content).body
        # An import of *, a function __getattr__ and sys.modules may bind it, too.
        if not re.search(r"'(GPT|\*|__getattr__|modules)'", canonical(body)):
            return None
        return compare(path, find_bindings(body))
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError) as error:
        reason = " ".join(str(error).split())
        return ModelSource(path, [f"all, as it cannot be read: {reason:.100}"])


# ---- what a file binds

def find_bindings(body: list[ast.stmt]) -> defaultdict[str, list[Any]]:
    """What the statements of a module bind each name to: functions, classes, assignments, and
    imports as their dotted names. The name * has what could bind any name, or change what is bound
    elsewhere: imports of it, loops, and what has_effects. The name import has all imports.
    """
    bindings = defaultdict(list)
    waiting = [*body]
    for node in waiting: # it grows
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler): # each part counts alone
            is_script = (isinstance(node, ast.If) # an import does not run its body
                         and ast.unparse(node.test) == "__name__ == '__main__'")
            waiting += node.orelse if is_script else ast.iter_child_nodes(node)
            continue
        if has_effects(node):
            bindings["*"].append(node)
        if is_inert(node) or isinstance(node, ast.expr): # such as the test of an if
            continue
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                bindings[node.name].append(node)
            case ast.Import() | ast.ImportFrom():
                origin = ""
                if isinstance(node, ast.ImportFrom):
                    origin = f"{'.' * node.level}{node.module}."
                for alias in node.names:
                    # "import a.b" binds a. A name after "from a import" has no dot.
                    top = alias.name.partition(".")[0]
                    source = origin + (alias.name if alias.asname else top)
                    bindings[alias.asname or top].append(source)
                    bindings["import"].append(source)
            case ast.Assign(targets) | ast.AnnAssign(targets): # one, or a list
                for name in names_in(targets, "id"):
                    bindings[name].append(node)
            case _:
                bindings["*"].append(node)
    return bindings


def has_effects(node: ast.AST) -> bool:
    """Whether a statement, or the test of an if, calls what is not harmless, or assigns to a part
    of an object, while the file is imported: in a value, a decorator, a default or the body of a
    class, but not in the body of a function.
    """
    waiting = [node]
    for part in waiting: # it grows
        calls = [part] if isinstance(part, ast.Call) else getattr(part, "decorator_list", [])
        # A decorator may be called by its name alone.
        called = [ast.unparse(getattr(call, "func", call)) for call in calls]
        is_part = isinstance(part, ast.Attribute | ast.Subscript)
        is_assigned = is_part and not isinstance(part.ctx, ast.Load)
        if is_assigned or not all(map(HARMLESS.fullmatch, called)):
            return True
        children = ast.iter_child_nodes(part)
        if isinstance(part, ast.FunctionDef): # its body does not run
            children = [child for child in children if not isinstance(child, ast.stmt)]
        waiting += children
    return False


def is_inert(node: Any) -> bool:
    """Whether this is a statement that changes no logits."""
    match node:
        case ast.Expr(ast.Call(function)):
            return HARMLESS.fullmatch(ast.unparse(function)) is not None
        case ast.Expr(ast.Constant()): # such as a docstring
            return True
        case ast.AnnAssign(value=None) | ast.Assert() | ast.Pass():
            return True
    return False


# ---- what it is compared with

def compare(path: Path, bindings: defaultdict[str, list[Any]]) -> ModelSource:
    """Compare the class GPT, and all that it uses, with what is known."""
    waiting = ["*", "__getattr__", "GPTConfig", "GPT"]
    found = set()
    # A neighbour hides a module of its name.
    harmless = HARMLESS_MODULES - {file.stem for file in path.parent.iterdir()}
    differences = [source for source in bindings["import"]
                   if source.partition(".")[0] not in harmless]
    for name in waiting: # it grows
        for value in bindings[name]:
            for unit, part in units(name, value):
                digest = hashlib.sha256(canonical(part).encode()).hexdigest()[:8]
                found.add(digest)
                if digest not in KNOWN.get(unit, "").split():
                    differences.append(unit)
                for other in sorted(names_in(part, "id")):
                    if other not in waiting and (other in KNOWN or hasattr(builtins, other)):
                        waiting.append(other)
    others = [unit for unit in dict.fromkeys(differences) if unit != "GPT.generate"]
    return ModelSource(path, others,
                       edits_generate="GPT.generate" in differences,
                       gelu="tanh" if "new_gelu" in waiting else "none",
                       drops_while_sampling=DROPS_WHILE_SAMPLING in found)


def units(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The units that a name is bound to, but for a known import.

    Of the class GPT, only the methods that forward uses, or that torch calls.
    """
    if isinstance(value, str):
        if KNOWN.get(name) != value:
            yield name if name in KNOWN else value, value
    elif name == "*" or not isinstance(value, ast.FunctionDef | ast.ClassDef):
        yield f"line {value.lineno}", value
    elif name == "GPTConfig":
        fields = ast.Assign | ast.AnnAssign
        yield name, [part for part in value.body if not isinstance(part, fields)]
    elif name != "GPT" or isinstance(value, ast.FunctionDef):
        yield name, value
    else:
        methods = {part.name: part for part in value.body if isinstance(part, ast.FunctionDef)}
        others = [part for part in value.body if not isinstance(part, ast.FunctionDef)]
        yield name, [value.bases, value.keywords, value.decorator_list, others]
        waiting = [method for method in methods
                   if method == "generate" or hasattr(torch.nn.Module, method)]
        for method in waiting: # it grows
            yield f"GPT.{method}", methods[method]
            if method != "generate": # nothing calls it
                used = names_in(methods[method], "attr") & methods.keys()
                waiting += sorted(used.difference(waiting))


def names_in(part: Any, kind: str) -> set[str]:
    """The names that a part of a tree uses, but for what is inert: kind is id, or attr for those of
    attributes.
    """
    waiting = [ast.Tuple(part if isinstance(part, list) else [part])]
    for node in waiting: # it grows
        waiting += [child for child in ast.iter_child_nodes(node) if not is_inert(child)]
    return {getattr(node, kind) for node in waiting if hasattr(node, kind)}


def canonical(part: Any) -> str:
    """A part of a tree as text, without annotations and what is inert: unlike that of ast.dump, the
    same in all versions of Python.
    """
    if isinstance(part, list):
        return f"[{' '.join(canonical(item) for item in part if not is_inert(item))}]"
    if isinstance(part, ast.AnnAssign):
        part = ast.Assign([part.target], part.value)
    if not isinstance(part, ast.AST):
        return repr(part)
    skipped = "annotation", "ctx", "kind", "returns", "type_comment", "type_params"
    text = type(part).__name__
    for name, value in ast.iter_fields(part):
        shown = canonical(value)
        if name not in skipped and shown not in ("None", "[]"):
            text += f" {name}={shown}"
    return f"({text})"
