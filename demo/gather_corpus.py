"""Writes the part of the demo's corpus that has to be dug out: the READMEs and docstrings of what is installed.

    python demo/gather_corpus.py out/demo/corpus

makes `readmes.jsonl.gz` (one document per installed distribution) and `docstrings.jsonl.zst` (one per module, its
docstrings in order). The standard library's source is read where it lies, by demo/corpus.json. No network is used, and
the same installation gives the same bytes.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import zstandard

DOCSTRING_BYTES = 6_000_000
"""Enough text for the demo's tokens several times over; a full installation has ten times that."""


def readmes() -> Iterator[dict[str, str]]:
    """The long description of every installed distribution that has one, by name."""
    found = {}
    for distribution in distributions():
        text = distribution.metadata.get_payload() or distribution.metadata.get("Description")
        if isinstance(text, str) and len(text) > 200:
            found[distribution.metadata["Name"]] = text
    for name in sorted(found):
        yield {"id": f"readme/{name}", "text": found[name].encode("utf-8", "replace").decode()}


def docstrings() -> Iterator[dict[str, str]]:
    """The docstrings of installed modules, in an order that is a hash of the path, up to `DOCSTRING_BYTES`."""
    root = Path(sysconfig.get_paths()["purelib"])
    paths = sorted(root.rglob("*.py"), key=lambda p: hashlib.sha256(str(p.relative_to(root)).encode()).digest())
    left = DOCSTRING_BYTES
    for path in paths:
        text = "\n\n".join(_docstrings_of(path))
        if len(text) < 500:
            continue
        yield {"id": f"docstrings/{path.relative_to(root)}", "text": text}
        left -= len(text.encode())
        if left < 0:
            return


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and "\n" in text:
                yield text.encode("utf-8", "replace").decode()


def _jsonl(documents: Iterable[dict[str, str]]) -> bytes:
    return "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode()


def main(out: Path) -> None:
    """Writes both files; each gets its name when it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    packed = {
        "readmes.jsonl.gz": gzip.compress(_jsonl(readmes()), mtime=0),
        "docstrings.jsonl.zst": zstandard.compress(_jsonl(docstrings())),
    }
    for name, data in packed.items():
        partial = out / f".{name}.partial"
        partial.write_bytes(data)
        partial.replace(out / name)
        print(f"{out / name}: {len(data) / 1e6:.1f} MB packed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
