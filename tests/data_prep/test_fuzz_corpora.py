"""Fuzz: whatever lies in a corpus, a whole job ends in a result or in a `HeadraceError`; no traceback, no hang."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.directory import read_manifest, verify
from foundation.errors import HeadraceError
from tests.data_prep.in_process import run_job

TEXTS = st.text(max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "id", "role"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ODD_LINES = st.sampled_from(
    [
        b"",
        b" \r",
        b"\x00",
        b"\x00" * 3000,
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        b"null",
        b"[" * 2000 + b"]" * 2000,
        b'{"text": ' * 1500,
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "text": 1}',
        b'{"text": "a", "id": 1' + b"0" * 400 + b"}",
        b'{"text": 1e999}',
        b'{"text": "cut',
        b'{"text": "' + b"long " * 700 + b'"}',
        '{"text": "é"}'.encode("latin-1"),
        '{"text": "é"}'.encode("utf-16"),
    ]
)
LINES = st.one_of(
    st.builds(lambda text: json.dumps({"text": text, "id": text}).encode(), TEXTS),
    st.builds(lambda value: json.dumps(value).encode(), VALUES),
    ODD_LINES,
    st.binary(max_size=40),
)
JSONL = st.lists(LINES, max_size=20).map(b"\n".join)
TABLES = st.tuples(
    *(st.lists(st.none() | TEXTS, max_size=12), st.booleans(), st.sampled_from(["string", "binary", "twice", "int"])),
    st.integers(1, 5),
).map(lambda values: _parquet(*values))
NAMES = st.one_of(
    st.sampled_from(
        ["a b", "-rf", "*", "[1]", "é\u0301", "\n", "..x", "a" * 180, "\udcff", "~", "node_modules/x", ".h/x", "d/e"]
    ),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=6),
)
SUFFIXES = st.sampled_from(
    [".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".txt", ".md", ".parquet", ".json", ".bz2", ""]
)
PATHS = st.sampled_from(
    ["data", "data/*", "data/**", "data/**/*.jsonl", "data/**/*", "data/[", "data/*.txt", "data/pipe.jsonl"]
)
KINDS = st.sampled_from([None, None, "text", "jsonl", "parquet", "datasets"])


def _parquet(texts: list[str | None], ids: bool, kind: str, rows: int) -> bytes:
    """A parquet file: with a column of ids, with the text as another type, or with two columns of its name."""
    values: Any = texts
    if kind == "binary":
        values = [None if text is None else text.encode() for text in texts]
    elif kind == "int":
        values = [None if text is None else len(text) for text in texts]
    column = pa.array(values, {"binary": pa.binary(), "int": pa.int64()}.get(kind, pa.string()))
    columns = [("text", column)] + [("text", column)] * (kind == "twice")
    columns += [("id", pa.array(range(len(texts))))] if ids else []
    file = io.BytesIO()
    pq.write_table(pa.table([c for _, c in columns], names=[n for n, _ in columns]), file, row_group_size=rows)
    return file.getvalue()


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A name and content: of its suffix or of another one, whole, cut off, or with a byte changed."""
    name, suffix = draw(NAMES), draw(SUFFIXES)
    content = draw(TABLES if suffix == ".parquet" and draw(st.booleans()) else JSONL)
    if suffix.endswith((".gz", ".zst")) and draw(st.integers(0, 5)):
        content = gzip.compress(content, mtime=0) if suffix.endswith(".gz") else zstandard.compress(content)
    damage = draw(st.sampled_from(["none", "none", "cut", "flip", "twice"]))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if damage == "cut":
        content = content[:at]
    elif damage == "flip" and content:
        content = content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]
    elif damage == "twice":
        content += content
    return name + suffix, content


ODDITIES = ("loop", "up", "dangling", "pipe", "socket", "device", "folder", "hard", "unreadable", "self")


def _add_oddity(kind: str, data: Path) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "loop": lambda: (data / "loop").symlink_to("."),
        "up": lambda: (data / "up.jsonl").symlink_to(".."),
        "self": lambda: (data / "self.jsonl").symlink_to("self.jsonl"),
        "dangling": lambda: (data / "gone.txt").symlink_to("nowhere"),
        "pipe": lambda: os.mkfifo(data / "pipe.jsonl"),
        "socket": lambda: _bind(data / "socket.txt"),
        "device": lambda: (data / "zero.txt").symlink_to("/dev/zero"),
        "folder": (data / "folder.jsonl").mkdir,
        "hard": lambda: os.link(next(p for p in data.iterdir() if p.is_file()), data / "hard.jsonl"),
        "unreadable": lambda: (data / "secret.txt").touch(mode=0),
    }
    makers[kind]()


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


CORPORA = st.fixed_dictionaries(
    {
        "files": st.lists(files(), max_size=5),
        "oddities": st.sets(st.sampled_from(ODDITIES), max_size=4),
        "source": st.fixed_dictionaries(
            {"path": PATHS, "type": KINDS},
            optional={
                "id_field": st.just("id"),
                "text_field": st.sampled_from(["id", "body"]),
                "messages_field": st.just("text"),
                "include": st.sampled_from([["*"], ["*.txt"], ["["]]),
            },
        ),
        "fields": st.fixed_dictionaries(
            {"max_bad_records": st.sampled_from([0, 1000]), "max_bad_files": st.sampled_from([0, 10])},
            optional={
                "task_bytes": st.integers(1, 3000),
                "max_record_bytes": st.integers(1, 200),
                "clean": st.just([{"step": "unicode"}, {"step": "gopher_repetition"}]),
                "dedup": st.sampled_from([{"exact": True}, {"near": {}}, {"lines": {}}]),
                "list_dropped": st.just("texts"),
            },
        ),
        "healthy": st.booleans(),
    }
)


def _write(data: Path, corpus: dict[str, Any]) -> None:
    data.mkdir()
    for name, content in corpus["files"]:
        path = data / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError:  # a name that this file system does not take, or a file where a directory should be
            continue
    for kind in sorted(corpus["oddities"]):
        try:
            _add_oddity(kind, data)
        except (OSError, StopIteration):
            continue


def _run(corpus: dict[str, Any]) -> None:
    """Runs the job in an empty directory; asserts that a result is complete and an error leaves none."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        work = Path(folder)
        patch.chdir(work)
        _write(work / "data", corpus)
        sources = [{k: v for k, v in corpus["source"].items() if v is not None}]
        if corpus["healthy"]:  # so that the job gets beyond the splits' check
            (work / "good.jsonl").write_text("".join(f'{{"text": "good text {i}"}}\n' for i in range(30)))
            sources.append({"path": "good.jsonl"})
        given = {"tokenizer": {"train": "bpe", "vocab_size": 300}, "heldout_fraction": 0.3, **corpus["fields"]}
        (work / "corpus.json").write_text(json.dumps({"output": "tokens", "sources": sources, **given}))
        try:
            run_job("corpus.json")
        except HeadraceError:
            assert not (work / "tokens").exists()
        else:
            assert all(good for _, good in verify(work / "tokens", read_manifest(work / "tokens", kind="tokens")))


FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=1500)


@FEW
@given(CORPORA)
def test_any_corpus_gives_a_result_or_an_error_that_says_why(corpus: dict[str, Any]) -> None:
    _run(corpus)


@pytest.mark.sweep
@MANY
@given(CORPORA)
def test_very_many_corpora_give_a_result_or_an_error_that_says_why(corpus: dict[str, Any]) -> None:
    _run(corpus)
