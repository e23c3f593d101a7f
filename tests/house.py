"""Measures how much of the house one has to hold, and its weight: `python -m tests.house [--tree DIRECTORY]`.

A room is a first-level package or module of pipeline/; the entry points are rooms, `__main__` is none. An arrow goes
from a room to one that it imports, within functions too. A floor is a place in the longest chain of arrows.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pipeline"
PRODUCT = ("headrace", "foundation", "data_prep", PACKAGE)


@dataclass(frozen=True)
class House:
    """What was counted: rooms, their arrows ("module -> module"), floors from 1 (empty in a circle)."""

    rooms: frozenset[str]
    arrows: Mapping[tuple[str, str], str]
    floors: Mapping[str, int]

    def upward(self, layers: list[list[str]]) -> dict[tuple[str, str], str]:
        """The arrows to a layer that is not below, with layers as in the contract, top first."""
        place = {room: number for number, layer in enumerate(layers) for room in layer}
        return {(a, b): what for (a, b), what in self.arrows.items() if place.get(b, 0) <= place.get(a, 0)}


def measure(tree: Path = ROOT) -> House:
    sources = {_name(path.relative_to(tree)): ast.parse(path.read_text()) for path in (tree / PACKAGE).rglob("*.py")}
    arrows: dict[tuple[str, str], str] = {}
    for module, source in sorted(sources.items()):
        for imported in _imports(source, sources.keys()):
            ends = _room(module), _room(imported)
            if all(ends) and ends[0] != ends[1]:
                arrows.setdefault(ends, f"{module} -> {imported}")
    rooms = frozenset(filter(None, map(_room, sources)))
    return House(rooms, arrows, _floors(rooms, arrows))


def contract(tree: Path = ROOT) -> list[list[str]]:
    """The layers of the package in pyproject.toml, top first."""
    contracts = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each.get("containers") == [PACKAGE])
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str) -> str:
    room = module.partition(".")[2].partition(".")[0]
    return "" if room == "__main__" else room


def _imports(source: ast.Module, modules: object) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]  # type: ignore[operator]
        else:
            continue
        yield from (name for name in names if name in modules)  # type: ignore[operator]


def _floors(rooms: frozenset[str], arrows: Mapping[tuple[str, str], str]) -> dict[str, int]:
    below = {room: {b for a, b in arrows if a == room} for room in rooms}
    floors: dict[str, int] = {}
    try:
        for room in graphlib.TopologicalSorter(below).static_order():
            floors[room] = 1 + max((floors[each] for each in below[room]), default=0)
    except graphlib.CycleError:
        return {}
    return floors


def weight(tree: Path = ROOT) -> dict[str, int]:
    """The figures that `[weight]` of tests/budget.toml limits, counted over the files in git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True).stdout
    files = [path for each in listed.split("\0") if (path := tree / each).is_file()]
    texts = {path.relative_to(tree): path.read_text() for path in files if path.suffix in (".py", ".md")}
    product = {path.parent.name for path in tree.glob("*/__init__.py")} - {"tests"}
    return {
        "product_code_lines": sum(code_lines(text) for path, text in texts.items() if _is(path, ".py", *product)),
        "test_lines": sum(len(text.splitlines()) for path, text in texts.items() if _is(path, ".py", "tests")),
        "files": len(files),
        "doc_words": sum(len(text.split()) for path, text in texts.items() if _is(path, ".md", "docs")),
    }


def _is(path: Path, suffix: str, *folders: str) -> bool:
    return path.suffix == suffix and path.parts[0] in folders


def code_lines(text: str) -> int:
    """Lines of a module that are no docstring, import, comment or blank line."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant()) | ast.Import() | ast.ImportFrom():
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def classes_defined_twice(tree: Path = ROOT) -> dict[str, list[str]]:
    """Name of a class, without its underscore -> the files of the product that define it, where there are several."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in (path for package in PRODUCT for path in (tree / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].append(str(path.relative_to(tree)))
    return {name: found for name, found in files.items() if len(found) > 1}


def takers_of_the_run(tree: Path) -> int:
    """Files of the package in which a function takes the whole config or the resolved run."""
    return sum(
        any(
            isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) in ("ResolvedRun", "Config")
            for node in ast.walk(ast.parse(path.read_text()))
        )
        for path in (tree / PACKAGE).rglob("*.py")
    )


def imported_modules(tree: Path, module: str = "pipeline.run.session") -> tuple[int, int]:
    """Modules that a rank's main module imports: all, and those of this project."""
    code = f"import sys, {module}; print(len(sys.modules), sum(n.startswith('pipeline.') for n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    total, own = done.stdout.split()[-2:]
    return int(total), int(own)


def main() -> int:
    """Prints the table; 1 where the repository weighs more than `[weight]` allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    tree = parser.parse_args().tree.resolve()
    house = measure(tree)
    total, own = imported_modules(tree)
    rows = {
        "rooms of pipeline/": len(house.rooms),
        "arrows": len(house.arrows),
        "floors": max(house.floors.values(), default=0),
        "arrows upward": len(house.upward(contract(tree))),
        "layers of the contract": len(contract(tree)),
        "class names defined more than once": len(classes_defined_twice(tree)),
        "files that take the whole config or run": takers_of_the_run(tree),
        "modules that pipeline.run.session imports (of pipeline)": f"{total:,} ({own})",
    }
    allowed = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["weight"]
    found = weight(tree)
    rows |= {name.replace("_", " "): f"{figure:,} of {allowed[name]:,}" for name, figure in found.items()}
    print("| measured | |\n|---|---|")
    for what, figure in rows.items():
        print(f"| {what} | {figure} |")
    over = [name for name, figure in found.items() if figure > allowed[name]]
    if over:
        why = "take as much off, or raise it there with the reason"
        print(f"error: {', '.join(over)}: more than [weight] of tests/budget.toml allows; {why}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
