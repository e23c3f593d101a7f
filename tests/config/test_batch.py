"""Batch sizes: any two of the three keys give the third, and sizes that do not divide are refused with the nearest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.batch import BatchSizes, resolve_batch, split_batch, split_padded_batch
from pipeline.config.sections.run import Config
from pipeline.config.topology import AXES, Topology

MINIMAL = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"path": "t"}], "sequence_length": 16},
    "run": {"dir": "r", "steps": 1},
}
SIZES = st.integers(1, 4)


def resolved(dp: int, **keys: Any) -> BatchSizes:
    given_keys = {key: value for key, value in keys.items() if value is not None}
    return resolve_batch(parse(Config, {**MINIMAL, **given_keys}), dp=dp)


@given(dp=st.integers(1, 64), micro=st.integers(1, 16), accumulation=st.integers(1, 16))
def test_the_missing_batch_key_is_derived_from_the_other_two(dp: int, micro: int, accumulation: int) -> None:
    total = dp * micro * accumulation
    whole = BatchSizes(total, micro, accumulation, dp, 16)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for left_out in names:
        keys = dict(zip(names, (total, micro, accumulation), strict=True))
        keys.pop(left_out)
        assert resolved(dp, **keys) == whole


@given(dp=st.integers(1, 64), micro=st.integers(1, 8))
def test_with_the_global_batch_alone_there_is_no_gradient_accumulation(dp: int, micro: int) -> None:
    assert resolved(dp, train_batch_size=dp * micro) == BatchSizes(dp * micro, micro, 1, dp, 16)


def test_a_global_batch_that_dp_does_not_divide_is_refused_with_the_nearest_two() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = 500\n.*dp 8 x .* 4\n.*use 480 or 512"):
        resolved(8, train_batch_size=500, train_micro_batch_size_per_gpu=4)


def test_a_global_batch_smaller_than_dp_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match="use 8,"):
        resolved(8, train_batch_size=4)


def test_contradictory_batch_keys_are_refused_with_the_right_accumulation() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = 3\n.*needs 4"):
        resolved(2, train_batch_size=16, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)


def test_a_config_without_batch_keys_is_refused() -> None:
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
def test_a_padded_split_has_a_row_for_every_sample_on_any_number_of_ranks(
    total: int, largest: int, dp: int, pp: int, interleaved: bool
) -> None:
    micro, accumulation = split_padded_batch(
        total, largest, dp=dp, min_micro_batches=pp, multiple_of=pp if interleaved else 1
    )
    assert micro * accumulation * dp >= total
    assert micro <= largest
    assert accumulation >= pp
    assert accumulation % pp == 0 or not interleaved
    if pp == 1:  # no whole micro-batch of all ranks is padding
        assert micro * (accumulation - 1) * dp < total


@given(dp=st.integers(1, 64), micro=st.integers(1, 16), accumulation=st.integers(1, 16))
def test_an_elastic_run_whose_batch_divides_is_split_like_any_other(dp: int, micro: int, accumulation: int) -> None:
    total = dp * micro * accumulation
    assert elastic(dp, total, micro) == BatchSizes(total, micro, accumulation, dp, 16)


def test_a_smaller_micro_batch_is_preferred_to_many_padding_rows() -> None:
    assert str(elastic(3, 8, 2)) == (
        "8 samples per step = micro-batch 1 x accumulation 3 x dp 3 less 1 of 9 rows, which are padding"
        " (adjusted: train_micro_batch_size_per_gpu 2); x 16 tokens = 128 tokens per step"
    )
    # 17 micro-batches of one row would save 63 of 1134 rows, and take 14 passes more
    assert elastic(63, 1024, 8) == BatchSizes(1024, 6, 3, 63, 16, ("train_micro_batch_size_per_gpu 8",))


def test_an_accumulation_for_another_number_of_ranks_is_adjusted_and_named() -> None:
    batch = elastic(2, 16, 2, gradient_accumulation_steps=2)
    assert (batch.accumulation, batch.padding_rows) == (4, 0)
    assert "adjusted: gradient_accumulation_steps 2" in str(batch)


def test_without_a_micro_batch_size_too_an_adjusted_accumulation_is_named() -> None:
    batch = resolve_batch(
        parse(Config, {**MINIMAL, "train_batch_size": 8, "gradient_accumulation_steps": 3}), dp=1, elastic=True
    )
    assert batch == BatchSizes(8, 2, 4, 1, 16, ("gradient_accumulation_steps 3",))  # 3 x 3 rows cost more than 4 x 2


@pytest.mark.parametrize("missing", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_an_elastic_run_requires_the_sizes_that_would_depend_on_the_number_of_processes(missing: str) -> None:
    keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    del keys[missing]
    with pytest.raises(ConfigError, match=rf"{missing}\n.*parallel\.elastic"):
        resolve_batch(parse(Config, {**MINIMAL, **keys, "parallel": {"elastic": True}}), dp=2, elastic=True)


def test_a_batch_that_fits_more_processes_says_how_many_and_they_fit() -> None:
    sizes = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    with pytest.raises(ConfigError, match="--processes 8"):
        resolved(dp=1, **sizes)
    assert resolved(dp=8, **sizes).accumulation == 8
    with pytest.raises(ConfigError, match="start 8 processes"):
        split_batch(256, 16, None, dp=3, model_ranks=4)
    assert split_batch(256, 16, None, dp=2) == (256, 16, 8)


def test_accumulation_alone_is_refused_with_a_batch_that_it_divides() -> None:
    with pytest.raises(ConfigError) as refused:
        split_batch(None, None, 5, dp=3)
    total = int(refused.value.remedy.split(": ")[1].split(",")[0])
    assert split_batch(total, None, 5, dp=3) == (120, 8, 5)


@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES)
def test_rank_and_coordinates_are_inverse(pp: int, dp: int, cp: int, tp: int) -> None:
    topology = Topology(pp=pp, dp=dp, cp=cp, tp=tp)
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert [topology.rank(**place) for place in places] == list(range(topology.world_size))


@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES, axis=st.sampled_from(AXES))
def test_the_groups_of_an_axis_partition_the_ranks(pp: int, dp: int, cp: int, tp: int, axis: str) -> None:
    topology = Topology(pp=pp, dp=dp, cp=cp, tp=tp)
    groups = {tuple(topology.group(rank, axis)) for rank in range(topology.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))


def test_tensor_parallel_ranks_are_neighbors_and_stages_lie_furthest_apart() -> None:
    topology = Topology(pp=2, dp=2, tp=2)
    assert topology.group(0, "tp") == [0, 1]
    assert topology.group(0, "dp") == [0, 2]
    assert topology.group(0, "pp") == [0, 4]
