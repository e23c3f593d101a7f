"""Batch arithmetic: any two of the three numbers give the third, and what does not divide is refused with numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.section import parse
from pipeline.config.batch import Batch, resolve_batch
from pipeline.config.schema import Config

MINIMAL = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"path": "t"}], "sequence_length": 16},
    "run": {"dir": "r", "steps": 1},
}


def resolved(dp: int, **keys: Any) -> Batch:
    given_keys = {key: value for key, value in keys.items() if value is not None}
    return resolve_batch(parse(Config, {**MINIMAL, **given_keys}), dp=dp)


@given(dp=st.integers(1, 64), micro=st.integers(1, 16), accumulation=st.integers(1, 16))
def test_the_missing_number_follows_from_the_others(dp: int, micro: int, accumulation: int) -> None:
    total = dp * micro * accumulation
    whole = Batch(total, micro, accumulation, dp, 16)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for left_out in names:
        keys = dict(zip(names, (total, micro, accumulation), strict=True))
        keys.pop(left_out)
        assert resolved(dp, **keys) == whole


@given(dp=st.integers(1, 64), micro=st.integers(1, 8))
def test_with_the_total_alone_nothing_is_accumulated(dp: int, micro: int) -> None:
    assert resolved(dp, train_batch_size=dp * micro) == Batch(dp * micro, micro, 1, dp, 16)


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
