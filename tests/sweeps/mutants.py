"""Mutants: small faults in the product code, drawn by a seed.

A mutant changes one node in the body of a function: a comparison's bound, an operator, a whole number by one, the order
of two arguments, or it leaves a statement out. Messages, text, annotations, assertions and waiting are left alone: no
test could tell such a mutant from the code.

A mutant's name is its function and what is changed in it, not its module or its line, and the draw orders mutants by a
hash of the seed and this name: a function that moves takes its mutants along, and an edit changes those of its own
lines, and a few that a new one displaces.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.sweeps.sweep import ROOT

SUBJECTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "batch arithmetic": (20, ("config/batch", "config/topology", "config/shares")),
    "schedule": (10, ("config/schedule",)),
    "data order": (30, ("data/*",)),
    "engines": (
        50,
        ("engines/*", "engines/deepspeed/*", "engines/torch_native/*", "engines/optim/*", "engines/parallel/*"),
    ),
    "reshard": (20, ("checkpoint/read_shards", "checkpoint/format/*", "checkpoint/write/*")),
    "checkpoint": (20, ("checkpoint/*", "checkpoint/memory/*", "checkpoint/export/*")),
    "data prep": (30, ("../data_prep/*", "../data_prep/*/*")),
    "quantization": (20, ("compress/quantization/*",)),
}
"""Subject -> number of its mutants, and its modules in pipeline/; a module of several subjects is the first one's."""
EQUIVALENT = {
    "_warmup_decay_lr: < -> <= in iteration < s.warmup [14e6284e]": "both formulas give the peak there",
    "RunWriter._reserve: > -> >= in self._used + more > len(self._ids) [9bfb9aea]": "an array keeps its size",
    "_move_to_front: > -> >= in left + _CHUNK_BYTES > len(buffer) [adfeb890]": "a buffer grows a chunk earlier",
    "_page_lock: leave out torch.ones(1, device=device) [8cf848a1]": "only a GPU runs it",
}
"""Name of a mutant that computes the same as the code on a CPU -> why; it is not drawn."""
_LEFT_ALONE = re.compile(r"/(__main__|command\w*|listing|report|fp8\w*|on_ray|on_spark|spacy_words|external)\.py$")
"""Modules that print, or whose tests need packages or devices that few machines have."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: Its function, and the change.
        kind: Kind of the change, one of `_CHANGES`.
        file: The module, relative to the root.
        start: The first byte of the module that is replaced.
        end: The byte after the last one that is replaced.
        new: Source text that takes their place.
    """

    name: str
    kind: str
    file: str
    start: int
    end: int
    new: str

    def applied(self, text: str) -> str:
        """The module's text with the fault."""
        source = text.encode()
        return (source[: self.start] + self.new.encode() + source[self.end :]).decode()


def drawn(*, seed: int = 0) -> dict[str, list[Mutant]]:
    """Subject -> its mutants: of every kind about as many, of swapped arguments half as many."""
    wanted = {
        subject: [each for each in found if each.name not in EQUIVALENT] for subject, found in all_mutants().items()
    }
    return {subject: _in_order(found, seed)[: SUBJECTS[subject][0]] for subject, found in wanted.items()}


@cache
def all_mutants() -> dict[str, list[Mutant]]:
    """Subject -> all mutants of its modules; of several that have one name, the first."""
    taken: set[Path] = set()
    found: dict[str, list[Mutant]] = {}
    for subject, (_, patterns) in SUBJECTS.items():
        paths = {path.resolve() for each in patterns for path in (ROOT / "pipeline").glob(f"{each}.py")} - taken
        taken |= paths
        by_name: dict[str, Mutant] = {}
        for path in sorted(path for path in paths if not _LEFT_ALONE.search(path.as_posix())):
            for mutant in mutants_of(path.read_text(), str(path.relative_to(ROOT))):
                by_name.setdefault(mutant.name, mutant)
        found[subject] = list(by_name.values())
    return found


def _in_order(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """Mutants in the order of the draw: one of every kind, then the next of every kind."""
    place: Counter[str] = Counter()
    turns: list[tuple[int, str, Mutant]] = []
    for mutant in sorted(mutants, key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode()).digest()):
        turns.append((place[mutant.kind], mutant.kind, mutant))
        place[mutant.kind] += 2 if mutant.kind == "arguments" else 1  # a type checker finds many of these
    return [mutant for *_, mutant in sorted(turns, key=lambda turn: turn[:2])]


def mutants_of(text: str, file: str) -> Iterator[Mutant]:
    """All mutants of a module."""
    starts = [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for function, body in _functions(ast.parse(text), ""):
        seen: Counter[str] = Counter()
        for node, around in _nodes(body):
            for kind, change in _CHANGES.items():
                if (found := change(node, around)) is None:
                    continue
                new, what = found
                seen[what] += 1
                start, end = (starts[line - 1] + column for line, column in _ends(node))
                yield Mutant(_name(function, what, seen[what]), kind, file, start, end, new)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Qualified names and bodies of the functions in a module; those that only make text are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            makes_text = child.returns is not None and ast.unparse(child.returns) == "str"
            if not makes_text and child.name not in ("main", "add_arguments"):
                yield f"{prefix}{child.name}", child.body
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _nodes(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes of a body that may be changed, and the node around each; a sign is a part of its number."""
    for statement in body:
        if not _is_silent(statement):
            yield statement, statement
            yield from _below(statement, statement)


def _below(node: ast.AST, around: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for child in [node.value] if isinstance(node, ast.AnnAssign) else ast.iter_child_nodes(node):
        if child is not None and not _is_silent(child):
            yield child, around
            yield from _below(child, around if isinstance(child, ast.UnaryOp) else child)


_SILENT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr, ast.expr_context)
_SAYING = re.compile(
    r"debug|info|warn\w*|error|exception|log|print|note|report|describe|add_argument|cast|isinstance|sleep|collect"
    r"|close|shutdown|empty_cache|synchronize|wait|join|manual_seed|\w*progress|\w*(Error|Warning)"
)
_TEXT_OR_LIMIT = re.compile(
    r"timeout\w*|\w+_s|indent|stacklevel|max\w*|buffer\w*|chunk\w*|limit|ndigits|why|remedy|hint|note|message|text"
)


def _is_silent(node: ast.AST) -> bool:
    """Whether no test has to notice a change within a node: text, messages, annotations, time limits, buffer sizes."""
    match node:
        case ast.Expr(value) | ast.Await(value):
            return _is_silent(value)
        case ast.Call():
            return bool(_SAYING.fullmatch(_called(node)))
        case ast.keyword(name) | ast.Assign([ast.Name(name)]) | ast.AugAssign(ast.Name(name)):
            return bool(_TEXT_OR_LIMIT.fullmatch(name or ""))
        case _:
            return isinstance(node, _SILENT) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_SYMMETRIC = re.compile(r"max\w*|min\w*|gcd|lcm|\w*equal|allclose|add|mul|\w+attr|union\w*|map|filter|suppress")
_OF_PATHS = re.compile(r"path|dir|folder|root|name|file|text|message|prefix|words?\b|['\"(\[]", re.IGNORECASE)
_OF_TIME = re.compile(r"monotonic|perf_counter|deadline|\bnow\b")
_Change = tuple[str, str] | None
"""The new source text, and what is changed, for the name."""


def _comparison(node: ast.AST, around: ast.AST) -> _Change:
    del around
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or _OF_TIME.search(ast.unparse(node)):
        return None
    if other := _COMPARISONS.get(type(node.ops[0])):
        return _replaced(node, ast.Compare(node.left, [other()], node.comparators))
    return None


def _operator(node: ast.AST, around: ast.AST) -> _Change:
    """Another operator; sums of texts and lists, and paths, are left alone: they would only fail to be computed."""
    del around
    if isinstance(node, ast.BoolOp):
        return _replaced(node, ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values))
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    sides = ast.unparse(node.left), ast.unparse(node.right)
    if isinstance(node.op, ast.Add | ast.Div) and any(_OF_PATHS.search(side) for side in sides):
        return None
    return _replaced(node, ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))


def _replaced(old: ast.expr, new: ast.expr) -> _Change:
    return f"({ast.unparse(new)})", f"{_sign(old)} -> {_sign(new)} in {ast.unparse(old)}"


def _sign(node: ast.AST) -> str:
    """The operator of an expression as text."""
    a = ast.Name("a")
    match node:
        case ast.Compare(ops=[op]):
            return ast.unparse(ast.Compare(a, [op], [a]))[2:-2]
        case ast.BoolOp(op):
            return ast.unparse(ast.BoolOp(op, [a, a]))[2:-2]
        case ast.BinOp(op=op):
            return ast.unparse(ast.BinOp(a, op, a))[2:-2]
    raise TypeError(node)


def _constant(node: ast.AST, around: ast.AST) -> _Change:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return None
    return str(node.value + 1), f"{node.value} -> {node.value + 1} in {_first_line(around)}"


def _arguments(node: ast.AST, around: ast.AST) -> _Change:
    """The first two arguments swapped, where both are values."""
    del around
    if not isinstance(node, ast.Call) or len(node.args) < 2 or _SYMMETRIC.fullmatch(_called(node)):
        return None
    first, second, *others = node.args
    values = (ast.Name, ast.Attribute, ast.Subscript)
    if not (isinstance(first, values) and isinstance(second, values)) or ast.dump(first) == ast.dump(second):
        return None
    new = ast.unparse(ast.Call(node.func, [second, first, *others], node.keywords))
    return new, f"swap {ast.unparse(first)} and {ast.unparse(second)} in {ast.unparse(node)}"


def _left_out(node: ast.AST, around: ast.AST) -> _Change:
    """Leaves out a call for its effect, an update, or a store to an attribute; a name would only be missing."""
    del around
    match node:
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            return "pass", f"leave out {_first_line(node)}"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            return "pass", f"leave out {_first_line(node)}"
    return None


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


_CHANGES: dict[str, Callable[[ast.AST, ast.AST], _Change]] = {
    "comparison": _comparison,
    "operator": _operator,
    "constant": _constant,
    "arguments": _arguments,
    "left out": _left_out,
}


def _name(function: str, what: str, number: int) -> str:
    """A short name, which a digest keeps apart from others."""
    digest = hashlib.sha256(f"{function} {what} {number}".encode()).hexdigest()[:8]
    return f"{function}: {textwrap.shorten(what, 100, placeholder=' ...')} [{digest}]"


def _ends(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
