"""Batch sizes and a batch's shares: two keys give the third, samples are divided by largest remainder, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.batch import BatchSizes, resolve_batch, split_batch, split_padded_batch
from pipeline.config.sections.run import Config
from pipeline.config.shares import ShareRule, largest_remainder
from pipeline.config.topology import AXES, Topology
from tests.config.rules import test_rules

MINIMAL = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"path": "t"}], "sequence_length": 16},
    "run": {"dir": "r", "steps": 1},
}
SIZES = st.integers(1, 4)


def batch_of(dp: int, **keys: Any) -> BatchSizes:
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
        assert batch_of(dp, **keys) == whole


@given(dp=st.integers(1, 64), micro=st.integers(1, 8))
def test_with_the_global_batch_alone_there_is_no_gradient_accumulation(dp: int, micro: int) -> None:
    assert batch_of(dp, train_batch_size=dp * micro) == BatchSizes(dp * micro, micro, 1, dp, 16)


def test_a_global_batch_that_dp_does_not_divide_is_refused_with_the_nearest_two() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = 500\n.*dp 8 x .* 4\n.*use 480 or 512"):
        batch_of(8, train_batch_size=500, train_micro_batch_size_per_gpu=4)


def test_a_global_batch_smaller_than_dp_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match="use 8,"):
        batch_of(8, train_batch_size=4)


def test_contradictory_batch_keys_are_refused_with_the_right_accumulation() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = 3\n.*needs 4"):
        batch_of(2, train_batch_size=16, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)


def test_a_config_without_batch_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples per step"):
        batch_of(2)


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
        batch_of(dp=1, **sizes)
    assert batch_of(dp=8, **sizes).accumulation == 8
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


ONE_MICRO_BATCH = {"engine": "torch", "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
shared = partial(test_rules.resolved, world_size=2, **ONE_MICRO_BATCH)


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ((3, 3, 2), 16, (6, 6, 4)),
        ((3, 3, 2), 10, (4, 4, 2)),  # quotas 3.75, 3.75, 2.5: the larger remainders are rounded up
        ((1, 1, 1), 8, (3, 3, 2)),  # the lowest ranks of several
        ((1000, 1), 8, (7, 1)),  # no rank is left without a sample
    ],
)
def test_samples_are_divided_by_largest_remainder(weights: Any, total: int, expected: tuple[int, ...]) -> None:
    assert largest_remainder(weights, total, least=1) == expected


def test_every_division_has_each_sample_once_and_no_micro_batch_above_the_largest() -> None:
    random = Random(0)
    for _ in range(300):
        dp, micro, lockstep = random.randint(1, 6), random.randint(1, 8), random.random() < 0.5
        unit = random.choice([0, 0, 1, 2])
        least = random.randint(1, 3)
        size = max(1, unit * micro)
        samples = size * random.randint(least * dp, least * dp + 40)
        rule = ShareRule(samples, dp, micro, lockstep=lockstep and not unit, unit=unit, least=least if unit else 1)
        if rule.lockstep and -(-samples // (dp * micro)) > samples // dp:
            continue  # e.g. 3 samples on 2 ranks in micro-batches of 1, which is refused
        weights = [random.lognormvariate(0, 1) for _ in range(dp)]
        shares = rule.divide(weights)
        assert [sample for rank in range(dp) for sample in shares.samples(rank)] == list(range(samples))
        sizes = [each for rank in shares.sizes for each in rank]
        assert 1 <= min(sizes) <= max(sizes) <= micro
        if rule.lockstep:
            assert len({len(rank) for rank in shares.sizes}) == 1
        if unit:
            assert set(sizes) == {micro}
            assert all(len(rank) % unit == 0 and len(rank) >= unit * least for rank in shares.sizes)
        if not unit and not rule.lockstep:
            quotas = [samples * weight / sum(weights) for weight in weights]
            if min(quotas) >= 1:
                assert all(abs(count - quota) < 1 for count, quota in zip(shares.counts, quotas, strict=True))


def test_in_lockstep_the_division_that_takes_least_time_is_taken_where_the_weights_go_too_far() -> None:
    rule = ShareRule(16, 2, 4, lockstep=True)
    assert rule.divide([3, 1]).counts == (12, 4)
    shares = rule.divide([100, 1])  # at most 4 times as many
    assert shares.counts == (12, 4)
    assert shares.sizes == ((4, 4, 4), (2, 1, 1))


def test_the_batch_arithmetic_is_printed(tmp_path: Path) -> None:
    batch = shared(tmp_path, "parallel.shares=[3, 3, 2]", world_size=3, train_batch_size=16).batch
    assert str(batch) == (
        "16 samples per step = samples per data rank 6 (x 2), 4, in up to 2 micro-batches of up to 4;"
        " x 32 tokens = 512 tokens per step"
    )
    assert (batch.rows, batch.padding_rows, batch.accumulation) == (16, 0, 2)


def test_without_a_micro_batch_the_largest_share_is_one(tmp_path: Path) -> None:
    fields = {"train_micro_batch_size_per_gpu": None}
    assert shared(tmp_path, "parallel.shares=[3, 1]", **fields).batch.micro == 6
    again = shared(tmp_path, "parallel.shares=[3, 1]", "gradient_accumulation_steps=2", **fields).batch
    assert (again.micro, again.accumulation) == (3, 2)


def test_compiled_layers_keep_their_shapes(tmp_path: Path) -> None:
    sets = ("parallel.shares=auto", "compile.enabled=true", "train_micro_batch_size_per_gpu=2")
    batch = shared(tmp_path, *sets, train_batch_size=12).batch
    assert batch.shares is not None
    assert {size for sizes in batch.shares.sizes for size in sizes} == {2}


def test_measured_shares_stay_with_an_elastic_run_and_its_fallback_layouts(tmp_path: Path) -> None:
    layouts = '[{"tp": 1}]'
    sets = ["parallel.shares=auto", "parallel.tp=2", f"launch.fallback_layouts={layouts}"]
    run = shared(tmp_path, *sets, world_size=1)
    assert (run.fallback is not None, run.config.parallel.shares) == (True, "auto")


REFUSED: dict[str, tuple[list[str], int, str, str]] = {
    "a list of another length": (["parallel.shares=[3, 3, 2]"], 2, "parallel.shares", "has 3 numbers"),
    "a negative share": (["parallel.shares=[3, -1]"], 2, "parallel.shares", "above 0"),
    "no share at all": (["parallel.shares=[0, 0]"], 2, "parallel.shares", "at least one sample"),
    "a batch smaller than dp": (["parallel.shares=auto", "train_batch_size=2"], 3, "train_batch_size", "3 or more"),
    "samples that lockstep cannot divide": (
        ["parallel.shares=auto", "zero_optimization.stage=3", "train_micro_batch_size_per_gpu=1", "train_batch_size=3"],
        2, "train_micro_batch_size_per_gpu", "use 2 or more",
    ),
    "a list in an elastic run": (["parallel.shares=[3, 1]", "parallel.elastic=true"], 2, "parallel.shares", "auto"),
    "the reference": (["parallel.shares=auto", "engine=reference"], 1, "parallel.shares", "reference"),
    "a pipeline at stage 3": (
        ["parallel.shares=auto", "parallel.pp=2", "zero_optimization.stage=3"], 4, "parallel.shares", "stage 0 or 2",
    ),
    "shares that lockstep does not allow": (
        ["parallel.shares=[3, 1]", "zero_optimization.stage=3", "train_micro_batch_size_per_gpu=2"],
        2, "train_micro_batch_size_per_gpu", "use 3 or more",
    ),
    "a pipeline with a part of a micro-batch": (
        ["parallel.shares=auto", "parallel.pp=2", "train_micro_batch_size_per_gpu=3"],
        4, "train_batch_size", "use 6 or 9",
    ),
    "a pipeline with too few micro-batches": (
        ["parallel.shares=[3, 1]", "parallel.pp=2"], 4, "train_batch_size", "use 16 or more",
    ),
    "measured shares, compiled, in lockstep": (
        ["parallel.shares=auto", "compile.enabled=true", "zero_optimization.stage=3"], 2, "parallel.shares", "compile",
    ),
    "gradients reduced in bf16 once per step": (
        ["parallel.shares=auto", "bf16.enabled=true", "communication_data_type=bf16", "train_batch_size=4"],
        2, "communication_data_type", "parallel.shares auto",
    ),
    "samples of a student": (
        ["parallel.shares=auto", "distill.teacher=t", 'distill.on_policy={"fraction": 0.5, "prompt_tokens": 8}'],
        2, "parallel.shares", "distill.on_policy",
    ),
    "fp8 with odd sizes": (
        ["parallel.shares=auto", "bf16.enabled=true", "fp8.enabled=true", "data.sequence_length=40"],
        2, "parallel.shares", "multiple of 16",
    ),
    "a word": (["parallel.shares=even"], 2, "parallel.shares", "auto"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_shares_do_not_combine_with_is_refused(tmp_path: Path, name: str) -> None:
    sets, processes, field, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        shared(tmp_path, *sets, world_size=processes)
    assert caught.value.field == field
    assert words in str(caught.value)
