"""Counts and offsets of token files and sorted runs beyond 2^31: exact, or refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.dedup.table import RUN_BITS, HashRange, run_and_index, run_slice
from data_prep.formats.memory_map import map_array
from data_prep.formats.tokenfile import MAX_DOCUMENT_TOKENS, TokenFile, TokenFileWriter
from data_prep.tasks.sorted_runs import DOCUMENT, DocumentMetadata, RunStream, RunWriter, SortedRun
from data_prep.tokenizer.engines import Tokens
from foundation.errors import DataError
from tests.data.sparse import write_pair

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
