"""Identifies a file that was given as text but is not text by its first bytes, and says what to do with it."""

from __future__ import annotations

import shlex

from data_prep.sources.storage import is_compressed
from foundation.storage import is_remote

HEAD_BYTES = 512
_TAR_AT = 257
_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"WARC/", 'a WARC or WET file: set the type "warc"'),
    (b"ARROW1", 'an Arrow IPC file: set the type "arrow"'),
    (b"\xff\xff\xff\xff", 'an Arrow IPC stream: set the type "arrow"'),
    (b"FEA1", "Feather V1: in Python, pyarrow.feather.write_feather(pyarrow.feather.read_table(PATH), PATH)"),
    (b"PAR1", 'a parquet file: set the type "parquet"'),
    (b"\x1f\x8b", "compressed by gzip: give it a name that ends in .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: give it a name that ends in .zst"),
    (b"\x04\x22\x4d\x18", "compressed by lz4: give it a name that ends in .lz4"),
    (b"BZh", "compressed by bzip2: give it a name that ends in .bz2"),
    (b"\xfd7zXZ", "compressed by xz: give it a name that ends in .xz"),
    (b"PK\x03\x04", "a zip archive: unpack it, or exclude it"),
    (b"%PDF-", "a PDF: extract its text (pdftotext), or exclude it"),
)
_UTF16, _UTF32 = (b"\xff\xfe", b"\xfe\xff"), (b"\xff\xfe\0\0", b"\0\0\xfe\xff")


def described(raw: bytes, path: str) -> str | None:
    """Describes the kind of bytes and what to do; None if they are text, or of an unknown kind.

    A WARC file does not count as text even if it is UTF-8: its headers would be learnt.

    Args:
        raw: the beginning of the decompressed file, or all of it.
        path: path of the file, for the command in the message.
    """
    head = raw[:HEAD_BYTES]
    if not head.startswith(b"WARC/") and b"\0" not in raw and _is_utf8(raw):
        return None
    if (encoding := _encoding(head)) is not None:
        if is_remote(path) or is_compressed(path):
            return f"{encoding}: convert it to UTF-8, or exclude it"
        name, new = shlex.quote(path), shlex.quote(f"{path}.utf8")
        return f"{encoding}: iconv -f {encoding} -t UTF-8 {name} > {new} && mv {new} {name}"
    if head[_TAR_AT:].startswith(b"ustar"):
        return 'a tar archive: set the type "webdataset" if it is one, or unpack it'
    known = (what for beginning, what in _BEGINNINGS if head.startswith(beginning))
    return next(known, None)


def _is_utf8(raw: bytes) -> bool:
    """Whether bytes, whose last character may be cut, are UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(raw) - 3 and error.reason == "unexpected end of data"
    return True


def _encoding(head: bytes) -> str | None:
    """Encoding of UTF-16 or UTF-32 for `iconv -f`, by byte-order mark or by zeros at every other byte of ASCII."""
    if head.startswith(_UTF32):
        return "UTF-32"
    if head.startswith(_UTF16):
        return "UTF-16"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) > len(head) // 4 and not min(even, odd):
        return "UTF-16BE" if even else "UTF-16LE"
    return None
