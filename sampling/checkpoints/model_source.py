"""Reads a model.py as data, without running it: does its GPT compute what nanoGPT's own does?

nanoGPT is there to be edited, and an edit that adds no tensor leaves no trace in a ckpt.pt. So the model.py near a
checkpoint is parsed. Its units, the functions and classes that decide the logits, are compared one by one with those of
all versions of nanoGPT since January 2023: by digests of their syntax trees, without what changes no logits (comments,
docstrings, annotations, assert, print).
"""
import ast
import builtins
import hashlib
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from sampling import model as this_model

logger = logging.getLogger(__name__)
CONSENT = "if the code of its model was edited, pass --model_file with that model.py, which is run"
NANOGPT = "nanogpt" # the value of model_file that stands for nanoGPT's own model.py
MAX_SOURCE_BYTES = 2**20
KNOWN = { # unit -> digests: of nanoGPT's versions, the newest first, and of this project's model.py; imports -> what
    "GPT": "2dd0a542", # its bases, and what its body has besides methods
    "GPT.__init__": "2f124ded 0b057bf0 1c4b4ddb 2728835d 1a6b09c1 3cad6b78",
    "GPT._init_weights": "ed6338ff ad8e96c9 f8f207bf",
    "GPT.init_weights": "433141da",
    "GPT.forward": "0bf54c61 3bb6c019 b5b28adf",
    "GPT.generate": "3ad788ef df5fcff1",
    "GPTConfig": "4f53cda1", # what its body has besides fields
    "Block": "a50d843b ddb391eb 77f68195 d968b919 b2834907",
    "CausalSelfAttention": "a2e797b0 64f8f9a8 8fac24ab a8c30d8b 6582d110 42addc62 ee139506",
    "LayerNorm": "90e26e18 0334b29e",
    "LayerNormNoBias": "c7759c7d",
    "MLP": "f0bc925a a7722f6f bbd012c0 63a7e4d2 4d428e31",
    "new_gelu": "0476ae3e", # the tanh form, which nanoGPT had until June 2023
    "F": "torch.nn.functional", "math": "math", "nn": "torch.nn", "torch": "torch",
}
DROPS_WHILE_SAMPLING = "64f8f9a8" # attention as it was for some weeks until April 2023
HARMLESS = "warnings", "logging", "sys", "os" # modules that a file may call while it is imported


class ModelSource(NamedTuple):
    """What a model.py shows."""
    path: Path
    differences: list[str] # the units that are not nanoGPT's
    edits_generate: bool = False # which changes no logits
    gelu: str = "none" # as in GPTConfig
    drops_while_sampling: bool = False # unless its dropout is 0

    def warn_of_generate(self) -> None:
        """Say so if its loop is not nanoGPT's: it is never called."""
        if self.edits_generate:
            logger.warning(f"{self.path}: its generate was edited, and is not called: nanoGPT's own loop samples")

    def reject(self, differences: list[str]) -> None:
        """Raises ValueError if there are differences."""
        if differences:
            raise ValueError(f"{self.path} is not nanoGPT's model.py (it differs in {', '.join(differences):.300}); if "
                             f"the checkpoint was trained with it, pass --model_file={quote(str(self.path))}, which "
                             f"runs it; if with nanoGPT's own, pass --model_file={NANOGPT}")


def is_edited() -> bool:
    """Whether the model.py of this project computes something else than as it was released."""
    source = read_source(Path(this_model.__file__))
    return source is None or bool(source.differences)


def require_unedited() -> None:
    """Raises ValueError if the model.py of this project was edited: not all backends would follow the edit."""
    if is_edited():
        path = this_model.__file__
        raise ValueError(f"{path}, the model.py of this project, was edited: restore it (git checkout model.py), or, "
                         f"for a ckpt.pt, pass --model_file={quote(path)}, which runs it")


def find_source(checkpoint: Path) -> ModelSource:
    """The model.py that belongs to a ckpt.pt: in its folder, in the parent of that, or in the working directory if the
    file lies in it; nanoGPT's newest if no file there has a class GPT. Raises ValueError if it is edited.
    """
    files = Path(os.path.abspath(checkpoint)), checkpoint.resolve() # which is elsewhere if one is a link
    places = [folder for file in files for folder in file.parents[:2]]
    if Path.cwd() in (*files[0].parents, *files[1].parents):
        places.append(Path.cwd())
    for path in [place / "model.py" for place in dict.fromkeys(places)]:
        source = read_source(path) if path.is_file() else None
        if source:
            source.reject(source.differences)
            source.warn_of_generate()
            if source.gelu == "tanh":
                logger.info(f"{path} is nanoGPT's from before June 2023: using its GELU, the tanh form")
            return source
    return ModelSource(Path(NANOGPT), [])


def read_source(path: Path) -> ModelSource | None:
    """What the file at path shows; None if it has no class GPT."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SOURCE_BYTES + 1)
        if len(content) > MAX_SOURCE_BYTES:
            raise ValueError(f"more than {MAX_SOURCE_BYTES} bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore") # about unknown escapes
            bindings = find_bindings(Pruner().visit(ast.parse(content)).body)
        is_model = any(isinstance(value, ast.ClassDef) for value in bindings["GPT"])
        return compare(path, bindings) if is_model else None
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError) as error:
        return ModelSource(path, [f"all, as it cannot be read: {' '.join(str(error).split()):.100}"])


class Pruner(ast.NodeTransformer):
    """Removes statements that change no logits, and annotations from assignments."""

    def visit_Assert(self, node: ast.stmt) -> None:
        return None

    visit_Pass = visit_Assert

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_inert = isinstance(node.value, ast.Constant) or called(node) == "print"
        return None if is_inert else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return node.value and self.generic_visit(ast.Assign([node.target], node.value, lineno=node.lineno))


def called(node: ast.stmt) -> str | None:
    """The first name of a call that is a statement, such as torch in torch.manual_seed(1)."""
    function = getattr(getattr(node, "value", None), "func", None)
    while isinstance(function, ast.Attribute):
        function = function.value
    return getattr(function, "id", None)


def find_bindings(body: list[ast.stmt]) -> dict[str, list[Any]]:
    """What the statements of a module bind each name to: functions, classes, assignments, and imports as their dotted
    names. The name * has what could bind any name: imports of it, loops and calls.
    """
    bindings = defaultdict(list)
    for node in body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                bindings[node.name].append(node)
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    bindings[alias.asname or top].append(alias.name if alias.asname else top)
            case ast.ImportFrom():
                for alias in node.names:
                    bindings[alias.asname or alias.name].append(f"{node.module}.{alias.name}")
            case ast.Assign():
                for part in ast.walk(ast.Tuple(node.targets)):
                    bindings[getattr(part, "id", "")].append(node)
            case ast.If() | ast.Try():
                is_script = "__name__" in canonical(getattr(node, "test", None))
                handlers = [handler.body for handler in getattr(node, "handlers", [])]
                for part in [] if is_script else [node.body, *handlers, node.orelse, getattr(node, "finalbody", [])]:
                    for name, values in find_bindings(part).items():
                        bindings[name] += values
            case _ if called(node) not in HARMLESS:
                bindings["*"].append(node)
    return bindings


def compare(path: Path, bindings: dict[str, list[Any]]) -> ModelSource:
    """Compare the class GPT, and all that it uses, with what is known."""
    waiting, found, differences = ["*", "GPTConfig", "GPT"], set(), []
    for name in waiting: # it grows
        for unit, part in [pair for value in bindings.get(name, []) for pair in units(name, value)]:
            shown = fingerprint(part)
            found.add(shown)
            if shown not in KNOWN.get(unit, "").split():
                differences.append(unit)
            used = {node.id for node in walk(part) if isinstance(node, ast.Name)} - {*waiting}
            waiting += sorted(other for other in used if other in KNOWN or hasattr(builtins, other))
    others = [unit for unit in differences if unit != "GPT.generate"]
    gelu = "tanh" if "new_gelu" in waiting else "none"
    return ModelSource(path, others, len(others) < len(differences), gelu, DROPS_WHILE_SAMPLING in found)


def units(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The units that a name is bound to. Of the class GPT, only the methods that forward uses, or that torch calls."""
    if isinstance(value, str):
        yield name if name in KNOWN else value, value
    elif not isinstance(value, ast.FunctionDef | ast.ClassDef):
        yield f"line {value.lineno}", value
    elif name == "GPTConfig":
        yield name, [part for part in value.body if not isinstance(part, ast.Assign)]
    elif name != "GPT":
        yield name, value
    else:
        methods = {part.name: part for part in value.body if isinstance(part, ast.FunctionDef)}
        others = [part for part in value.body if not isinstance(part, ast.FunctionDef)]
        yield name, [value.bases, value.keywords, value.decorator_list, others]
        waiting = [method for method in methods if method == "forward" or hasattr(torch.nn.Module, method)]
        for method in waiting: # it grows
            yield f"GPT.{method}", methods[method]
            used = {node.attr for node in walk(methods[method]) if isinstance(node, ast.Attribute)}
            waiting += sorted(used & methods.keys() - {*waiting})
        if "generate" in methods:
            yield "GPT.generate", methods["generate"]


def walk(part: Any) -> Iterator[ast.AST]:
    for item in part if isinstance(part, list) else [part]:
        yield from ast.walk(item) if isinstance(item, ast.AST) else ()


def fingerprint(part: Any) -> str:
    """What KNOWN has of a unit: for an import the dotted name, otherwise a digest."""
    return part if isinstance(part, str) else hashlib.sha256(canonical(part).encode()).hexdigest()[:8]


def canonical(part: Any) -> str:
    """A part of a tree as text, without annotations: unlike that of ast.dump, the same in all versions of Python."""
    if isinstance(part, list):
        return f"[{' '.join(map(canonical, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    skipped = "annotation", "ctx", "kind", "returns", "type_comment", "type_params"
    fields = [f" {name}={canonical(value)}" for name, value in ast.iter_fields(part)
              if name not in skipped and value not in (None, [])]
    return f"({type(part).__name__}{''.join(fields)})"
