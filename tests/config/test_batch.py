"""Batch arithmetic: any two of the three numbers give the third, and what does not divide is refused with numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.base.section import parse
from pipeline.config.batch import BatchSizes, fill_batch, resolve_batch
from pipeline.config.schema import Config

MINIMAL = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"path": "t"}], "sequence_length": 16},
    "run": {"dir": "r", "steps": 1},
}


def resolved(dp: int, **keys: Any) -> BatchSizes:
    given_keys = {key: value for key, value in keys.items() if value is not None}
    return resolve_batch(parse(Config, {**MINIMAL, **given_keys}), dp=dp)


@given(dp=st.integers(1, 64), micro=st.integers(1, 16), accumulation=st.integers(1, 16))
def test_the_missing_number_follows_from_the_others(dp: int, micro: int, accumulation: int) -> None:
    total = dp * micro * accumulation
    whole = BatchSizes(total, micro, accumulation, dp, 16)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for left_out in names:
        keys = dict(zip(names, (total, micro, accumulation), strict=True))
        keys.pop(left_out)
        assert resolved(dp, **keys) == whole


@given(dp=st.integers(1, 64), micro=st.integers(1, 8))
def test_with_the_total_alone_nothing_is_accumulated(dp: int, micro: int) -> None:
    assert resolved(dp, train_batch_size=dp * micro) == BatchSizes(dp * micro, micro, 1, dp, 16)


def test_a_total_that_dp_does_not_divide_is_refused_with_the_nearest_two() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = 500\n.*dp 8 x .* 4\n.*use 480 or 512"):
        resolved(8, train_batch_size=500, train_micro_batch_size_per_gpu=4)


def test_a_total_smaller_than_one_micro_batch_each_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match="use 8,"):
        resolved(8, train_batch_size=4)


def test_numbers_that_contradict_each_other_are_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = 3\n.*needs 4"):
        resolved(2, train_batch_size=16, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)


def test_no_numbers_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples per step"):
        resolved(2)


def elastic(dp: int, total: int, micro: int, **more: Any) -> BatchSizes:
    keys = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": None}
    given_keys = {key: value for key, value in (keys | more).items() if value is not None}
    return resolve_batch(parse(Config, {**MINIMAL, **given_keys}), dp=dp, elastic=True)


@given(
    total=st.integers(1, 600),
    largest=st.integers(1, 16),
    dp=st.integers(1, 70),
    pp=st.integers(1, 8),
    interleaved=st.booleans(),
)
def test_any_number_of_ranks_has_a_place_for_every_sample(
    total: int, largest: int, dp: int, pp: int, interleaved: bool
) -> None:
    micro, passes = fill_batch(total, largest, dp=dp, least=pp, rounds=pp if interleaved else 1)
    assert micro * passes * dp >= total
    assert micro <= largest
    assert passes >= pp
    assert passes % pp == 0 or not interleaved
    if pp == 1:  # no whole pass of all ranks is filling
        assert micro * (passes - 1) * dp < total


@given(dp=st.integers(1, 64), micro=st.integers(1, 16), accumulation=st.integers(1, 16))
def test_an_elastic_run_on_ranks_that_divide_its_batch_is_cut_as_any_other(
    dp: int, micro: int, accumulation: int
) -> None:
    total = dp * micro * accumulation
    assert elastic(dp, total, micro) == BatchSizes(total, micro, accumulation, dp, 16)


def test_a_smaller_micro_batch_comes_before_much_filling() -> None:
    assert str(elastic(3, 8, 2)) == (
        "8 samples per step = 1 per micro-batch x 3 accumulated x dp 3 less 1 of 9 rows, which are filling"
        " (train_micro_batch_size_per_gpu 2 gave way); x 16 tokens = 128 tokens per step"
    )
    # 17 passes of one row would have 47 fewer of 1134 rows, and take 14 passes more
    assert elastic(63, 1024, 8) == BatchSizes(1024, 6, 3, 63, 16, ("train_micro_batch_size_per_gpu 8",))


def test_an_accumulation_for_other_ranks_gives_way_and_is_named() -> None:
    batch = elastic(2, 16, 2, gradient_accumulation_steps=2)
    assert (batch.accumulation, batch.filling) == (4, 0)
    assert "gradient_accumulation_steps 2 gave way" in str(batch)


@pytest.mark.parametrize("missing", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_an_elastic_run_does_not_leave_out_what_would_follow_the_number_of_processes(missing: str) -> None:
    keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    del keys[missing]
    with pytest.raises(ConfigError, match=rf"{missing}\n.*parallel\.elastic"):
        resolve_batch(parse(Config, {**MINIMAL, **keys, "parallel": {"elastic": True}}), dp=2, elastic=True)
