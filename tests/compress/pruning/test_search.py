"""The shape that a target gives: within it, by the documented rule, and none where there is none."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from pipeline.compress.pruning.search import Choices, search

CHOICES = Choices({"a": 96, "b": 40, "c": 7}, {"a": [32, 64, 96], "b": [10, 20, 30, 40]})


def cost(shape: Mapping[str, int]) -> float:
    return shape["a"] * shape["b"] + shape["c"]


def test_the_axes_shrink_together_and_the_rest_of_the_budget_goes_to_the_one_that_lost_most() -> None:
    # at 3/4 of both it costs 1927
    assert search(CHOICES, cost, 1927) == {"a": 64, "b": 30, "c": 7}
    # half of both costs 647, and 2/3 of both 1287, with 64 and 20; what is left of 1000 is enough for 32 and 30, at 967
    assert search(CHOICES, cost, 1000, grow=False) == {"a": 32, "b": 20, "c": 7}
    assert search(CHOICES, cost, 1000) == {"a": 32, "b": 30, "c": 7}


def test_coarse_sizes_do_not_leave_a_target_unused() -> None:
    """18 of both, at 325, can grow no further within 405; 10 and 40 are nearer."""
    coarse = Choices({"a": 40, "b": 40, "c": 1}, {"a": [10, 18, 40], "b": [10, 18, 40]})
    assert search(coarse, cost, 405, grow=False) == {"a": 18, "b": 18, "c": 1}
    assert search(coarse, cost, 405) in ({"a": 10, "b": 40, "c": 1}, {"a": 40, "b": 10, "c": 1})
    assert search(coarse, cost, 340) == {"a": 18, "b": 18, "c": 1}  # used to 96 %


def test_nothing_is_found_below_the_smallest_sizes() -> None:
    assert search(CHOICES, cost, 32 * 10 + 6) is None
    assert search(CHOICES, cost, 32 * 10 + 7) == {"a": 32, "b": 10, "c": 7}


@given(st.integers(min_value=327, max_value=96 * 40 + 7))
def test_what_is_found_fits_and_no_axis_could_be_larger(limit: int) -> None:
    shape = search(CHOICES, cost, limit)
    assert cost(shape) <= limit
    for axis, sizes in CHOICES.allowed.items():
        assert all(cost({**shape, axis: size}) > limit for size in sizes if size > shape[axis])
