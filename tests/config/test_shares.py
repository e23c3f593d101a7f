"""Shares of a batch: divided by largest remainder within what a layout allows, and refused where it allows none."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.shares import ShareRule, largest_remainder
from tests.conftest import tiny_config, write_config


def resolved(tmp_path: Path, *sets: str, processes: int = 2, **fields: Any) -> ResolvedRun:
    defaults = {"engine": "torch", "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", **(defaults | fields))
    return resolve(load_config(write_config(tmp_path / "c.json", config), list(sets)), world_size=processes)


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
    batch = resolved(tmp_path, "parallel.shares=[3, 3, 2]", processes=3, train_batch_size=16).batch
    assert str(batch) == (
        "16 samples per step = samples per data rank 6 (x 2), 4, in up to 2 micro-batches of up to 4;"
        " x 32 tokens = 512 tokens per step"
    )
    assert (batch.rows, batch.padding_rows, batch.accumulation) == (16, 0, 2)


def test_without_a_micro_batch_the_largest_share_is_one(tmp_path: Path) -> None:
    fields = {"train_micro_batch_size_per_gpu": None}
    assert resolved(tmp_path, "parallel.shares=[3, 1]", **fields).batch.micro == 6
    again = resolved(tmp_path, "parallel.shares=[3, 1]", "gradient_accumulation_steps=2", **fields).batch
    assert (again.micro, again.accumulation) == (3, 2)


def test_compiled_layers_keep_their_shapes(tmp_path: Path) -> None:
    sets = ("parallel.shares=auto", "compile.enabled=true", "train_micro_batch_size_per_gpu=2")
    batch = resolved(tmp_path, *sets, train_batch_size=12).batch
    assert batch.shares is not None
    assert {size for sizes in batch.shares.sizes for size in sizes} == {2}


def test_measured_shares_stay_with_an_elastic_run_and_its_fallback_layouts(tmp_path: Path) -> None:
    layouts = '[{"tp": 1}]'
    sets = ["parallel.shares=auto", "parallel.tp=2", f"launch.fallback_layouts={layouts}"]
    run = resolved(tmp_path, *sets, processes=1)
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
        resolved(tmp_path, *sets, processes=processes)
    assert caught.value.field == field
    assert words in str(caught.value)
