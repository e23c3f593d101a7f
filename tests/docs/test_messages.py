"""Messages that the pages quote are those that the program prints: their literal parts occur in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs").glob("*/*.md"))
_HEADING = "## What can go wrong"
_FEWEST = 40
"""A page that paraphrases its messages instead of quoting them would pass the other test."""


def quoted_messages(page: Path) -> list[str]:
    """The texts in double quotes in the first column of a page's table of messages; `...` stands for a value."""
    section = page.read_text().partition(_HEADING)[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    # quotation marks inside of code belong to a config
    return [text for cell in cells for text in re.findall(r'"([^"]+)"', re.sub(r"`[^`]*\"[^`]*`", "", cell))]


@cache
def source_text() -> str:
    """All string literals of the source, without docstrings, one a line; values in f-strings become a line break."""
    folders = (ROOT / name for name in ("headrace", "foundation", "data_prep", "pipeline", "examples"))
    trees = [ast.parse(file.read_text()) for folder in folders for file in sorted(folder.rglob("*.py"))]
    return "\n".join(line for tree in trees for line in _literals(tree))


def _literals(tree: ast.AST) -> list[str]:
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    joined = [_joined(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    return [node.value for node in found if isinstance(node.value, str)] + joined


def _joined(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)


def test_quoted_messages_occur_in_the_source() -> None:
    quoted = [(page, message) for page in PAGES for message in quoted_messages(page)]
    assert len(quoted) >= _FEWEST
    for page, message in quoted:
        parts = [part.strip(" ,:()") for part in message.split("...")]
        assert max(map(len, parts)) > 5, f"{page.name}: '{message}' has no literal part to look for"
        absent = [part for part in parts if part not in source_text()]
        assert not absent, f"{page.name} quotes '{message}', and no message has '{absent[0]}'"


def test_every_table_of_messages_quotes_one() -> None:
    """A table whose first column is headed `message` has at least one real message to search for."""
    tables = [page for page in PAGES if f"{_HEADING}\n\n| message |" in page.read_text()]
    assert tables
    assert [page.name for page in tables if not quoted_messages(page)] == []
