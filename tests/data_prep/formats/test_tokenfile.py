"""Token files: Megatron's format byte for byte; damage is refused with name and sizes; exact beyond 2^31."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.dedup.table import RUN_BITS, HashRange, run_and_index, run_slice
from data_prep.formats.memory_map import map_array
from data_prep.formats.tokenfile import MAX_DOCUMENT_TOKENS, TokenFile, TokenFileWriter, dtype_for, with_suffix
from data_prep.tasks.sorted_runs import DOCUMENT, DocumentMetadata, RunStream, RunWriter, SortedRun
from data_prep.tokenizer.engines import Tokens
from foundation.errors import DataError
from tests.data.sparse import write_pair

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


_FIRST_REFUSED = MAX_DOCUMENT_TOKENS + 1


def test_tokens_behind_4_gib_are_found_by_their_document(tmp_path: Path) -> None:
    tokens, documents = 3 * 2**30, 3 * 2**10  # 6 GB of holes
    write_pair(tmp_path / "big", tokens=tokens, documents=documents)
    with (tmp_path / "big.bin").open("r+b") as file:
        file.seek(2 * (tokens - 2))
        file.write(struct.pack("<HH", 7, 9))
    opened = TokenFile.open(tmp_path / "big")
    assert opened.tokens.size == tokens
    assert opened.tokens[-2:].tolist() == [7, 9]
    assert opened.document_starts([documents]).tolist() == [tokens]
    assert opened.byte_offsets[-1] == 2 * (tokens - 2**20)


def test_the_index_of_a_writer_counts_bytes_beyond_2_31(tmp_path: Path) -> None:
    lengths = np.array([2**30, 2**30, 5], dtype=np.int64)  # the third begins at byte 2^32
    writer = TokenFileWriter(tmp_path / "big", dtype="uint16")
    writer._add_documents(lengths, np.arange(3))
    writer.close()
    assert writer.tokens == 2**31 + 5
    with (tmp_path / "big.bin").open("r+b") as file:
        file.truncate(2 * writer.tokens)
    opened = TokenFile.open(tmp_path / "big")
    assert opened.byte_offsets.tolist() == [0, 2**31, 2**32]
    assert opened.tokens.size == 2**31 + 5


@pytest.mark.parametrize(("tokens", "refused"), [(MAX_DOCUMENT_TOKENS, False), (_FIRST_REFUSED, True)])
def test_a_document_of_2_31_tokens_is_refused_by_a_token_file(tmp_path: Path, tokens: int, refused: bool) -> None:
    writer = TokenFileWriter(tmp_path / "big", dtype="uint16")
    if refused:
        with pytest.raises(DataError, match=r"2147483648 tokens: the format allows at most 2147483647"):
            writer._add_documents(np.array([tokens]), np.arange(1))
    else:
        writer._add_documents(np.array([tokens]), np.arange(1))
        assert writer.tokens == tokens


def test_a_document_of_2_31_tokens_is_refused_before_it_is_a_run(tmp_path: Path) -> None:
    zeros = np.zeros(1, np.int64)
    metadata = DocumentMetadata(zeros.astype(np.uint64), *([zeros] * 6))
    ids = np.broadcast_to(np.zeros(1, np.uint32), (MAX_DOCUMENT_TOKENS,))
    writer = RunWriter(tmp_path, np.dtype(np.uint16), after=[0])  # with EOS it is one more
    with pytest.raises(DataError, match=r"2147483648 tokens"):
        writer.add(Tokens(ids, np.array([0, MAX_DOCUMENT_TOKENS])), metadata)


def test_a_merged_run_says_where_documents_behind_4_gib_begin(tmp_path: Path) -> None:
    documents = np.zeros(4, DOCUMENT)
    documents["tokens"], documents["key"] = 2**30, np.arange(4)
    with RunStream(tmp_path / "run", masked=False) as stream:
        stream.add(documents, [], [])
    run = SortedRun.open(tmp_path / "run")
    assert run.documents["start"].tolist() == [0, 2**30, 2**31, 3 * 2**30]
    with (tmp_path / "run" / "tokens.bin").open("wb") as file:
        file.seek(2 * 3 * 2**30)
        file.write(struct.pack("<HH", 3, 4))
    found = np.empty(2, np.uint16)
    run.read_tokens(run.documents[3:4], found)
    assert found.tolist() == [3, 4]


def test_items_of_the_last_runs_that_there_may_be_are_told_apart() -> None:
    last = (1 << RUN_BITS) - 1
    numbers = np.array([(run << RUN_BITS) + last for run in (0, 2**31 - 2, 2**31 - 1)], dtype=np.int64)
    assert numbers.tolist() == [2**32 - 1, 2**63 - 2**32 - 1, 2**63 - 1]
    assert run_and_index(numbers)[0].tolist() == [0, 2**31 - 2, 2**31 - 1]
    assert run_and_index(numbers)[1].tolist() == [last] * 3
    assert numbers[run_slice(numbers, 2**31 - 2)].tolist() == [2**63 - 2**32 - 1]


def test_ranges_of_hashes_meet_at_2_63_and_leave_none_out() -> None:
    words = np.array([0, 2**31, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    cuts = [words[HashRange(part, 2).cut(words)].tolist() for part in (0, 1)]
    assert cuts == [[0, 2**31, 2**63 - 1], [2**63, 2**64 - 1]]


def test_an_array_behind_4_gib_is_mapped_where_numpy_has_written_it(tmp_path: Path) -> None:
    path, count = tmp_path / "numbers.npy", 2**29 + 3  # 4 GiB of holes
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
        file.seek(file.tell() + 8 * (count - 1))
        file.write(struct.pack("<q", 2**63 - 1))
    found = map_array(path)
    assert found.shape == (count,)
    assert found[-1] == 2**63 - 1
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    with pytest.raises(ValueError, match=r"ends early"):
        map_array(path)


@pytest.mark.parametrize("shape", [(3, 1, 4), (2, 0), (5,)])
def test_a_mapped_array_is_the_one_that_was_saved(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    for number, each in enumerate((values, np.asfortranarray(values))):
        np.save(tmp_path / f"{number}.npy", each)
        assert np.array_equal(map_array(tmp_path / f"{number}.npy"), values)
