"""The C extension for JSON lines accepts only lines that orjson accepts, and gives the same strings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.sources import jsonl
from data_prep.sources.bytesource import Digest
from data_prep.sources.records import BadRecord, WantedFields

extension = pytest.importorskip("data_prep.sources._jsonl", reason="it was not compiled here")

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.builds(
    lambda text, rest: {**rest, **text}, st.fixed_dictionaries({"text": TEXTS}), st.dictionaries(TEXTS, VALUES)
)
PIECES = [
    *(c.encode() for c in '"\\{}[],:-+.0123456789eEu/ntrbf \t\r\x00\x1fA'),
    *(bytes([b]) for b in range(0x7F, 256)),
]
PIECES += [b"\\u", b"\\ud83d", b"\\ude00", b'\\"', b'"text"', b"true", b"null", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80"]


def strings(line: bytes, *keys: str, required: int = 1) -> tuple[Any, ...]:
    """The strings of one line under each key."""
    *columns, starts = extension.strings(memoryview(line), keys or ("text",), required)
    assert np.frombuffer(starts, np.int64).tolist() == [0]
    return tuple(values[0] for values in columns)


def by_orjson(line: bytes) -> object:
    """The text of a line by orjson, or None if there is none."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found.get("text") if isinstance(found, dict) else None


@settings(max_examples=300)
@given(OBJECTS, st.booleans(), st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "\r: ")]))
def test_strings_are_those_of_orjson(value: dict[str, Any], ascii_only: bool, separators: tuple[str, str]) -> None:
    line = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
    assert strings(line)[0] in (None, by_orjson(line))


@settings(max_examples=800)
@given(
    OBJECTS,
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from([b"", *PIECES])), min_size=1, max_size=4
    ),
)
@example({"text": "a"}, True, [(12, 0, b"\x00")])
@pytest.mark.integration
def test_a_damaged_line_that_is_accepted_is_accepted_by_orjson(
    value: dict[str, Any], ascii_only: bool, edits: list[tuple[int, int, bytes]]
) -> None:
    line = json.dumps(value, ensure_ascii=ascii_only).encode()
    for at, removed, put in edits:
        line = line[:at] + put + line[at + removed :]
    if b"\n" not in line and line:
        assert strings(line)[0] in (None, by_orjson(line))


@pytest.mark.parametrize("piece", ["a", "\n", "é", "\U0001f600", '"', "\\", "\x01", "ab\tc\u2028"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_well_formed_lines_are_accepted(piece: str, ascii_only: bool) -> None:
    for size in (*range(40), 1000, 100_000):  # around the 16 bytes that one SSE2 step compares
        text = (piece * (size // len(piece) + 1))[:size]
        rest = {"id": 7, "meta": {"tags": ["x", None, True, -1.5], "empty": [{}, []]}, "titel": "Ü"}
        for value in ({"text": text, **rest}, {**rest, "text": text}):
            assert strings(json.dumps(value, ensure_ascii=ascii_only).encode())[0] == text
        assert strings(orjson.dumps({"text": text}) + b"\r") == (text,)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b" ", b"[]", b'"text"', b'{"text":5}', b'{"text":null}', b'{"other":"a"}', b"{}", b'{"text":"a"'),
        *(b'{"text":"a","text":"b"}', b'{"te\\u0078t":"a"}', b'{"text":"a","te\\u0078t":"b"}', b'{"text":"a"}}'),
        *(b'{"text":"a"} x', b'{"text":"a",}', b'{,"text":"a"}', b'{"text" "a"}', b'{"text":"a" "b":1}', b"{text:1}"),
        *(b'{"text":"\\ud800"}', b'{"text":"\\ude00"}', b'{"text":"\\ud800\\u0041"}', b'{"text":"\\u12g4"}'),
        *(
            b'{"text":"\\x"}',
            b'{"text":"\x1f"}',
            b'{"text":"\xff"}',
            b'{"text":"\xc0\x80"}',
            b'{"text":"\xed\xa0\x80"}',
        ),
        *(
            b'{"text":"\xf4\x90\x80\x80"}',
            b'{"text":"a","b":"\xff"}',
            b'{"text":"a","\xff":1}',
            b'{"text":"a","b":"\\x"}',
        ),
        *(
            b'{"text":"a","b":01}',
            b'{"text":"a","b":-}',
            b'{"text":"a","b":1.}',
            b'{"text":"a","b":.5}',
            b'{"text":"a\\',
        ),
        *(
            b'{"text":"a","b":1e5}',
            b'{"text":"a","b":12345678901234567}',
            b'{"text":"a","b":tru}',
            b'{"text":"a","b":}',
        ),
        *(b'{"text":"a","b":[1,]}', b'{"text":"a","b":[1}', b'{"text":"a","b":{"c"}}', b'{"text":"a","b":{"c":1,}}'),
        b'{"text":"a","b":' + b"[" * 33 + b"]" * 33 + b"}",
        b'\xef\xbb\xbf{"text":"a"}',
    ],
)
def test_doubtful_lines_are_skipped(line: bytes) -> None:
    starts = [0] if line else []
    *columns, found = extension.strings(memoryview(line), ("text",), 1)
    assert columns == [[None] * len(starts)]
    assert np.frombuffer(found, np.int64).tolist() == starts


def test_several_keys_some_of_them_optional() -> None:
    block = b'{"url":"u","text":"a","id":"1"}\n\n{"text":"b","id":"2"}\n{"text":"c","url":"x"}\n'
    block += b'{"id":"4","text":"d","url":3}'
    texts, ids, urls, starts = extension.strings(memoryview(block), ("text", "id", "url"), 2)
    assert (texts, ids, urls) == (
        *(["a", None, "b", None, None], ["1", None, "2", None, None]),
        ["u", None, None, None, None],
    )
    assert np.frombuffer(starts, np.int64).tolist() == [0, 32, 33, 55, 78]


@pytest.mark.parametrize(("keys", "required"), [((), 1), (("a",), 0), (("a",), 2), (("a",) * 17, 1)])
def test_an_unsupported_number_of_keys_is_refused(keys: tuple[str, ...], required: int) -> None:
    with pytest.raises(ValueError, match="1 to 16 can be read"):
        extension.strings(memoryview(b"{}"), keys, required)


UNSUPPORTED_KEYS = [
    WantedFields("text", others=("text",)),
    WantedFields("a\\n"),
    WantedFields("\ud800"),
    WantedFields("text", others=("a\\n", "url")),
]
LINES = st.lists(
    st.one_of(
        OBJECTS.map(lambda value: json.dumps(value).encode()),
        st.sampled_from(
            [
                b'{"a\\n": "x"}',
                b'{"a\\\\n": "y", "text": "z"}',
                b"",
                b"  ",
                b"{",
                b'{"text": 5}',
                b"[1]",
                b'{"text": "\xff"}',
                b'{"id": 1, "text": "a", "text": "b"}',
            ]
        ),
        st.builds(lambda n: b'{"id": "i%d", "text": "%s"}' % (n, b"x" * n), st.integers(0, 300)),
    ),
    max_size=12,
)


@settings(max_examples=100)
@given(LINES, st.sampled_from([b"", b"\xef\xbb\xbf"]), st.sampled_from([b"", b"\n"]), st.data())
def test_the_extension_changes_no_record(lines: list[bytes], mark: bytes, end: bytes, data: st.DataObject) -> None:
    content = mark + b"\n".join(lines) + end
    cut = data.draw(st.integers(0, len(content)))
    wanted = data.draw(
        st.sampled_from(
            [
                WantedFields("text"),
                WantedFields("text", id="id"),
                WantedFields("text", others=("id", "url")),
                *UNSUPPORTED_KEYS,
            ]
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            with_extension = [*_read(path, 0, cut, wanted), *_read(path, cut, None, wanted)]
            patch.setattr(jsonl, "extension", None)
            without_extension = [*_read(path, 0, cut, wanted), *_read(path, cut, None, wanted)]
            assert with_extension == without_extension == [*_read(path, 0, None, wanted)]


def _read(path: Path, start: int, end: int | None, wanted: WantedFields) -> list[object]:
    """Every document as (position, text, other fields), and every `BadRecord`, in order."""
    found: list[object] = []
    digest = Digest(str(path), start=0, end=0)
    for record in jsonl.read(str(path), source="s", file="f", start=start, end=end, wanted=wanted, digest=digest):
        if isinstance(record, BadRecord):
            found.append(record)
        else:
            fields = record.fields or [{}] * len(record.texts)
            found += zip(record.at, record.texts, fields, strict=True)
    return found
