"""Document boundaries within samples: found in the index, and the masks and labels that follow from them."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.formats.tokenfile import TokenFile, TokenFileWriter
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection, SourceSection
from pipeline.data.documents import find_boundaries
from pipeline.data.loader import StepLoader, heldout_batches
from pipeline.data.micro_batch import IGNORE
from pipeline.data.mixture import DataMixture, open_mixture
from tests.conftest import make_tokens

T = 32


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of 200 short documents, several to a sample."""
    work = tmp_path_factory.mktemp("short")
    (work / "text").mkdir()
    for i in range(200):
        (work / "text" / f"{i}.txt").write_text(f"mill {i} " + "water turns the wheel. " * (i % 9))
    return make_tokens(work, [work / "text"], tokenizer={"train": "bpe", "vocab_size": 300})


def written(prefix: Path, lengths: list[int]) -> TokenFile:
    """A token file whose documents have these lengths; the ids of document d are all d."""
    with TokenFileWriter(prefix, dtype=np.uint16) as writer:
        writer.append(np.repeat(np.arange(len(lengths)), lengths), lengths)
    return TokenFile.open(prefix)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40), length=st.integers(1, 12), data=st.data())
def test_boundaries_are_where_the_document_changes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, data: st.DataObject
) -> None:
    if sum(lengths) <= length:
        return
    file = written(tmp_path_factory.mktemp("file") / "shard", lengths)
    last = file.tokens.size - length - 1
    starts = np.array(data.draw(st.lists(st.integers(0, last), max_size=5)), dtype=np.int64)
    boundaries = find_boundaries(file, starts, length=length)
    marks = np.zeros((starts.size, length + 1), dtype=np.bool_)
    marks[boundaries.sample, boundaries.at] = True
    for start, mark in zip(starts, marks, strict=True):
        ids = np.asarray(file.tokens[start : start + length + 1])
        assert mark[1:].tolist() == (ids[1:] != ids[:-1]).tolist()
        assert not mark[0]


def with_sequences(prefix: Path, lengths: list[int], documents: list[int]) -> TokenFile:
    """A token file as Megatron may write it: `documents` are the sequences where documents begin, and their number."""
    ids = np.arange(sum(lengths), dtype="<u2")
    Path(f"{prefix}.bin").write_bytes(ids.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(documents))
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * ids.itemsize
    body = np.array(lengths, dtype="<i4").tobytes() + offsets.tobytes() + np.array(documents, dtype="<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(header + body)
    return TokenFile.open(prefix)


def begins(lengths: list[int], documents: list[int]) -> set[int]:
    """First tokens of documents, counted one by one."""
    return {sum(lengths[:sequence]) for sequence in documents[:-1]}


def test_a_document_of_several_sequences_has_no_boundary_inside(tmp_path: Path) -> None:
    # 3 + 2 tokens, then 4
    boundaries = find_boundaries(with_sequences(tmp_path / "s", [3, 2, 4], [0, 2, 3]), np.array([0, 2]), length=6)
    assert (boundaries.sample.tolist(), boundaries.at.tolist()) == ([0, 1], [5, 3])


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=12),
    length=st.integers(1, 8),
)
@example(lengths=[3, 1], cuts=[2], length=3)
@example(lengths=[3, 3, 1, 5, 3, 4], cuts=[2, 3, 3, 4, 5], length=2)
def test_boundaries_are_right_with_several_sequences_per_document_and_with_none(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int], length: int
) -> None:
    windows = sum(lengths) - length
    if windows < 1:
        return
    documents = [0, *sorted(cut for cut in cuts if cut <= len(lengths)), len(lengths)]
    file, known = with_sequences(tmp_path_factory.mktemp("file") / "s", lengths, documents), begins(lengths, documents)
    for starts in (np.arange(windows), *(np.array([start]) for start in range(windows))):
        boundaries = find_boundaries(file, starts, length=length)
        found = list(zip(boundaries.sample.tolist(), boundaries.at.tolist(), strict=True))
        expected = [(i, at) for i, start in enumerate(starts) for at in range(1, length + 1) if start + at in known]
        assert found == expected


def mixture_of(tokens: Path, seed: int = 5) -> DataMixture:
    return open_mixture(DataSection(sources=(SourceSection(path=str(tokens)),), sequence_length=T), seed=seed)


def test_every_rank_counts_the_targets_of_the_whole_step(tokens: Path) -> None:
    mixture, batch, seen = mixture_of(tokens), BatchSizes(24, 2, 3, 4, T), 0
    for step in range(1, 9):
        ranks = [
            StepLoader(mixture, batch, dp_rank=r, steps=(1, 9), cp=2, cp_rank=c, mask_documents=True).gather(step)
            for r in range(4)
            for c in range(2)
        ]
        counted = sum(int((m.labels != IGNORE).sum()) for rank in ranks for m in rank.micro_batches)
        assert {rank.targets for rank in ranks} == {counted}
        seen += batch.tokens - counted
    assert seen > 0, "no boundary in all these samples: the test shows nothing"


def test_positions_restart_in_each_document_and_no_label_crosses_a_boundary(tokens: Path) -> None:
    mixture = mixture_of(tokens)
    boundaries = 0
    for step in range(1, 30):
        batch = StepLoader(mixture, BatchSizes(4, 4, 1, 1, T), dp_rank=0, steps=(1, 30), mask_documents=True).gather(
            step
        )
        (micro,) = batch.micro_batches
        assert (micro.documents.dtype, micro.positions.dtype) == (torch.int32, torch.int64)
        changes = micro.documents.diff(dim=1) != 0
        boundaries += int(changes.sum())
        assert torch.equal(micro.labels[:, :-1] == IGNORE, changes)
        assert torch.equal(micro.positions[:, 1:], torch.where(changes, 0, micro.positions[:, :-1] + 1))
        assert not micro.positions[:, 0].any()
    assert boundaries > 0


def test_without_a_document_mask_a_batch_has_ids_and_labels_only(tokens: Path) -> None:
    (micro,) = (
        StepLoader(mixture_of(tokens), BatchSizes(2, 2, 1, 1, T), dp_rank=0, steps=(1, 1)).gather(1).micro_batches
    )
    assert micro.positions is None
    assert micro.documents is None


def test_held_out_batches_have_the_same_document_mask(tokens: Path) -> None:
    dataset = mixture_of(tokens).sources[0]
    batches = list(heldout_batches(dataset, batch_size=4, dp=1, dp_rank=0, mask_documents=True))
    ignored = sum(int((b.labels == IGNORE).sum()) for b in batches)
    padded = len(batches) * 4 - dataset.windows
    assert ignored == padded * T + dataset.boundaries(np.arange(dataset.windows)).at.size


def test_finding_boundaries_does_not_copy_the_index(tmp_path: Path) -> None:
    # np.searchsorted on the mapped array would: its numbers are not aligned
    file = written(tmp_path / "many", [3] * 500_000)
    starts = np.random.default_rng(0).integers(0, file.tokens.size - T - 1, 64)
    tracemalloc.start()
    find_boundaries(file, starts, length=T)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200_000 < file.byte_offsets.nbytes
