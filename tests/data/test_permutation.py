"""The O(1) permutation: a bijection for every size and key, and the same one for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.permutation import derive_key, permute


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
