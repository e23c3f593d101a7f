"""Token files: Megatron's format byte for byte; a damaged file is refused with its name and sizes."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.formats.tokenfile import TokenFile, TokenFileWriter, dtype_for, with_suffix
from foundation.errors import DataError

Documents = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20), max_size=12)


def parse(prefix: Path) -> tuple[int, Documents, list[int]]:
    """Reads a token file by the published layout alone: dtype code, sequences, document index."""
    raw = Path(f"{prefix}.idx").read_bytes()
    data = Path(f"{prefix}.bin").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    at = 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{sequences}i", raw, at)
    offsets = struct.unpack_from(f"<{sequences}q", raw, at + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", raw, at + 12 * sequences)
    assert len(raw) == at + 12 * sequences + 8 * entries
    letter = {4: "i", 8: "H"}[code]
    rows = [list(struct.unpack_from(f"<{n}{letter}", data, o)) for n, o in zip(lengths, offsets, strict=True)]
    assert sum(lengths) * struct.calcsize(letter) == len(data)
    return code, rows, list(documents)


def write(prefix: Path, documents: Documents, dtype: str = "uint16") -> Path:
    with TokenFileWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.append(np.array(document))
    return prefix


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("int32", 4)])
@given(documents=DOCUMENTS)
@settings(max_examples=30, deadline=None)
def test_written_files_follow_the_published_layout(
    documents: Documents, dtype: str, code: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = write(tmp_path_factory.mktemp("t") / "a.b", documents, dtype)
    assert parse(prefix) == (code, documents, list(range(len(documents) + 1)))


@given(documents=DOCUMENTS)
@settings(max_examples=30, deadline=None)
def test_a_token_file_reads_back_as_written(documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = TokenFile.open(write(tmp_path_factory.mktemp("t") / "a", documents))
    assert file.documents == len(documents)
    assert file.tokens.tolist() == [i for document in documents for i in document]
    assert file.sequence_lengths.tolist() == [len(document) for document in documents]
    assert file.document_index.tolist() == list(range(len(documents) + 1))
    file.close()
    assert len(file.tokens) == 0


def test_one_append_of_many_documents_equals_many_appends_of_one(tmp_path: Path) -> None:
    write(tmp_path / "one", [[1, 2], [3], [4, 5, 6]])
    with TokenFileWriter(tmp_path / "all", dtype="uint16") as writer:
        writer.append(np.array([1, 2, 3, 4, 5, 6]), [2, 1, 3])
    for suffix in (".bin", ".idx"):
        assert with_suffix(tmp_path / "one", suffix).read_bytes() == with_suffix(tmp_path / "all", suffix).read_bytes()


@given(documents=DOCUMENTS, order=st.randoms())
@settings(max_examples=30, deadline=None)
def test_documents_from_separate_buffers_are_written_like_contiguous_ones(
    documents: Documents, order: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("t")
    order.shuffle(documents)
    pieces = [memoryview(np.array(document, "<u2").tobytes()) for document in documents]
    with TokenFileWriter(root / "pieces", dtype="uint16") as writer:
        writer.append_pieces(pieces, np.array([len(document) for document in documents]))
        sums = writer.close()
    write(root / "expected", documents)
    for suffix in (".bin", ".idx"):
        written = with_suffix(root / "pieces", suffix).read_bytes()
        assert written == with_suffix(root / "expected", suffix).read_bytes()
        assert sums[suffix] == hashlib.sha256(written).hexdigest()


def test_a_document_of_several_sequences_stays_one_document(tmp_path: Path) -> None:
    """Megatron's own tool can write one sequence per sentence."""
    write(tmp_path / "a", [[1], [2, 3], [4]])
    index = tmp_path / "a.idx"
    raw = index.read_bytes()
    # two documents: sequences 0 and 1, then 2
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 3)
    index.write_bytes(header + raw[34 : 34 + 36] + struct.pack("<3q", 0, 2, 3) + b"\x00\x01\x02")  # with modes
    assert TokenFile.open(tmp_path / "a").documents == 2


def test_ids_are_uint16_below_65500_and_int32_from_there() -> None:
    assert dtype_for(65_499) == np.uint16
    assert dtype_for(65_500) == np.int32


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]])
    for suffix in (".bin", ".idx"):
        path = with_suffix(prefix, suffix)
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=path.name.replace(".", r"\.")):
                TokenFile.open(prefix)
        path.write_bytes(whole + b"xxx")  # 3 bytes: not a multiple of an item's size, and not the 2 bytes of modes
        with pytest.raises(DataError, match="bytes"):
            TokenFile.open(prefix)
        path.unlink()
        with pytest.raises(DataError, match="missing"):
            TokenFile.open(prefix)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("at", "raw", "message"),
    [(0, b"PK", "not the index"), (9, b"\x02", "version 2"), (17, b"\x63", "dtype code 99"), (17, b"\x04", "bytes")],
)
def test_an_index_of_another_format_or_version_is_refused(tmp_path: Path, at: int, raw: bytes, message: str) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[at : at + len(raw)] = raw
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match=message):
        TokenFile.open(prefix)


def test_a_writer_that_failed_leaves_no_file_that_opens(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TokenFileWriter(tmp_path / "a", dtype="uint16") as writer:  # noqa: PT012
        writer.append(np.array([1, 2]))
        raise RuntimeError
    with pytest.raises(DataError, match="missing"):
        TokenFile.open(tmp_path / "a")
