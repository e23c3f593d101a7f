"""Inputs as others write them: bzip2 and xz, JSON arrays, nested fields, texts in binary columns, mixed directories."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.config.corpus import Source
from data_prep.sources import json_array, jsonl, parquet
from data_prep.sources.bytesource import Digest
from data_prep.sources.conversation import parse_conversation
from data_prep.sources.line_numbers import LineNumbers
from data_prep.sources.listing import resolve
from data_prep.sources.read_unit import read_unit, wanted_fields
from data_prep.sources.records import BadRecord, TextBatch
from data_prep.sources.units import Unit, units
from foundation.errors import ConfigError

TEXTS = [f'text {i} of Łódź \\ "quoted" [{{, {i * i}' for i in range(300)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def read(
    path: Path, *, limit: int | None = None, task_bytes: int = 1 << 40, **fields: Any
) -> tuple[list[str], list[BadRecord], list[Unit]]:
    """All texts of a path, its unreadable records, and its units."""
    source = Source(path=str(path), **fields)
    texts: list[str] = []
    bad: list[BadRecord] = []
    found = list(units([resolve(source, at="sources.0")], task_bytes=task_bytes))
    for unit in found:
        for record in read_unit(unit, wanted_fields(source, ("url.host",), max_bytes=limit)):
            if isinstance(record, BadRecord):
                bad.append(record)
            else:
                texts += record.texts
    return texts, bad, found


@pytest.mark.parametrize(("suffix", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_bzip2_and_xz_are_read_by_streams(suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """As pbzip2 and pixz write them; one file is one unit."""
    path = tmp_path / f"a.jsonl{suffix}"
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    path.write_bytes(compress(LINES[:half]) + compress(LINES[half:]))
    texts, bad, found = read(tmp_path, task_bytes=100)
    assert (texts, bad, len(found)) == (TEXTS, [], 1)


@pytest.mark.parametrize(("suffix", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage", "empty"])
def test_a_damaged_bzip2_or_xz_file_is_a_bad_file(
    suffix: str, compress: Callable[[bytes], bytes], damage: str, tmp_path: Path
) -> None:
    whole = compress(random.Random(1).randbytes(1 << 16).hex().encode())
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 255
    damaged = {"truncated": whole[:-9], "flipped": bytes(changed), "garbage": b"no archive", "empty": b""}
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(damaged[damage])
    _, bad, _ = read(path, type="text")
    assert [record.reason for record in bad] == ["damaged file"]


def array(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_json_array_has_the_records_of_its_lines(
    indent: int | None, chunk: int, ascii_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if every chunk ends within a string or an escape, and however small the tasks are."""
    monkeypatch.setattr(json_array, "_CHUNK_BYTES", chunk)
    rows = [{"id": i, "meta": {"tags": ["]", "}"], "n": None}, "text": text} for i, text in enumerate(TEXTS[:40])]
    path = array(tmp_path, json.dumps(rows, indent=indent, ensure_ascii=ascii_only))
    texts, bad, found = read(tmp_path, task_bytes=50)
    assert (texts, bad, len(found)) == (TEXTS[:40], [], 1)
    record = next(iter(jsonl.read(
        str(path), source="s", file="f", start=0, end=None, wanted=wanted_fields(Source(path="a")), digest=digest(path)
    )))  # fmt: skip
    assert isinstance(record, TextBatch)
    raw = path.read_bytes()
    assert [raw[at : at + 1] for at in record.at] == [b"{"] * 40


def digest(path: Path) -> Digest:
    return Digest(str(path), start=0, end=path.stat().st_size)


def test_bad_elements_of_an_array_are_reported_with_their_lines(tmp_path: Path) -> None:
    rows = ['{"text": "a"}', '{"text": 5}', "7", '{"text": "b"', '{"text": "' + "x" * 500 + '"}', '{"text": "c"}']
    path = array(tmp_path, "[\n" + ",\n".join(rows) + "\n]\n")
    texts, bad, _ = read(path, limit=400)
    # the brace that is missing in the fourth makes the rest of the array its content
    assert texts == ["a"]
    assert [(record.at, record.reason) for record in bad][:2] == [(3, "text is not a string"), (4, "not an object")]
    assert bad[-1].reason == "damaged file"
    rows[3] = '{"text": "b",}'
    texts, bad, _ = read(array(tmp_path, "[\n" + ",\n".join(rows) + "\n]\n"), limit=400)
    assert texts == ["a", "c"]
    assert [(r.at, r.reason) for r in bad[2:]] == [(5, "not JSON"), (6, "record too long")]


@pytest.mark.parametrize("chunk", [3, 64])
def test_an_element_over_the_limit_is_skipped_in_bounded_memory(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK_BYTES", chunk)
    sizes: list[int] = []
    original = json_array._Scanner._fill

    def fill(scanner: Any) -> bool:
        done = original(scanner)
        sizes.append(len(scanner._buffer))
        return done

    monkeypatch.setattr(json_array._Scanner, "_fill", fill)
    path = array(tmp_path, json.dumps([{"text": "a"}, {"text": 'x"\\' * 900}, {"text": "b"}], indent=1))
    found = list(json_array.elements(str(path), digest(path), max_bytes=100))
    assert [element.content is None for element in found] == [False, True, False]
    assert [element.line for element in found] == [LineNumbers(str(path)).line_of(e.offset) for e in found]
    start = path.read_bytes().index(b"{", 20)
    assert (found[1].offset, found[1].size) == (start, path.read_bytes().index(b"}", start + 20) + 1 - start)
    assert max(sizes) <= 100 + 2 * chunk + 8


@pytest.mark.parametrize("end", ["", ",", "] [", "]]", '{"text": "'])
def test_an_array_that_does_not_end_there_is_a_damaged_file(end: str, tmp_path: Path) -> None:
    texts, bad, _ = read(array(tmp_path, '[{"text": "a"}, {"text": "b"},' + end))
    assert texts == ["a", "b"]
    assert [record.reason for record in bad] == ["damaged file"]


def test_a_json_file_of_lines_is_read_by_lines_in_parts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(LINES)
    texts, bad, found = read(tmp_path / "a.json", task_bytes=len(LINES) // 3)
    assert (texts, bad) == (TEXTS, [])
    assert len(found) > 1


def test_json_is_read_where_a_directory_has_no_lines_and_else_not(tmp_path: Path) -> None:
    array(tmp_path, '[{"text": "a"}]')
    assert read(tmp_path)[0] == ["a"]
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    assert read(tmp_path)[0] == ["b"]


@pytest.mark.parametrize("extension", [True, False])
def test_a_dotted_field_is_a_key_or_a_path(extension: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not extension:
        monkeypatch.setattr(jsonl, "extension", None)
    rows = [{"meta": {"text": "path", "id": 1}}, {"meta.text": "key", "meta.id": 2}, {"meta": "none"}, {"meta": {}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts, bad, _ = read(tmp_path / "a.jsonl", text_field="meta.text", id_field="meta.id")
    assert texts == ["path", "key"]
    assert [(record.at, record.reason) for record in bad] == [(3, "no text field"), (4, "no text field")]


def test_dotted_optional_fields_are_found_beside_a_plain_text(tmp_path: Path) -> None:
    """The C extension reads keys only, and would give None for them."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "url": {"host": "h"}}\n')
    source = Source(path=str(tmp_path))
    (unit,) = units([resolve(source, at="s")], task_bytes=1 << 40)
    (batch,) = read_unit(unit, wanted_fields(source, ("url.host",)))
    assert isinstance(batch, TextBatch)
    assert batch.fields == [{"url.host": "h"}]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_fields_of_structs_are_columns(kind: str, tmp_path: Path) -> None:
    rows = [{"text": "a", "n": 1}, None, {"text": "c", "n": 3}]
    table = pa.table({"meta": rows, "other": [1, 2, 3], "url": [{"host": "h"}] * 3})
    write(table, tmp_path, kind)
    texts, bad, _ = read(tmp_path, text_field="meta.text")
    assert texts == ["a", "c"]
    assert [(record.at, record.reason) for record in bad] == [(1, "text is not a string")]


def write(table: Any, folder: Path, kind: str) -> None:
    if kind == "parquet":
        with (folder / "a.parquet").open("wb") as file:
            pq.write_table(table, file)
        return
    with (folder / "data-00000.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000.arrow"}]}))


def test_a_missing_field_of_a_struct_is_refused_with_the_paths_that_exist(tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta": [{"text": "a", "n": 1}]}), tmp_path / "a.parquet")
    wanted = wanted_fields(Source(path="a", text_field="meta.body"))
    with pytest.raises(ConfigError, match=r"meta\.text, meta\.n"):
        parquet.check(str(tmp_path / "a.parquet"), at="sources.0", wanted=wanted)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
def test_texts_in_binary_columns_are_decoded(kind: Any, tmp_path: Path) -> None:
    cells = ["Łódź".encode(), None, b"\xff", b"b"]
    pq.write_table(pa.table({"text": pa.array(cells, pa.binary()).cast(kind)}), tmp_path / "a.parquet")
    parquet.check(str(tmp_path / "a.parquet"), at="sources.0", wanted=wanted_fields(Source(path="a")))
    texts, bad, _ = read(tmp_path)
    assert texts == ["Łódź", "b"]
    assert [(record.at, record.reason) for record in bad] == [(1, "text is not a string"), (2, "not UTF-8")]


def test_the_type_is_inferred_from_what_include_selects(tmp_path: Path) -> None:
    for name in ("a.md", "b.jsonl", "c.parquet"):
        (tmp_path / name).write_bytes(LINES[:100])
    for pattern, kind in (("*.md", "text"), ("*.jsonl", "jsonl"), ("*.parquet", "parquet")):
        found = resolve(Source(path=str(tmp_path), include=[pattern]), at="sources.0")
        assert (found.type, [f.name[1:] for f in found.files]) == (kind, [pattern[1:]])
    with pytest.raises(ConfigError, match="several types"):
        resolve(Source(path=str(tmp_path)), at="sources.0")


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_tables_may_have_names_that_are_not_utf8(kind: str, tmp_path: Path) -> None:
    """Pyarrow takes no such path."""
    folder = tmp_path / os.fsdecode(b"data\xff")
    folder.mkdir()
    write(pa.table({"text": ["a", "b"]}), folder, kind)
    assert read(folder)[0] == ["a", "b"]


TALK = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Rome"}}}]},
]
MORE = [
    {"role": "user", "content": "time?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "g", "arguments": {"zone": [1, None]}}}]},
]
TOOLS = [{"name": "f", "parameters": {"city": {"type": "string"}}}]


def conversations(path: str, **fields: str) -> list[Any]:
    """What the reader of a parquet file passes on: {"messages", "tools"} of each row."""
    read = parquet.read(
        path,
        source="s",
        file=path,
        first_group=0,
        end_group=1,
        wanted=wanted_fields(Source.model_validate({"path": path, "messages_field": "messages"} | fields)),
    )
    return [json.loads(text) for batch in read for text in batch.texts]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["Json", "List(Json)", "strings in a list", "a string"])
def test_columns_of_json_hold_objects_not_strings(kind: str, work: Path) -> None:
    """datasets 5 stores `Json` and `List(Json)` as arrow.json, whose values pyarrow gives as strings."""
    texts: list[Any] = [json.dumps(m) if kind in ("Json", "a string") else [json.dumps(x) for x in m] for m in (TALK,)]
    tools = [json.dumps(TOOLS) if kind in ("Json", "a string") else [json.dumps(tool) for tool in TOOLS]]
    types = {"Json": pa.json_(), "List(Json)": pa.list_(pa.json_()), "a string": pa.string()}
    chosen = types.get(kind, pa.list_(pa.string()))
    table = pa.table({"messages": _as(texts, chosen), "tools": _as(tools, chosen)})
    pq.write_table(table, work / "a.parquet")
    wanted = wanted_fields(Source(path="a.parquet", messages_field="messages", tools_field="tools"))
    parquet.check("a.parquet", at="sources.0", wanted=wanted)
    (found,) = conversations("a.parquet", tools_field="tools")
    assert parse_conversation(json.dumps(found)) == (TALK, TOOLS)


def _as(values: list[Any], kind: Any) -> Any:
    """An array of a type that pyarrow does not make from Python values where it is within a list."""
    if kind == pa.list_(pa.json_()):
        plain = pa.array(values, pa.list_(pa.string()))
        return pa.ListArray.from_arrays(plain.offsets, pa.ExtensionArray.from_storage(pa.json_(), plain.values))
    return pa.ExtensionArray.from_storage(kind, pa.array(values)) if kind == pa.json_() else pa.array(values, kind)


def test_a_text_in_a_column_of_json_is_a_string_and_anything_else_is_a_bad_record(work: Path) -> None:
    values = ['"a \\"text\\""', '{"a": 1}', "no json", None]
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(values, pa.string()))
    pq.write_table(pa.table({"text": column}), work / "a.parquet")
    wanted = wanted_fields(Source(path="a.parquet"))
    parquet.check("a.parquet", at="sources.0", wanted=wanted)
    found = list(parquet.read("a.parquet", source="s", file="a", first_group=0, end_group=1, wanted=wanted))
    assert [r.reason if isinstance(r, BadRecord) else r.texts for r in found] == [
        ['a "text"'],
        "text is not a string",
        "not JSON",
        "text is not a string",
    ]


def test_keys_that_a_row_never_had_are_not_null_in_its_tool_call(work: Path) -> None:
    """A struct has the fields of all rows; a content that is null stays, since templates ask for it."""
    pq.write_table(pa.table({"messages": [TALK, MORE]}), work / "a.parquet")
    first, second = conversations("a.parquet")
    assert first["messages"][1] == TALK[1]
    assert first["messages"][0] == TALK[0]
    assert second["messages"][1] == MORE[1]
    wanted = wanted_fields(Source(path="a.parquet", messages_field="messages"))
    assert parquet.check("a.parquet", at="sources.0", wanted=wanted)  # and the job says so
    plain = pa.table({"messages": [[{"role": "user", "content": "x"}]]})
    pq.write_table(plain, work / "b.parquet")
    assert not parquet.check("b.parquet", at="sources.0", wanted=wanted)


def test_a_map_is_an_object(work: Path) -> None:
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "meta": pa.map_(pa.string(), pa.int64())}))
    rows = [[{"role": "assistant", "content": "x", "meta": [("a", 1), ("b", 2)]}]]
    pq.write_table(pa.table({"messages": pa.array(rows, kind)}), work / "a.parquet")
    (found,) = conversations("a.parquet")
    assert found["messages"][0]["meta"] == {"a": 1, "b": 2}


def test_columns_of_another_type_are_refused_with_those_that_fit(work: Path) -> None:
    table = pa.table({"text": [["a"]], "body": ["b"], "turns": [TALK[:1]], "n": [1], "ns": [[1]]})
    pq.write_table(table, work / "a.parquet")
    for fields, message in (
        ({}, r"has the type list<.*>\n  try: columns of strings: body$"),
        ({"messages_field": "n"}, r"has the type int64\n  try: columns of messages: turns$"),
        ({"messages_field": "ns"}, r"has the type list<.*int64>\n  try: columns of messages: turns$"),
    ):
        wanted = wanted_fields(Source.model_validate({"path": "a.parquet"} | fields))
        with pytest.raises(ConfigError, match=message):
            parquet.check("a.parquet", at="sources.0", wanted=wanted)
