"""Readers yield every document once, and every unreadable record with its position and reason."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config.corpus import Source
from data_prep.sources import bytesource, parquet
from data_prep.sources.listing import resolve
from data_prep.sources.read_unit import read_unit, unit_digest, wanted_fields
from data_prep.sources.records import BadRecord, TextBatch
from data_prep.sources.units import Unit, group, units
from foundation.errors import ConfigError, DataError


def planned(source: Source, task_bytes: int = 1 << 20) -> list[Unit]:
    return list(units([resolve(source, at="sources.0")], task_bytes=task_bytes))


class Document(NamedTuple):
    id: str
    text: str


def read(source: Source, task_bytes: int = 1 << 20) -> tuple[list[Document], list[BadRecord]]:
    documents: list[Document] = []
    bad: list[BadRecord] = []
    for unit in planned(source, task_bytes):
        for record in read_unit(unit, wanted_fields(source)):
            if isinstance(record, TextBatch):
                documents += documents_of(unit, record, source.id_field)
            else:
                bad.append(record)
    return documents, bad


def documents_of(unit: Unit, batch: TextBatch, id_field: str | None) -> list[Document]:
    if id_field:
        names = [f"{unit.source}/{fields[id_field]}" for fields in batch.fields]
    else:
        names = [f"{unit.source}/{unit.file}" + ("" if unit.type == "text" else f"#{at}") for at in batch.at]
    return [Document(name, text) for name, text in zip(names, batch.texts, strict=True)]


LINES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20)


@given(texts=LINES, task_bytes=st.integers(1, 200), last_newline=st.booleans(), blank=st.booleans())
@settings(max_examples=60, deadline=None)
def test_byte_ranges_read_every_line_of_a_jsonl_file_once(
    texts: list[str], task_bytes: int, last_newline: bool, blank: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    separator = "\n\r\n" if blank else "\n"
    path.write_text(separator.join(lines) + ("\n" if last_newline else ""), encoding="utf-8", newline="")
    source = Source(path=str(path))
    documents, bad = read(source, task_bytes)
    assert [d.text for d in documents] == texts
    assert not bad
    assert len({d.id for d in documents}) == len(texts)
    assert [d.id for d in documents] == [d.id for d in read(source)[0]]  # an id does not depend on the byte ranges


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_each_kind_of_bad_line_is_reported_with_its_line_and_reason(work: Path, suffix: str) -> None:
    rows = [
        b'{"text": "good"}',
        b"{not json",
        b'["a list"]',
        b'{"body": "other"}',
        b'{"text": 7}',
        b'{"text": "caf\xe9"}',
        b'{"text": "\\ud800"}',
        b"",
        b'{"text": "good too"}',
    ]
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    (work / f"a.jsonl{suffix}").write_bytes(compress(b"\n".join(rows)))
    for task_bytes in (1 << 20, 11):  # a plain file is read in byte ranges; line numbers are still the file's
        documents, bad = read(Source(path=f"a.jsonl{suffix}"), task_bytes)
        assert [d.text for d in documents] == ["good", "good too"]
        assert [(b.at, b.reason) for b in bad] == [
            (2, "not JSON"),
            (3, "not an object"),
            (4, "no text field"),
            (5, "text is not a string"),
            (6, "not UTF-8"),
            (7, "not JSON"),
        ]
        assert bad[0].place() == f"a.jsonl{suffix}:2"


def test_all_frames_and_members_of_a_compressed_file_are_read(work: Path) -> None:
    rows = [json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(4)]
    (work / "a.jsonl.zst").write_bytes(b"".join(zstandard.ZstdCompressor().compress(row) for row in rows))
    (work / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(row) for row in rows))
    for name in ("a.jsonl.zst", "a.jsonl.gz"):
        assert [d.text for d in read(Source(path=name))[0]] == [f"row {i}" for i in range(4)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.parquet"])
def test_a_file_truncated_anywhere_is_reported_as_damaged(work: Path, name: str) -> None:
    path = work / name
    rows = b"".join(json.dumps({"text": f"row {i} {i * 7919}"}).encode() + b"\n" for i in range(200))
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": [f"row {i}" for i in range(200)]}), path)
        whole = path.read_bytes()
    else:
        whole = compress[name.rsplit(".", 1)[1]](rows)
    for size in {0, 1, 5, len(whole) // 2, len(whole) - 9, len(whole) - 1}:
        path.write_bytes(whole[:size])
        documents, bad = read(Source(path=name, type="text" if ".txt" in name else None))
        assert [(b.reason, b.at) for b in bad] == [("damaged file", None)], size
        assert len(documents) <= 200


def jsonl_rows(count: int) -> list[str]:
    """Lines of about 70 bytes that do not compress well."""
    draw = random.Random(1)
    return [json.dumps({"text": f"row {i} {draw.randbytes(25).hex()}"}) + "\n" for i in range(count)]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_complete_records_of_a_truncated_file_are_kept(work: Path, suffix: str) -> None:
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}[suffix]
    for count, lost in (
        (10, 10 * (suffix == "zst")),
        (80_000, 2000),
    ):  # a zstd block of 128 KiB is decoded whole or not at all
        rows = jsonl_rows(count)
        (work / f"a.jsonl.{suffix}").write_bytes(compress("".join(rows).encode())[:-9])
        documents, bad = read(Source(path=f"a.jsonl.{suffix}"))
        assert [b.reason for b in bad] == ["damaged file"]
        assert len(documents) >= count - lost
        assert [d.text for d in documents] == [json.loads(row)["text"] for row in rows[: len(documents)]]


def test_records_before_the_damage_of_a_compressed_file_are_kept(work: Path) -> None:
    rows = jsonl_rows(20_000)
    stored = bytearray(gzip.compress("".join(rows).encode()))
    place = len(stored) * 3 // 4
    stored[place : place + 100] = bytes(100)
    (work / "a.jsonl.gz").write_bytes(stored)
    documents, bad = read(Source(path="a.jsonl.gz"))
    assert bad[-1].reason == "damaged file"  # deflate may decode some garbage before it fails
    # 15,000 are before the damage; a piece of 16 KiB holds 400
    assert [d.text for d in documents[:14_000]] == [json.loads(row)["text"] for row in rows[:14_000]]


def test_zeros_between_and_after_the_members_of_a_gzip_file_are_padding(work: Path) -> None:
    member = gzip.compress(b'{"text": "x"}\n')
    (work / "a.jsonl.gz").write_bytes(member + bytes(40_000) + member + bytes(512))
    documents, bad = read(Source(path="a.jsonl.gz"))
    assert [d.text for d in documents] == ["x", "x"]
    assert not bad
    (work / "a.jsonl.gz").write_bytes(member + b"not gzip")
    documents, bad = read(Source(path="a.jsonl.gz"))
    assert [d.text for d in documents] == ["x"]
    assert [b.reason for b in bad] == ["damaged file"]


def test_a_zstd_window_of_more_than_128_mib_is_supported(work: Path) -> None:
    line = b'{"text": "from far back"}\n'
    # RFC 8878: magic, no content size, window 2^(10 + 20) = 1 GiB (as --long=30), one last raw block
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, 20 << 3]) + (len(line) << 3 | 1).to_bytes(3, "little") + line
    (work / "a.jsonl.zst").write_bytes(frame)
    documents, bad = read(Source(path="a.jsonl.zst"))
    assert [d.text for d in documents] == ["from far back"]
    assert not bad


def test_the_time_to_read_a_long_line_is_linear_in_its_length(work: Path) -> None:
    (work / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (64 << 20) + b'"}\n{"text": "last"}\n')
    source = Source(path="a.jsonl")
    began = time.process_time()
    documents, _ = read(source, task_bytes=1 << 30)
    assert time.process_time() - began < 1.5  # 0.2 s; 3 s if the line is copied for every MiB read
    assert [len(d.text) for d in documents] == [64 << 20, 4]


def test_a_byte_range_within_an_earlier_line_reads_only_its_bytes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (16 << 20) + b'"}\n{"text": "last"}\n')
    source = Source(path="a.jsonl")
    parts = planned(source, task_bytes=4 << 20)
    read_bytes = 0
    original = bytesource.HashingReader.readinto

    def counted(self: bytesource.HashingReader, buffer: memoryview) -> int:
        nonlocal read_bytes
        count = original(self, buffer)
        read_bytes += count
        return count

    monkeypatch.setattr(bytesource.HashingReader, "readinto", counted)
    digest = unit_digest(parts[1])
    assert not list(read_unit(parts[1], wanted_fields(source), digest))
    size = parts[1].end - parts[1].start
    assert read_bytes <= size + (1 << 20)
    stored = (work / "a.jsonl").read_bytes()[parts[1].start : parts[1].end]
    assert digest.finish() == xxhash.xxh3_128_hexdigest(stored)
    assert [len(d.text) for d in read(source, task_bytes=4 << 20)[0]] == [16 << 20, 4]


@pytest.mark.parametrize("task_bytes", [1, 30_000, 1 << 30])
def test_a_damaged_page_costs_its_row_group_for_any_division_into_units(work: Path, task_bytes: int) -> None:
    texts = [f"row {i} {i * 7919}" for i in range(12_000)]
    pq.write_table(
        pa.table({"text": texts}), work / "a.parquet", row_group_size=3000, use_dictionary=False, compression="none"
    )
    stored = bytearray((work / "a.parquet").read_bytes())
    place = stored.index(b"row 4500 ") - 4  # the length of a string: now larger than the page
    stored[place : place + 4] = b"\xff\xff\xff\x7f"
    (work / "a.parquet").write_bytes(stored)
    documents, bad = read(Source(path="a.parquet"), task_bytes)
    assert [b.place() for b in bad] == ["a.parquet, row group 1"]
    assert [b.reason for b in bad] == ["damaged file"]
    kept = [int(d.id.rsplit("#", 1)[1]) for d in documents]
    assert [d.text for d in documents] == [texts[i] for i in kept]
    assert {*range(3000), *range(6000, 12_000)} <= set(kept)
    assert len(set(kept)) == len(documents) == 10_024  # group 1 keeps its first batch of 1,024 rows


def not_utf8(values: list[bytes]) -> pa.Array:
    """A string column with arbitrary bytes."""
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(values), *binary.buffers()[1:])


@pytest.mark.parametrize("which", ["id", "url", "messages", "tools"])
def test_only_the_record_that_is_not_utf8_is_skipped(work: Path, which: str) -> None:
    broken = not_utf8([b"one", b"tw\xff", b"three"])
    plain = pa.array(["one", "two", "three"])
    turns = pa.StructArray.from_arrays(
        [pa.array(["user"] * 3), broken if which == "messages" else plain], ["role", "content"]
    )
    messages = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    columns = {"text": plain, "messages": messages} | {
        name: broken if name == which else plain for name in ("id", "url", "tools")
    }
    pq.write_table(pa.table(columns), work / "a.parquet")
    source = Source(path="a.parquet", id_field="id" if which == "id" else None)
    if which in ("messages", "tools"):
        source = Source(path="a.parquet", messages_field="messages", tools_field="tools")
    (unit,) = planned(source)
    records = list(read_unit(unit, wanted_fields(source, ["url"])))
    assert [(r.at, r.reason) for r in records if isinstance(r, BadRecord)] == [(1, "not UTF-8")]
    assert [at for r in records if isinstance(r, TextBatch) for at in r.at] == [0, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages_field": "messages", "tools_field": "functions"}, "tools_field = 'functions'"),
        ({"messages_field": "turns"}, "messages_field = 'turns'"),
        ({"id_field": "key"}, "id_field = 'key'"),
    ],
)
def test_a_configured_column_that_the_table_lacks_is_refused(work: Path, fields: dict[str, str], message: str) -> None:
    rows = [[{"role": "user", "content": "x"}]]
    pq.write_table(pa.table({"text": ["x"], "messages": rows}), work / "a.parquet")
    wanted = wanted_fields(Source.model_validate({"path": "a.parquet"} | fields))
    with pytest.raises(ConfigError, match=message):
        parquet.check("a.parquet", at="sources.0", wanted=wanted)


def test_a_text_file_is_one_document_without_its_byte_order_mark(work: Path) -> None:
    (work / "t").mkdir()
    (work / "t" / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (work / "t" / "b.txt").write_bytes(b"fine\nnot \xff fine")
    documents, bad = read(Source(path="t"))
    assert documents == [Document("t/a.txt", "one\r\ntwo\n")]
    assert [(b.place(), b.reason) for b in bad] == [("b.txt:2", "not UTF-8")]


@pytest.mark.usefixtures("work")
def test_parquet_rows_keep_their_numbers_across_row_groups() -> None:
    table = pa.table({"body": ["a", None, "c", "d", "e"], "key": [10, 11, 12, None, 14]})
    pq.write_table(table, "a.parquet", row_group_size=2)
    documents, bad = read(Source(path="a.parquet", text_field="body", id_field="key"), task_bytes=1)
    assert [(d.id, d.text) for d in documents] == [("a.parquet/10", "a"), ("a.parquet/12", "c"), ("a.parquet/14", "e")]
    assert [(b.place(), b.reason) for b in bad] == [
        ("a.parquet, row 1", "text is not a string"),
        ("a.parquet, row 3", "no id"),
    ]


def test_saved_datasets_are_read_without_the_datasets_library(work: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(30)]})
    rows.save_to_disk(str(work / "one"), num_shards=3)
    datasets.DatasetDict({"train": rows, "test": rows.select([1, 5])}).save_to_disk(str(work / "two"))
    assert [d.text for d in read(Source(path="one"))[0]] == rows["text"][:]
    assert [d.text for d in read(Source(path="two", split="test"))[0]] == ["row 1", "row 5"]
    with pytest.raises(ConfigError, match="one of: train, test"):
        read(Source(path="two"))
    arrow = next((work / "one").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:-60])
    assert [b.reason for b in read(Source(path="one"))[1]] == ["damaged file"]


def test_the_units_of_a_file_cover_its_bytes(work: Path) -> None:
    (work / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 50)
    parts = planned(Source(path="a.jsonl"), task_bytes=64)
    assert [u.start for u in parts[1:]] == [u.end for u in parts[:-1]]
    assert (parts[0].start, parts[-1].end) == (0, 700)
    assert [u.part for u in parts] == list(range(len(parts)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.parquet", "t/a.txt"])
def test_the_digest_of_a_unit_is_that_of_its_stored_bytes_for_every_type(work: Path, name: str) -> None:
    rows = b'{"text": "a line of some length"}\n' * 50
    (work / "t").mkdir()
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["x"] * 50}), name, row_group_size=10)
    else:
        compress = {"zst": zstandard.ZstdCompressor().compress, "gz": gzip.compress}.get(
            name.rsplit(".", maxsplit=1)[-1], bytes
        )
        (work / name).write_bytes(compress(rows))
    source = Source(path=name)
    for unit in planned(source, task_bytes=300):
        digest = unit_digest(unit)
        for _ in read_unit(unit, wanted_fields(source), digest):
            pass
        stored = (work / name).read_bytes()[unit.start : unit.end]
        assert digest.finish() == xxhash.xxh3_128_hexdigest(stored)


def test_tasks_are_runs_of_consecutive_units_of_about_equal_size(work: Path) -> None:
    (work / "t").mkdir()
    for i in range(40):
        (work / "t" / f"{i:02d}.txt").write_text("x" * (i * 10))
    listed = planned(Source(path="t"))
    tasks = group(listed, task_bytes=1000)
    assert [unit for task in tasks for unit in task] == listed
    sizes = [sum(unit.end - unit.start for unit in task) for task in tasks]
    assert all(abs(size - 1000) <= 390 / 2 for size in sizes[:-1])  # 390: the largest file


def test_a_file_that_changed_since_the_plan_is_refused(work: Path) -> None:
    (work / "a.txt").write_text("four")
    source = Source(path="a.txt")
    (unit,) = planned(source)
    (work / "a.txt").write_text("fives")
    with pytest.raises(DataError, match="has changed since the job was planned: it has 5 bytes, and had 4"):
        list(read_unit(unit, wanted_fields(source)))
    (work / "a.txt").write_text("FOUR")
    with pytest.raises(DataError, match="has changed since the job was planned"):
        list(read_unit(unit, wanted_fields(source)))
    (work / "a.txt").unlink()
    with pytest.raises(DataError, match="was removed"):
        list(read_unit(unit, wanted_fields(source)))


def names(source: dict[str, Any]) -> list[str]:
    return [file.name for file in resolve(Source(**source), at="sources.0").files]


def test_text_files_of_a_directory_are_sorted_by_name_without_hidden_ones(work: Path) -> None:
    for name in ("a.md", "b.py", "sub/c.rst", "sub/d.bin", ".git/e.md", "__pycache__/f.py", ".g.md", "README"):
        (work / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "t" / name).write_text("x")
    assert names({"path": "t"}) == ["README", "a.md", "b.py", "sub/c.rst"]
    assert names({"path": "t", "include": ["*.bin", "*.md"], "type": "text"}) == ["a.md", "sub/d.bin"]
    assert names({"path": "t", "exclude": ["sub/*", "*.py"]}) == ["README", "a.md"]
    assert names({"path": "t/**/*.md"}) == ["a.md"]
    assert names({"path": ["t/a.md", "t/sub"]}) == ["t/a.md/a.md", "t/sub/c.rst"]


def test_the_type_is_inferred_from_file_names_or_must_be_set(work: Path) -> None:
    for name in ("j/a.jsonl", "j/b.jsonl.zst", "p/a.parquet", "mixed/a.jsonl", "mixed/b.md", "odd/a.xyz"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text("x")
    kinds = {p: resolve(Source(path=p), at="s").type for p in ("j", "p", "j/*.jsonl", "p/a.parquet")}
    assert kinds == {"j": "jsonl", "p": "parquet", "j/*.jsonl": "jsonl", "p/a.parquet": "parquet"}
    with pytest.raises(ConfigError, match="1 jsonl, 1 text"):
        resolve(Source(path="mixed"), at="s")
    assert resolve(Source(path="mixed", type="text"), at="s").files[0].name == "b.md"
    with pytest.raises(ConfigError, match=r"\*\.xyz"):
        resolve(Source(path="odd"), at="s")
    with pytest.raises(ConfigError, match="no such file"):
        resolve(Source(path="nowhere"), at="s")
