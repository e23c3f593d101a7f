"""Law 1: which tokens are in sample i is a pure function of (data, mixture, seed, i), beyond 2^31 and near 2^63 too."""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import DataError
from foundation.section import parse
from pipeline.config.accounts import StageBatches, StepAccounts, make_accounts
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.config.sections.stages import UntilSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import open_mixture
from pipeline.data.permutation import derive_key, permute
from pipeline.data.sample_order import OrderStart, SampleOrder
from pipeline.data.skips import NO_SKIPS, Skip, Skips
from pipeline.data.weighted_sources import MixtureStage, WeightedSources, _to_left
from pipeline.runtime.metrics.journal import Journal, read_rows
from tests.data.sparse import write_sparse

FAR = 10**9
"""A sample deep in a run: 2e12 tokens in samples of 2,048."""


def test_every_window_is_drawn_once_per_epoch_and_epochs_differ() -> None:
    order = SampleOrder([1000], weights=[1.0], seed=3)
    first, second = (order.locate(np.arange(e * 1000, (e + 1) * 1000)).window for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first.tolist() != second.tolist()


def test_locating_one_sample_or_many_gives_the_same_locations() -> None:
    order = SampleOrder([70, 1300, 5], weights=[0.2, 0.7, 0.1], seed=11)
    samples = np.arange(FAR - 500, FAR + 500)
    together = order.locate(samples)
    for i in (0, 1, 499, 500, 999):
        alone = order.locate([samples[i]])
        assert (alone.source[0], alone.window[0]) == (together.source[i], together.window[i])


def test_each_source_of_a_mixture_completes_an_epoch_before_it_repeats() -> None:
    order = SampleOrder([70, 1300], weights=[1.0, 2.0], seed=11)
    location = order.locate(np.arange(3900))
    for source, windows in ((0, 70), (1, 1300)):
        seen = location.window[location.source == source]
        for start in range(0, len(seen) - windows + 1, windows):
            assert sorted(seen[start : start + windows]) == list(range(windows))


@pytest.mark.parametrize("weights", [[1, 1], [0.9, 0.1], [5, 3, 2], [1000, 1]])
def test_mixing_weights_hold_in_every_part_of_the_run(weights: list[float]) -> None:
    order = SampleOrder([10**6] * len(weights), weights=weights, seed=0)
    share = np.array(weights) / sum(weights)
    for start, length in ((0, 100), (12_345, 1000), (65_486, 100), (FAR + 7, 20_000)):
        counts = np.bincount(order.locate(np.arange(start, start + length)).source, minlength=len(weights))
        # evenly spread: each node of the tree is within one turn, and there are two levels at most
        assert np.all(np.abs(counts - share * length) <= 2), (start, counts)


@settings(max_examples=200, deadline=None)
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), samples=st.integers(0, 1 << 30))
def test_mixing_weights_hold_over_the_whole_run_to_two_samples(weights: list[float], samples: int) -> None:
    drawn = SampleOrder([10] * len(weights), weights=weights, seed=0).samples_drawn(samples)
    assert drawn.sum() == samples
    # three levels of at most half a sample, and of 2^30 samples an eighth for shares in 2^-32
    assert np.abs(drawn - np.array(weights) / sum(weights) * samples).max() <= 2


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), start=st.integers(0, 1 << 40))
def test_samples_drawn_agree_with_locations_and_continue_over_stages(weights: list[int], start: int) -> None:
    order = WeightedSources([MixtureStage(0, tuple(weights))])
    sources, counts = order.locate(np.arange(start, start + 300))
    before = order.samples_drawn(start)
    assert (order.samples_drawn(start + 300) - before).tolist() == np.bincount(sources, minlength=len(weights)).tolist()
    for number in range(len(weights)):
        mine = counts[sources == number]
        assert mine.tolist() == list(range(before[number], before[number] + mine.size))


def test_another_seed_gives_another_order() -> None:
    places = [SampleOrder([1000], weights=[1.0], seed=s).locate(np.arange(100)).window.tolist() for s in (1, 2)]
    assert places[0] != places[1]


def test_epochs_are_counted_per_source() -> None:
    order = SampleOrder([100, 300], weights=[1.0, 1.0], seed=0)
    assert order.epochs(600) == pytest.approx([3.0, 1.0])


def test_a_source_of_any_weight_above_zero_is_drawn_eventually() -> None:
    order = SampleOrder([10, 10], weights=[1.0, 1e-7], seed=0)
    assert order.samples_drawn(10**8).tolist() == [10**8 - 10, 10]
    for weights in ([1.0, 1e-30], [1e-30, 1.0], [1e-30, 1.0, 1e-30, 0.0]):
        drawn = SampleOrder([10] * len(weights), weights=weights, seed=0).samples_drawn(1 << 40)
        assert (drawn > 0).tolist() == [weight > 0 for weight in weights]


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(DataError, match="less than one sample"):
        SampleOrder([10, 0], weights=[1.0, 1.0], seed=0)


def test_the_order_of_a_seed_never_changes() -> None:
    location = SampleOrder([1000, 50], weights=[3.0, 1.0], seed=42).locate(np.arange(8))
    assert location.source.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert location.window.tolist() == [76, 304, 0, 868, 680, 25, 25, 319]


def test_the_order_of_a_seed_with_stages_never_changes() -> None:
    order = SampleOrder(
        [1000, 50], weights=[3.0, 1.0], seed=42, later=[MixtureStage(4, (1.0, 3.0)), MixtureStage(70_000, (1.0, 0.0))]
    )
    location = order.locate([*range(8), 69_999, 70_000, 10**12])
    assert location.source.tolist() == [0, 0, 1, 0, 1, 0, 1, 1, 1, 0, 0]
    assert location.window.tolist() == [76, 304, 0, 868, 25, 680, 44, 32, 2, 932, 324]


def test_the_order_of_a_seed_with_many_sources_never_changes() -> None:
    order = SampleOrder([100, 50, 1000, 7, 3], weights=[1.0, 0.7, 5.0, 0.1, 0.3], seed=42)
    location = order.locate([*range(12), 10**12])
    assert location.source.tolist() == [2, 0, 2, 2, 2, 1, 2, 2, 2, 0, 2, 4, 2]
    assert location.window.tolist() == [69, 65, 971, 866, 666, 0, 172, 208, 46, 73, 932, 1, 385]


def data_steps(skips: Skips, first: int, last: int) -> list[int]:
    return [skips.data_step(step) for step in range(first, last + 1)]


def test_a_skip_after_the_checkpoint_is_dropped_on_rollback() -> None:
    skips = Skips((Skip(11, 5),))
    assert data_steps(skips, 5, 13) == [5, 6, 7, 8, 9, 10, 16, 17, 18]
    # back behind the skip, as when the newer checkpoint is damaged: up to data step 18 all is passed over, and no more
    again = skips.past(13, since=5)
    assert data_steps(again, 4, 16) == [4, 5, *range(19, 30)]
    assert again.plain() == [[6, 13]]


def test_a_skip_from_the_same_or_an_older_checkpoint_is_kept() -> None:
    skips = Skips((Skip(4, 2), Skip(11, 5)))
    assert data_steps(skips.past(12, since=10), 2, 13) == [2, 3, *range(6, 13), 20, 21, 22]
    assert data_steps(skips.past(12, since=7), 2, 13) == [2, 3, *range(6, 10), *range(20, 26)]


@pytest.mark.parametrize("seed", range(20))
def test_after_any_rollbacks_all_data_is_seen_except_what_was_skipped(seed: int) -> None:
    draw = np.random.default_rng(seed)
    skips, done = NO_SKIPS, 0
    for _ in range(8):
        bad = done + int(draw.integers(1, 7))
        since = int(draw.integers(0, bad))  # any checkpoint before it
        seen, worst = data_steps(skips, 1, since), skips.data_step(bad)
        skips, done = skips.past(bad, since=since), since
        assert data_steps(skips, 1, since) == seen
        assert data_steps(skips, since + 1, since + 50) == list(range(worst + 1, worst + 51))


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_size_and_key_gives_a_bijection(size: int, key: int) -> None:
    image = permute(np.arange(size), size=size, key=key)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_the_permutation_of_a_seed_never_changes() -> None:
    # a change here would reorder every run that was ever started
    assert derive_key(0, "order", 0, 0) == 15795486220574745144
    assert permute(np.arange(10), size=10, key=1).tolist() == [0, 6, 3, 4, 8, 5, 1, 9, 7, 2]
    assert permute([0, 1, 10**12 - 1], size=10**12, key=7).tolist() == [181898638028, 980027242478, 101060926037]


def test_a_permutation_of_a_trillion_needs_no_memory() -> None:
    picks = permute(np.arange(0, 10**12, 10**8), size=10**12, key=3)
    assert len(set(picks.tolist())) == 10_000
    assert 0.45e12 < picks.mean() < 0.55e12  # uniform: the mean of 10,000 has a standard deviation of 0.003e12


@pytest.mark.parametrize("size", [64, 1000, 4097])
def test_the_order_looks_random(size: int) -> None:
    image = permute(np.arange(size), size=size, key=5).astype(float)
    neighbors = np.corrcoef(image[:-1], image[1:])[0, 1]
    assert abs(neighbors) < 4 / np.sqrt(size)  # four standard deviations of a random order
    assert abs(np.corrcoef(image, np.arange(size))[0, 1]) < 4 / np.sqrt(size)


def test_each_index_may_have_its_own_key() -> None:
    keys = np.array([1, 2, 1, 2], dtype=np.uint64)
    mixed = permute([3, 3, 4, 4], size=100, key=keys)
    apart = [permute([i], size=100, key=int(k))[0] for i, k in zip([3, 3, 4, 4], keys, strict=True)]
    assert mixed.tolist() == apart


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
    accounts = StepAccounts.constant(4096, 2048, 1 << 40)
    assert skips.samples(at, accounts) == range((at + 2**31 - 1) * 4096, (at + 2**31) * 4096)
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


def test_a_stage_goes_on_with_a_source_where_the_stage_before_stopped() -> None:
    whole = SampleOrder([50, 70], weights=[1.0, 2.0], seed=3)
    before = SampleOrder([50, 70], weights=[3.0, 1.0], seed=3)
    start = OrderStart(40, (0, 1), tuple(before.samples_drawn(40).tolist()))
    after = SampleOrder([50, 70], weights=[1.0, 5.0], seed=3, start=start)
    drawn = [before.locate(np.arange(40)), after.locate(np.arange(40, 80))]
    for source in (0, 1):
        windows = np.concatenate([each.window[each.source == source] for each in drawn])
        own = whole.locate(np.arange(400))
        assert windows.tolist() == own.window[own.source == source][: windows.size].tolist()
    assert after.samples_seen(40).tolist() == (before.samples_drawn(40) + after.samples_drawn(40)).tolist()
    anew = SampleOrder([50], weights=[1.0], seed=3, start=OrderStart(40, (2,), (0,)))
    shuffled = anew.locate(np.arange(40, 90)).window.tolist()
    assert sorted(shuffled) == list(range(50))  # an epoch of its own,
    assert (
        shuffled != SampleOrder([50], weights=[1.0], seed=3).locate(np.arange(50)).window.tolist()
    )  # in another order


def test_data_skipped_across_a_border_is_trained_by_neither_stage() -> None:
    levels = [StageBatches("a", 4, 8, UntilSection(steps=10)), StageBatches("b", 6, 16)]
    accounts = make_accounts(levels, steps=20, tokens=None)
    bad = NO_SKIPS.samples(12, accounts)
    skips = NO_SKIPS.past(12, since=8, accounts=accounts)
    assert Skips.of(json.loads(json.dumps(skips.plain()))) == skips
    trained = [number for step in range(1, 21) for number in skips.samples(step, accounts)]
    assert len({*trained}) == len(trained) == accounts.samples(20)
    assert not {*range(NO_SKIPS.samples(9, accounts)[0], bad[-1] + 1)} & {*trained}
    assert skips.consumed(20, accounts) == trained[-1] + 1
