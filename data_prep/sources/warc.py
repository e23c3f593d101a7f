"""Reader of WARC files with texts (WET) or fetched pages; one record is one document.

WARC libraries skip a record whose length is damaged; here the file counts as damaged.
"""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Iterator

from data_prep.sources.bytesource import DamagedFileError, Digest, open_bytes
from data_prep.sources.jsonl import checked
from data_prep.sources.records import (
    TOO_LONG,
    BadRecord,
    Problem,
    Record,
    TextBatch,
    WantedFields,
    in_batches,
    too_long,
)

_TEXT_TYPES = re.compile(r"text/|application/(xhtml\+xml|xml|json)")
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w-]+)", re.IGNORECASE)
_META_BYTES = 1024
_LINE_BYTES, _PIECE_BYTES, _UNLIMITED = 1 << 16, 1 << 20, 1 << 62
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_ZLIB_OR_GZIP = zlib.MAX_WBITS + 32
_OK = b"200"
_LENGTH = re.compile(r"[0-9]{1,18}")
_NO_CHARSETS = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7"})
"""Encodings of Python that are not charsets of pages: they may decode to half of a surrogate pair, which is not text,
or raise errors of their own. (HTML forbids UTF-7.)"""


def read(path: str, *, source: str, file: str, wanted: WantedFields, digest: Digest) -> Iterator[TextBatch | BadRecord]:
    """Yields the texts of records with the types conversion (WET), resource, and response (status 200), if their
    content is text. Other records are not documents. A page keeps its markup.

    The fields are `text` and the headers of the record, such as `WARC-Target-URI`.

    Raises:
        DamagedFileError: the file is truncated, or a record does not directly follow the one before.
    """
    return in_batches(_records(path, wanted, digest), source=source, file=file, unit="record", wanted=wanted)


def _records(path: str, wanted: WantedFields, digest: Digest) -> Iterator[tuple[int, int, Record | Problem]]:
    limit, number = wanted.max_bytes or _UNLIMITED, 0
    with io.BufferedReader(open_bytes(path, digest)) as stream:
        while (headers := _headers(stream, number)) is not None:
            length = int(_get(headers, "content-length"))
            if length <= limit:
                text = _text(headers, _exactly(stream, length, number), limit)
            else:
                text = TOO_LONG, too_long(f"{length:,} bytes", limit=limit)
                for start in range(0, length, _PIECE_BYTES):
                    _exactly(stream, min(_PIECE_BYTES, length - start), number)
            if isinstance(text, str):
                yield number, number, checked({**headers, "text": text}, wanted)
            elif text is not None:
                yield number, number, text
            number += 1


def _headers(stream: io.BufferedIOBase, number: int) -> dict[str, str] | None:
    """The headers of the next record; None at the end of the file."""
    while (line := stream.readline(_LINE_BYTES)) in (b"\r\n", b"\n"):
        pass
    if not line:
        return None
    if not line.startswith(b"WARC/"):
        raise DamagedFileError(f"record {number} does not begin with WARC/ but with {line[:20]!r}")
    headers = _header_lines(stream)
    if not _LENGTH.fullmatch(_get(headers, "content-length")):
        raise DamagedFileError(f"record {number} has no Content-Length, or no number there")
    return headers


def _header_lines(stream: io.BufferedIOBase) -> dict[str, str]:
    """The headers up to an empty line, with names as written. (`email`'s parser takes ten times as long.)"""
    headers: dict[str, str] = {}
    name = ""
    while line := stream.readline(_LINE_BYTES).strip(b"\r\n"):
        text = line.decode("utf-8", "replace")
        if line[:1] in b" \t":  # continues the header before
            headers[name] = f"{headers.get(name, '')} {text.strip()}"
            continue
        name, _, value = text.partition(":")
        headers[name] = value.strip()
    return headers


def _get(headers: dict[str, str], name: str, default: str = "") -> str:
    """A header by its lower-case name, in any spelling."""
    return next((value for key, value in headers.items() if key.lower() == name), default)


def _exactly(stream: io.BufferedIOBase, length: int, number: int) -> bytes:
    content = stream.read(length)
    if len(content) < length:
        raise DamagedFileError(f"record {number} is truncated: {len(content):,} of {length:,} bytes")
    return content


def _text(headers: dict[str, str], content: bytes, limit: int) -> str | Problem | None:
    """The text of a record; None if the record is not a document."""
    kind, mime = _get(headers, "warc-type"), _get(headers, "content-type")
    if kind == "response" and mime.startswith("application/http"):
        stream = io.BytesIO(content)
        if stream.readline().split()[1:2] != [_OK]:
            return None
        try:
            page = _header_lines(stream)
            mime, content = _get(page, "content-type", "text/html"), stream.read()
            if _TEXT_TYPES.match(mime.lower()):
                content = _decompressed(_dechunked(content, page), page, limit)
        except (ValueError, zlib.error) as error:
            return "not decodable", str(error)
        if len(content) > limit:
            return TOO_LONG, too_long(f"more than {limit:,} bytes", limit=limit)
    elif kind not in ("conversion", "resource"):
        return None
    return _decoded(content, mime) if _TEXT_TYPES.match(mime.lower()) else None


def _dechunked(content: bytes, page: dict[str, str]) -> bytes:
    """Removes the transfer encoding of a body; crawlers that store it decoded keep the header."""
    if _get(page, "transfer-encoding").lower() != "chunked" or not _CHUNK.match(content):
        return content
    parts, at = list[bytes](), 0
    while (line := _CHUNK.match(content, at)) is not None:
        if not (size := int(line[1], 16)):
            return b"".join(parts)
        parts.append(content[line.end() : line.end() + size])
        at = line.end() + size + len(b"\r\n")
    raise ValueError(f"byte {at:,} of the page begins no chunk")


def _decompressed(content: bytes, page: dict[str, str], limit: int) -> bytes:
    """Removes the content encoding of a body, up to one byte more than `limit`.

    Raises:
        ValueError, zlib.error: the body is damaged, or its encoding is unknown.
    """
    encoding = _get(page, "content-encoding").lower()
    if encoding in ("", "identity") or content.lstrip()[:1] == b"<":  # the crawler kept the header but not the encoding
        return content
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"its Content-Encoding is {encoding}")
    raw = encoding == "deflate" and content[:1] != b"\x78"
    stream = zlib.decompressobj(-zlib.MAX_WBITS if raw else _ZLIB_OR_GZIP)
    text = stream.decompress(content, limit + 1)
    if not stream.eof and len(text) <= limit:
        raise ValueError(f"its {encoding} is truncated")
    return text


def _decoded(content: bytes, mime: str) -> str | Problem:
    """Decodes a text by the charset of the MIME type, else by the charset in the page's head, else as UTF-8."""
    named = re.search(r"charset\s*=\s*[\"']?([\w-]+)", mime, re.IGNORECASE)
    found = _META.search(content[:_META_BYTES]) if named is None else None
    charset = named[1] if named else found[1].decode("ascii") if found else "utf-8"
    try:
        # browsers, and so pages, treat these two as windows-1252
        codec = codecs.lookup(charset).name
        if codec in _NO_CHARSETS:
            return "unknown charset", charset
        return content.decode("cp1252" if codec in ("iso8859-1", "ascii") else codec).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return f"not {charset}", f"byte {content[error.start]:#04x} at offset {error.start}"
    except LookupError:
        return "unknown charset", charset
