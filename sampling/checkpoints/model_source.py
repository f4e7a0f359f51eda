"""Reads a model.py as data, without running it: is its GPT nanoGPT's own?

nanoGPT is there to be edited, and an edit that adds no tensor leaves no trace in a ckpt.pt. So the
model.py near it may contain nanoGPT's units, the functions and classes that decide the logits, in a
version since 2023-01-27, and what cannot change them: imports of torch, numpy and Python's own
modules, constants, a __main__ block, and definitions that do nothing when made. All else differs.
"""
import ast
import builtins
import hashlib
import logging
import re
import sys
from collections.abc import Iterator, Set
from copy import copy
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from torch import nn

from sampling.checkpoints.untrusted_files import UNREADABLE, parse_python

logger = logging.getLogger(__name__)
NANOGPT = "nanogpt" # the value of model_file that stands for nanoGPT's own model.py
# Unit -> digests of nanoGPT's versions, the newest first, and of this project's model.py.
# Name that a unit uses -> what it must be imported from.
KNOWN = {
    "GPT": "1a737dec", # the bases, and what the body has besides methods
    "GPT.__init__": "fd053045 f9099afc 520e47ea 33752856 42bd552c 3cad6b78",
    "GPT._init_weights": "ed6338ff ad8e96c9 f8f207bf",
    "GPT.init_weights": "433141da",
    "GPT.get_num_params": "c0e48713",
    "GPT.forward": "ed71f75e f0a420f8 a054596a",
    "GPT.new_cache": "63a4c546", # it and its parts are called by this project's generate
    "KVCache": "fb1c2ba2",
    "linear_dtype": "9ad1e4aa",
    "GPTConfig": "6fe92b15", # what its body has besides FIELD
    "Block": "a50d843b ddb391eb 77f68195 d968b919 b2834907",
    "CausalSelfAttention":
        "c71290d8 df9218ca a1bb4dad cb6caeb6 c4f29147 74755b6c 00d97994 6e73700c",
    "LayerNorm": "90e26e18 0334b29e",
    "LayerNormNoBias": "c7759c7d",
    "MLP": "f0bc925a a7722f6f bbd012c0 63a7e4d2 4d428e31",
    "new_gelu": "0476ae3e", # the tanh form, which nanoGPT had until June 2023
    "F": "torch.nn.functional", "dataclass": "dataclasses.dataclass", "math": "math",
    "nn": "torch.nn", "torch": "torch",
}
LOOPS = {"3ad788ef", "257eec9c"} # of GPT.generate, which is never called
# Attention as it was for some weeks until April 2023.
DROPS_WHILE_SAMPLING = "df9218ca"
# The fields of GPTConfig. Every ckpt.pt names nanoGPT's, so their defaults may differ.
FIELD = re.compile(r"(block_size|vocab_size|n_layer|n_head|n_embd): int( = \d+)?"
                   r"|dropout: float( = [\d.]+)?|bias: bool( = (True|False))?"
                   r"|gelu: str = 'none'|n_inner: int \| None = None"
                   r"|layer_norm_epsilon: float = 1e-05|tie_word_embeddings: bool = True")
# What a file may import.
MODULES = {"torch", "numpy", *sys.stdlib_module_names}
# Special methods that need an instance of their class to run.
OF_INSTANCES = {"__init__", "__call__", "__getitem__", "__len__", "__repr__"}
# What nanoGPT's methods, and torch, may use of a GPT.
USED = {*dir(nn.Module), *OF_INSTANCES, "config", "transformer", "lm_head"}
DECORATORS = {"classmethod", "staticmethod", "torch.no_grad()", "torch.inference_mode()"}
# What calls nothing: operators do not, as there are no metaclasses and no objects of the file.
INERT = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Pass, ast.arguments, ast.arg, ast.Constant,
         ast.Attribute, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.unaryop,
         ast.BinOp, ast.operator, ast.Load)


class ModelSource(NamedTuple):
    """What a model.py shows."""
    path: Path
    differences: list[str] # what it may not contain
    gelu: str = "none" # the form of GELU that its MLP has, as in F.gelu
    edits_generate: bool = False # such an edit changes no logits
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
                f"if the checkpoint was trained with it, pass model_file={quote(str(path))}, "
                f"which runs it; if with nanoGPT's own, pass model_file={NANOGPT}")


def read_source(path: Path, root: Path | None = None) -> ModelSource:
    """What the file at path shows. root: the folder of the script that imports it, where no file
    may hide a module; None: its own.
    """
    try:
        hiding = {path.stem, *MODULES} - {"test"} # which Python may import for others, too
        source = compare(path, parse_python(path).body)
        for file in (root or path.parent).iterdir():
            is_package = any(file.glob("__init__.*"))
            is_module = is_package or file.suffix in (".py", ".pyc", ".so", ".pyd")
            is_other = file not in (path, *path.parents)
            if is_module and is_other and file.name.partition(".")[0] in hiding:
                source.differences.append(f"its neighbour {file.name}")
        return source
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        return ModelSource(path, [f"all, as it cannot be read: {reason:.200}"])


# ---- what it may contain

def compare(path: Path, body: list[ast.stmt]) -> ModelSource:
    """Compare the statements of a file with what it may contain."""
    bound: dict[str, Any] = {} # name -> the dotted name of an import, or the statement
    differences = []
    for node in body:
        for name, value in bindings_of(node):
            if value is None or bound.setdefault(name, value) != value:
                differences.append(name)
            elif isinstance(value, str):
                is_allowed = is_free(name) or KNOWN.get(name) == value
                if not is_allowed or value.partition(".")[0] not in MODULES:
                    differences.append(value)
            elif name in KNOWN:
                differences += edited_units(name, value)
            elif not is_inert(value, bound):
                differences.append(f"line {value.lineno}")
    differences += {"GPT"} - bound.keys()
    body = getattr(bound.get("GPT"), "body", [])
    loops = [part for part in body if getattr(part, "name", "") == "generate"]
    return ModelSource(
        path, list(dict.fromkeys(differences)),
        gelu="tanh" if "'new_gelu'" in canonical(bound.get("MLP")) else "none",
        edits_generate=any(digest(loop) not in LOOPS for loop in loops),
        drops_while_sampling=digest(bound.get("CausalSelfAttention")) == DROPS_WHILE_SAMPLING)


def bindings_of(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """The names that a statement binds, and to what; its line and None, if no file may have it."""
    match node:
        case ast.Expr(ast.Constant()): # such as a docstring
            return
        case ast.If(orelse=[]) if ast.unparse(node.test) == "__name__ == '__main__'":
            return
        case ast.Import() | ast.ImportFrom():
            origin = ""
            if isinstance(node, ast.ImportFrom):
                origin = f"{'.' * node.level}{node.module or ''}."
            for alias in node.names:
                # "import a.b" binds a. A name after "from a import" has no dot.
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or name, origin + name
        case ast.FunctionDef(name) | ast.ClassDef(name):
            yield name, node
        case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
            yield name, node
        case _:
            yield f"line {node.lineno}", None


def edited_units(name: str, node: ast.stmt) -> Iterator[str]:
    """The units that are not nanoGPT's in the statement that binds the name of one."""
    rest = copy(node)
    rest.body = []
    parts = [(name, rest)]
    for part in getattr(node, "body", []):
        if name == "GPT" and isinstance(part, ast.FunctionDef):
            unit = f"GPT.{part.name}"
            is_idle = unit not in KNOWN and part.name not in USED
            if not (is_idle and is_inert(part, {}, DECORATORS)):
                parts.append((unit, part))
        elif not (name == "GPTConfig" and FIELD.fullmatch(ast.unparse(part))):
            rest.body.append(part)
    for unit, part in parts:
        if digest(part) not in KNOWN.get(unit, "").split():
            yield unit


def is_free(name: str) -> bool:
    """Whether a file may bind a name to what it likes: no unit uses it, nor does Python."""
    is_used = name in KNOWN or hasattr(builtins, name) or name.startswith("__")
    return name in OF_INSTANCES or (name.isidentifier() and not is_used) # an import may bind *


def is_inert(node: ast.AST, bound: dict[str, Any], decorators: Set[str] = frozenset()) -> bool:
    """Whether a definition or a value calls nothing when it is made, and binds free names only."""
    waiting = [node]
    for part in waiting: # it grows
        children = ast.iter_child_nodes(part)
        match part:
            case ast.FunctionDef(name): # its body does not run
                given = {*map(ast.unparse, part.decorator_list)}
                is_allowed = is_free(name) and given <= decorators
                children = [part.args, part.returns, *getattr(part, "type_params", [])]
            case ast.ClassDef(name):
                is_allowed = part is node and is_free(name) and not part.decorator_list
                for base in {*map(ast.unparse, part.bases)} - {"nn.Module"}:
                    is_allowed = is_allowed and isinstance(bound.get(base), ast.ClassDef)
            case ast.Subscript(value): # another one may run code, as ctypes.pydll["x.so"] does
                is_allowed = ast.unparse(value) in ("dict", "list", "set", "tuple", "type")
            case ast.Mod(): # "%(x.so)s" % ctypes.pydll is such a subscript, too
                is_allowed = False
            case ast.Name(name):
                is_allowed = isinstance(part.ctx, ast.Load) or is_free(name)
                children = []
            case _:
                is_allowed = isinstance(part, INERT)
        if not is_allowed:
            return False
        waiting += filter(None, children)
    return True


# ---- what it is compared with

def digest(part: Any) -> str:
    return hashlib.sha256(canonical(part).encode()).hexdigest()[:8]


def canonical(part: Any) -> str:
    """A part of a tree as text, without docstrings and inert annotations: unlike that of ast.dump,
    the same in all versions of Python.
    """
    match part:
        case list():
            return f"[{' '.join(filter(None, map(canonical, part)))}]"
        case ast.Expr(ast.Constant()):
            return ""
        case ast.AnnAssign():
            part = ast.Assign([part.target], part.value)
    if not isinstance(part, ast.AST):
        return repr(part)
    text = type(part).__name__
    skipped = "ctx", "kind", "type_comment"
    for name, value in ast.iter_fields(part):
        is_annotation = name in ("annotation", "returns") and value and is_inert(value, {})
        shown = canonical(value)
        if shown not in ("None", "[]") and not is_annotation and name not in skipped:
            text += f" {name}={shown}"
    return f"({text})"
