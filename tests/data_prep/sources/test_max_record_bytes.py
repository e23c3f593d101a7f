"""`max_record_bytes`: longer records are reported with their place and skipped, in bounded memory."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources import jsonl, lines
from data_prep.sources.bytesource import Digest
from tests.data_prep.sources.test_archives import read

LIMIT = 3 << 20
read_all = partial(read, task_bytes=1 << 40)


def line(size: int, mark: str = "x") -> bytes:
    return json.dumps({"text": mark * (size - 12)}).encode()


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_a_line_is_skipped_if_and_only_if_it_is_longer(
    size: int, suffix: str, extension: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported with its line number and byte offset, and the lines around it are read."""
    if not extension:
        monkeypatch.setattr(jsonl, "extension", None)
    content = b"\n".join([line(40, "a"), line(size, "b"), line(40, "c")]) + b"\n"
    packed = {"": content, ".gz": gzip.compress(content, 1), ".zst": zstandard.compress(content, 1)}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    texts, bad = read_all(path, limit=LIMIT)
    assert [text[0] for text in texts] == (["a", "c"] if size > LIMIT else ["a", "b", "c"])
    assert [record.place() for record in bad] == ([f"{path.name}:2"] if size > LIMIT else [])
    if bad:
        assert bad[0].reason == "record too long"
        assert bad[0].detail == f"{size:,} bytes from byte 41 on, max_record_bytes is {LIMIT:,}"


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(13, 200), st.integers(40, 2000), st.booleans())
def test_what_is_too_long_does_not_depend_on_units(seed: int, limit: int, task_bytes: int, newline: bool) -> None:
    """Also with limits and chunks that are small, so that a line ends and begins anywhere in the buffer."""
    rng = random.Random(seed)
    sizes = [rng.choice([13, 20, limit - 1, limit, limit + 1, 900]) for _ in range(rng.randrange(1, 30))]
    content = b"\n".join(line(max(13, size), "abc"[i % 3]) for i, size in enumerate(sizes)) + b"\n" * newline
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(lines, "_CHUNK_BYTES", rng.choice([16, 64, 1 << 20]))
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content)
        whole, parts = read_all(path, limit=limit), read_all(path, limit=limit, task_bytes=task_bytes)
    assert whole == parts
    assert len(whole[0]) == sum(max(13, size) <= limit for size in sizes)
    assert len(whole[1]) == sum(max(13, size) > limit for size in sizes)


def test_a_long_line_takes_bounded_memory(tmp_path: Path) -> None:
    """A line of 128 MiB is skipped within the buffer, twice the limit, and a decompressed piece."""
    path = tmp_path / "a.jsonl.zst"
    with zstandard.open(path, "wb") as file:
        for _ in range(128):
            file.write(bytes(random.Random(1).randbytes(1 << 16).hex().encode()) * 8)
        file.write(b"\n" + line(40, "c") + b"\n")
    tracemalloc.start()
    found = [entry[1] for entry in lines.blocks(str(path), 0, None, Digest(str(path), start=0, end=0), max_bytes=LIMIT)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[0] == lines.SkippedLine(128 << 20)
    assert peak < 64 << 20


def test_long_text_files_and_cells_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 60)
    pq.write_table(pa.table({"text": ["short", "é" * 60, "y" * 100]}), tmp_path / "a.parquet")
    assert read_all(tmp_path / "a.txt", limit=120) == (["é" * 60], [])
    texts, bad = read_all(tmp_path / "a.txt", limit=119)
    assert (texts, bad[0].reason, bad[0].place()) == ([], "record too long", "a.txt")
    texts, bad = read_all(tmp_path / "a.parquet", limit=119)
    assert texts == ["short", "y" * 100]
    assert (bad[0].reason, bad[0].place(), bad[0].detail) == (
        *("record too long", "a.parquet, row 1"),
        "120 bytes, max_record_bytes is 119",
    )


def test_a_parquet_page_with_a_flipped_bit_is_found_by_its_checksum(tmp_path: Path) -> None:
    """Plain pages of strings decode with almost any flipped bit: only the page checksum tells."""
    path, text = tmp_path / "a.parquet", "the quick brown fox"
    table = pa.table({"text": [f"{text} {i}" for i in range(50)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"brown fox 25")] ^= 1
    path.write_bytes(data)
    texts, bad = read_all(path, limit=None)
    assert texts == []
    assert [record.reason for record in bad] == ["damaged file"]
