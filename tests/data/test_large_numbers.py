"""Samples, tokens and steps beyond 2^31 and near 2^63: the order is exact, and what does not fit is refused."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import open_mixture
from pipeline.data.permutation import permute
from pipeline.data.sample_order import SampleOrder
from pipeline.data.skips import Skip, Skips
from pipeline.data.weighted_sources import MixtureStage, WeightedSources, _to_left
from pipeline.runtime.metrics.journal import Journal, read_rows
from tests.data.sparse import write_sparse

BOUNDARIES = (2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 2)


@pytest.mark.parametrize("sample", BOUNDARIES)
def test_the_share_of_a_source_is_rounded_as_with_numbers_of_any_size(sample: int) -> None:
    shares = np.array([1, 2**31, 2**32 - 1, 2**32], dtype=np.uint64)
    found = _to_left(np.full(len(shares), sample, dtype=np.int64), shares)
    exact = [int(Fraction(sample * int(share), 2**32) + Fraction(1, 2)) for share in shares]
    assert found.tolist() == exact


@pytest.mark.parametrize("sample", BOUNDARIES)
def test_a_sample_is_the_next_of_its_source(sample: int) -> None:
    mixture = WeightedSources([MixtureStage(0, (3.0, 1.0, 2.0)), MixtureStage(2**40, (1.0, 1.0, 2.0))])
    sources, nth = mixture.locate(np.array([sample], dtype=np.int64))
    before, after = mixture.samples_drawn(sample), mixture.samples_drawn(sample + 1)
    assert before.sum() == sample
    assert nth[0] == before[sources[0]]
    assert (after - before).tolist() == [int(number == sources[0]) for number in range(3)]


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 + 1, 2**62 + 1, 2**63 - 1])
def test_a_permutation_of_very_many_is_one_to_one_and_stays_inside(size: int) -> None:
    ends = np.concatenate([np.arange(1000), size - 1 - np.arange(1000)]).astype(np.int64)
    found = permute(ends, size=size, key=5)
    assert len(set(found.tolist())) == len(ends)
    assert 0 <= found.min() <= found.max() < size


def test_windows_of_a_source_of_10_15_tokens_are_located() -> None:
    windows = 10**15 // 4096
    order = SampleOrder([windows, 7], weights=[1.0, 1e-9], seed=1)
    found = order.locate(np.array([2**33, 2**45, 2 * windows + 5], dtype=np.int64))
    assert found.source.tolist() == [0, 0, 0]
    assert all(0 <= window < windows for window in found.window)


def test_the_last_windows_of_a_shard_of_6_gb_are_read(tmp_path: Path) -> None:
    tokens = 3 * 2**30  # of two bytes each, as holes
    directory = write_sparse(tmp_path / "tokens", shards=2, tokens=tokens, documents=3 * 2**10)
    with (directory / "train" / "shard-00001.bin").open("r+b") as file:
        file.seek(2 * (tokens - 3))
        file.write(struct.pack("<HHH", 7, 8, 9))
    section = parse(DataSection, {"sources": [{"path": str(directory), "weight": 1.0}], "sequence_length": 64})
    dataset = open_mixture(section, seed=5).sources[0]
    per_shard = (tokens - 1) // 64
    assert dataset.windows == 2 * per_shard
    assert dataset.windows > 2**26
    last = dataset.read([dataset.windows - 1])[0]
    assert last.nonzero()[0].size == 0  # the last three tokens are of the part that is less than a window
    with (directory / "train" / "shard-00001.bin").open("r+b") as file:
        file.seek(2 * (64 * per_shard - 2))
        file.write(struct.pack("<HHH", 4, 5, 6))
    assert dataset.read([dataset.windows - 1])[0][-3:].tolist() == [4, 5, 6]


@pytest.mark.parametrize("at", [2**31, 2**33])
def test_steps_behind_skips_beyond_2_31_draw_their_own_samples(at: int) -> None:
    skips = Skips.of(json.loads(json.dumps(Skips((Skip(at, 2**31),)).plain())))
    assert skips.data_step(at - 1) == at - 1
    assert skips.samples(at, per_step=4096) == range((at + 2**31 - 1) * 4096, (at + 2**31) * 4096)
    assert skips.past(at + 5, since=at).data_step(at + 6) == (at + 6) + 2**31 + 5


def test_a_sample_number_past_2_63_is_refused(tmp_path: Path) -> None:
    directory = write_sparse(tmp_path / "tokens", shards=1, tokens=10_000, documents=10)
    section = parse(DataSection, {"sources": [{"path": str(directory), "weight": 1.0}], "sequence_length": 64})
    batch = BatchSizes(samples=4096, micro=1, accumulation=1, dp=4096, sequence_length=64)
    assert batch.tokens * 2**40 == 2**58  # tokens of a run have no bound
    for step, fits in ((2**51 - 1, True), (2**51 + 1, False)):
        loader = StepLoader(open_mixture(section, seed=5), batch, dp_rank=0, steps=(step, step))
        if fits:
            assert [each.step for each in loader] == [step]
        else:
            with pytest.raises(OverflowError):
                list(loader)


def test_a_journal_keeps_counts_near_2_63(tmp_path: Path) -> None:
    journal = Journal(tmp_path, from_step=0)
    for step in (2**31, 2**63 - 1, 2**63 + 1):
        journal.write("step", step, tokens=step * 4096, samples=step)
    journal.close()
    Journal(tmp_path, from_step=2**63 - 1).close()
    rows = read_rows(tmp_path)
    assert [row["tokens"] for row in rows] == [2**43, (2**63 - 1) * 4096]
