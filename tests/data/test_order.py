"""Law 1: which tokens are in sample i is a pure function of (data, mixture, seed, i), and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import DataError
from pipeline.data.sample_order import SampleOrder
from pipeline.data.weighted_sources import MixtureStage, WeightedSources

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
