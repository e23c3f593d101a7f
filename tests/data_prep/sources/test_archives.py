"""WARC and WET, tar archives of WebDataset, Arrow IPC and Feather, lz4: read as sources; as text or lines they are
refused with a remedy that works."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lz4.frame as lz4_frame
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from data_prep.config.corpus import Source, load
from data_prep.sources import read_unit as units_of
from data_prep.sources.bad_records import BadRecordCount
from data_prep.sources.listing import resolve
from data_prep.sources.records import BadRecord
from data_prep.sources.units import units
from data_prep.sources.warc import _dechunked
from foundation.directory import read_manifest
from foundation.errors import ConfigError, DataError
from tests.data_prep.conftest import tree, write_config
from tests.data_prep.in_process import run_job

TEXTS = [f"Text {i} of Łódź, which has {i * i} words." for i in range(120)]


def warc(kind: str, content: bytes, mime: str, *, end: bytes = b"\r\n\r\n", **headers: str) -> bytes:
    lines = {"WARC-Type": kind, "WARC-Target-URI": "http://ł.org/a", "Content-Type": mime} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in (lines | {"Content-Length": len(content)}).items())
    return f"WARC/1.0\r\n{head}\r\n".encode() + content + end


def page(body: bytes, *, status: str = "200 OK", **headers: str) -> bytes:
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return warc("response", f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body, "application/http; msgtype=response")


def wet(texts: Iterable[str]) -> list[bytes]:
    return [
        warc("warcinfo", b"software: x\r\n", "application/warc-fields"),
        *(warc("conversion", text.encode(), "text/plain") for text in texts),
    ]


def tar(members: Iterable[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def samples(texts: Iterable[str]) -> bytes:
    """With images between them, and every text as JSON."""
    each = [
        [(f"a.b/{i:05d}.seg.png", b"\0" * 99), (f"a.b/{i:05d}.json", json.dumps({"text": t}).encode())]
        for i, t in enumerate(texts)
    ]
    return tar(member for members in each for member in members)


def arrow(texts: list[str], *, stream: bool = False, compression: str | None = None) -> bytes:
    out, table = io.BytesIO(), pa.table({"n": range(len(texts)), "text": texts})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=50)
    return out.getvalue()


def feather(texts: list[str], version: int = 2) -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(pa.table({"text": texts}), out, version=version)
    return out.getvalue()


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


CONTAINERS: dict[str, Callable[[], bytes]] = {
    "a.warc.wet.gz": lambda: b"".join(map(gzip.compress, wet(TEXTS))),
    "a.warc": lambda: b"".join(page(t.encode(), Content_Type="text/html; charset=UTF-8") for t in TEXTS),
    "a.warc.zst": lambda: zstandard.compress(b"".join(wet(TEXTS))),
    "a.tar": lambda: samples(TEXTS),
    "a.tgz": lambda: gzip.compress(
        tar(((f"{i}.txt", t.encode()) for i, t in enumerate(TEXTS)), form=tarfile.GNU_FORMAT)
    ),
    "a.tar.lz4": lambda: lz4_frame.compress(samples(TEXTS)),
    "a.arrow": lambda: arrow(TEXTS),
    "b.arrow": lambda: arrow(TEXTS, stream=True),
    "a.ipc": lambda: arrow(TEXTS, compression="zstd"),
    "a.feather": lambda: feather(TEXTS),
    "a.jsonl.lz4": lambda: lz4_frame.compress(jsonl(TEXTS[:50])) + lz4_frame.compress(jsonl(TEXTS[50:])),
}


def read(
    path: Path, *, limit: int | None = None, task_bytes: int = 100, **fields: Any
) -> tuple[list[str], list[BadRecord]]:
    """All texts of a path, and its unreadable records."""
    source = Source(path=str(path), **fields)
    texts: list[str] = []
    bad: list[BadRecord] = []
    for unit in units([resolve(source, at="sources.0")], task_bytes=task_bytes):
        for record in units_of.read_unit(unit, units_of.wanted_fields(source, max_bytes=limit)):
            if isinstance(record, BadRecord):
                bad.append(record)
            else:
                texts += record.texts
    return texts, bad


def one(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_a_source_by_its_name(name: str, tmp_path: Path) -> None:
    one(tmp_path, name, CONTAINERS[name]())
    assert read(tmp_path) == (TEXTS, [])


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_a_truncated_container_is_a_damaged_file(name: str, keep: float, tmp_path: Path) -> None:
    """What is before the damage has been read."""
    whole = CONTAINERS[name]()
    texts, bad = read(one(tmp_path, name, whole[: int(len(whole) * keep)]))
    assert texts == TEXTS[: len(texts)]
    assert [record.reason for record in bad] == ["damaged file"]
    assert texts or name not in ("a.tar", "a.tgz", "a.warc", "a.warc.wet.gz")


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_read_as_text_is_refused_with_what_it_is(name: str, tmp_path: Path) -> None:
    texts, bad = read(one(tmp_path, f"{name}.bin", CONTAINERS[name]()), type="text")
    assert (texts, [record.reason for record in bad]) == ([], ["not text"])
    suffix = name.rpartition(".")[2]
    types = {"warc": '"warc"', "tar": '"webdataset"', "arrow": '"arrow"', "ipc": '"arrow"', "feather": '"arrow"'}
    assert types.get(suffix, f".{suffix}".replace("tgz", "gz")) in bad[0].detail


def test_names_tell_these_types_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    one(tmp_path, "a.tar", samples(TEXTS))
    one(tmp_path, "a.md", b"prose")
    found = resolve(Source(path=str(tmp_path)), at="s")
    assert (found.type, found.left_out) == ("text", {"*.tar": 1})
    (tmp_path / "a.md").unlink()
    one(tmp_path, "a.warc", b"")
    with pytest.raises(ConfigError, match=r'1 warc, 1 webdataset\n  try: set it to "text", .*"warc", "webdataset"'):
        resolve(Source(path=str(tmp_path)), at="s")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["it's.txt", "a.jsonl"])
def test_utf_16_is_named_and_its_remedy_typed(encoding: str, name: str, tmp_path: Path) -> None:
    content = jsonl(TEXTS).decode()
    path = one(tmp_path, name, content.encode(encoding))
    texts, bad = read(path, task_bytes=1 << 30)
    assert (texts, {record.reason for record in bad}) == ([], {"not text" if name.endswith("txt") else "damaged file"})
    command = bad[0].detail[bad[0].detail.index("iconv") :]
    subprocess.run(command, shell=True, check=True)
    assert read(path) == (TEXTS if name == "a.jsonl" else [content], [])


def test_utf_16_that_is_compressed_has_no_command_that_would_read_the_compressed_bytes(tmp_path: Path) -> None:
    (bad,) = read(one(tmp_path, "a.jsonl.gz", gzip.compress("{}".encode("utf-16"))))[1]
    assert bad.detail == "not lines of JSON but UTF-16: convert it to UTF-8, or exclude it"


@pytest.mark.parametrize("size", [5, 60])
def test_an_arrow_stream_that_is_cut_within_its_schema_is_not_called_no_arrow_stream(size: int, tmp_path: Path) -> None:
    (bad,) = read(one(tmp_path, "a.arrow", arrow(TEXTS, stream=True)[:size]))[1]
    assert (bad.reason, "Arrow IPC" in bad.detail) == ("damaged file", False)


def test_a_nul_byte_makes_a_text_file_binary_and_the_message_says_what_to_do(work: Path) -> None:
    (bad,) = read(one(work, "a.txt", b"text\0text"))[1]
    config = write_config(sources=[{"path": "a.txt"}])
    with pytest.raises(DataError, match=r"binary, it has NUL bytes: exclude it\)\n  try: do what each line says, or"):
        BadRecordCount(load(config)).add_all([bad])


def test_feather_v1_and_parquet_named_arrow_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.arrow")
    (bad,) = read(tmp_path)[1]
    assert "a parquet file" in bad.detail
    (bad,) = read(one(tmp_path, "b.feather", b"FEA1" + bytes(60)))[1]
    assert "Feather V1" in bad.detail


def test_type_datasets_reads_an_ipc_file(tmp_path: Path) -> None:
    assert read(one(tmp_path, "a.arrow", arrow(TEXTS)), type="datasets") == (TEXTS, [])


PNG = b"\x89PNG\0\xff"
PAGES = [
    (page("<p>ä</p>".encode("latin-1"), Content_Type="text/html; charset=ISO-8859-1"), "<p>ä</p>"),
    (page(b'<meta charset="cp1251"><p>\xcf', Content_Type="text/html"), '<meta charset="cp1251"><p>П'),
    (page(gzip.compress(b"zipped"), Content_Type="text/plain", Content_Encoding="gzip"), "zipped"),
    (page(b"<p>kept header", Content_Type="text/html", Content_Encoding="br"), "<p>kept header"),
    (page(b"3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n", Content_Type="text/html", Transfer_Encoding="chunked"), "abcde"),
    (warc("resource", b"note", "text/plain"), "note"),
    (page(b"no such page", status="404 Not Found", Content_Type="text/html"), None),
    (page(PNG, Content_Type="image/png"), None),
    (warc("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"), None),
    (warc("metadata", b"fetchTimeMs: 3", "application/warc-fields"), None),
]


def test_pages_are_decoded_and_records_that_are_no_documents_left_out(tmp_path: Path) -> None:
    path = one(tmp_path, "a.warc", b"".join(raw for raw, _ in PAGES))
    assert read(path) == ([text for _, text in PAGES if text is not None], [])
    assert read(path, text_field="WARC-Target-URI", id_field="WARC-Type")[0] == ["http://ł.org/a"] * 6


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (page(b"\xff", Content_Type="text/html; charset=utf-8"), "not utf-8"),
        (page(b"x", Content_Type="text/html; charset=klingon"), "unknown charset"),
        (page(b"x+2AA-", Content_Type="text/html; charset=UTF-7"), "unknown charset"),  # half of a surrogate pair
        (page(b"abc-!!", Content_Type="text/html; charset=punycode"), "unknown charset"),
        (page(b"3\r\nabc\r\n5\r\nde", Content_Type="text/html", Transfer_Encoding="chunked"), "not decodable"),
        (page(b"\x1f\x8bx", Content_Type="text/html", Content_Encoding="gzip"), "not decodable"),
        (page(b"\1\2", Content_Type="text/html", Content_Encoding="br"), "not decodable"),
        (page(gzip.compress(b" " * 9999), Content_Type="text/html", Content_Encoding="gzip"), "record too long"),
        (warc("conversion", b" " * 9999, "text/plain"), "record too long"),
    ],
)  # fmt: skip
def test_a_page_that_cannot_be_decoded_is_a_bad_record_and_the_next_is_read(
    raw: bytes, reason: str, tmp_path: Path
) -> None:
    texts, bad = read(one(tmp_path, "a.warc", b"".join([*wet("a"), raw, *wet("b")])), limit=2000)
    assert texts == ["a", "b"]
    assert [(record.at, record.unit, record.reason) for record in bad] == [(2, "record", reason)]


@pytest.mark.parametrize(
    "change", [(b"Content-Length: 1\r", b"Content-Length: 0\r"), (b"Content-Length: 1\r", b"X: y\r")]
)
def test_a_wrong_length_in_a_warc_file_is_damage_and_not_the_loss_of_a_record(
    change: tuple[bytes, bytes], tmp_path: Path
) -> None:
    texts, bad = read(one(tmp_path, "a.warc", b"".join(wet("abc")).replace(*change)))
    assert (texts, [record.reason for record in bad]) == ([""] if change[1][0:1] == b"C" else [], ["damaged file"])


def test_a_length_of_thousands_of_digits_is_damage(tmp_path: Path) -> None:
    raw = warc("conversion", b"a", "text/plain").replace(b"Length: 1", b"Length: " + b"1" * 5000)
    assert [record.reason for record in read(one(tmp_path, "a.warc", raw))[1]] == ["damaged file"]


def test_chunks_of_a_page_are_joined_in_linear_time() -> None:
    began = time.process_time()
    assert _dechunked(b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}) == b"x" * 300_000
    assert time.process_time() - began < 10  # 0.6 s; 30 if each chunk copies the rest


def test_headers_of_a_tar_archive_that_make_tarfile_fail_are_damage(tmp_path: Path) -> None:
    sparse, name = tarfile.TarInfo("0.txt"), tarfile.TarInfo("././@LongLink")
    sparse.pax_headers = {"GNU.sparse.map": "x", "GNU.sparse.size": "5"}
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 1
    for raw in (sparse.tobuf(tarfile.PAX_FORMAT), (name.tobuf(tarfile.GNU_FORMAT) + b"a" + bytes(511)) * 2000):
        texts, bad = read(one(tmp_path, "a.tar", raw + bytes(1024)))
        assert (texts, [record.reason for record in bad]) == ([], ["damaged file"])


def test_names_in_a_tar_archive_that_are_not_utf_8_are_text_and_stay_apart(tmp_path: Path) -> None:
    raw = tar([("\udce9.txt", b"a"), ("\udce8.txt", b"b")], form=tarfile.GNU_FORMAT)
    path = one(tmp_path, "a.tar", raw)
    assert read(path) == (["a", "b"], [])
    assert read(path, text_field="__key__") == ([r"\xe9", r"\xe8"], [])


def test_what_is_damaged_within_a_tar_archive_is_not_its_end(tmp_path: Path) -> None:
    whole = bytearray(tar((f"{i}.txt", b"x") for i in range(6)))
    header = bytes(whole[:3072]) + b"\7" + bytes(whole[3073:])
    for raw, texts in ((header, 2), (bytes(whole[:6144]), 5), (bytes(whole) * 2, 6), (b"", 0)):
        found, bad = read(one(tmp_path, "a.tar", raw))
        assert (found, [record.reason for record in bad]) == (["x"] * texts, ["damaged file"])


def test_fields_of_a_sample_and_samples_that_cannot_be_used(tmp_path: Path) -> None:
    path = one(tmp_path, "a.tar", tar([
        ("./x/0.json", b'{"caption": "c0", "meta": {"id": 7}}'), ("./x/0.txt", b"t0"), ("./x/0.jpg", PNG),
        ("./x/.1.txt", b"hidden"), ("./x/1.json", b"[1]"), ("./x/1.code.py", b"print()"),
        ("./x/2.txt", b"\xff"), ("./x/3.json", b"{"), ("./x/4.txt", b"long" * 99), ("./y/4.txt", b"t5"),
    ]))  # fmt: skip
    texts, bad = read(path, limit=100)
    assert texts == ["t0", "t5"]
    reasons = [(1, "no text field"), (2, "not UTF-8"), (3, "not JSON"), (4, "record too long")]
    assert [(record.at, record.reason) for record in bad] == reasons
    for field, expected in (("caption", "c0"), ("json.caption", "c0"), ("code.py", "print()"), ("txt", "t0")):
        assert read(path, limit=100, text_field=field)[0][0] == expected
    assert read(path, text_field="caption", id_field="meta.id")[0] == ["c0"]
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = one(tmp_path, "b.tar", tar([("0.json", json.dumps(talk).encode())]))
    assert json.loads(read(path, messages_field="messages")[0][0])["messages"] == talk["messages"]


def test_a_missing_package_for_lz4_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(tmp_path, "a.jsonl.lz4", lz4_frame.compress(jsonl(TEXTS)))
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(DataError, match=r"\.lz4 need the package 'lz4' .*\n  try: pip install lz4"):
        resolve(Source(path=str(tmp_path)), at="s")


def test_a_job_over_containers_has_the_bytes_of_any_other_division_into_tasks(work: Path) -> None:
    sources = []
    for i, (name, make) in enumerate(CONTAINERS.items()):
        (work / f"s{i}").mkdir()
        one(work / f"s{i}", name, make())
        sources.append({"path": f"s{i}", "name": f"s{i}"})
    run_job(write_config(sources=sources, task_bytes=1))
    run_job(write_config(sources=sources, output="again", dedup={"exact": True}))
    run_job(write_config(sources=sources, output="third"))
    shards = [
        {name: content for name, content in tree(work / out).items() if "/" in name} for out in ("tokens", "third")
    ]
    assert shards[0] == shards[1]
    splits = read_manifest(work / "tokens", kind="tokens").details["splits"]
    assert sum(split["documents"] for split in splits.values()) == len(TEXTS) * len(CONTAINERS)
    dropped = read_manifest(work / "again", kind="tokens").details["dropped"]
    assert dropped == {"dedup: exact copy": len(TEXTS) * (len(CONTAINERS) - 1)}
