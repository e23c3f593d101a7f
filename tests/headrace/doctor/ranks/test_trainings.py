"""The checks of `headrace doctor` that start trainings, healthy and with each fault put in, on two CPU processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor.checks.shared import LAYOUTS
from tests import warm
from tests.headrace.doctor.ranks.test_ranks import config_with
from tests.support import output_of


def found(
    name: str, work: Path, *, config: str = "", fault: str = "", everything: str = "", limit_s: float = 240.0
) -> list[dict[str, Any]]:
    """The findings of a check, which runs in a process of its own, as under the runner."""
    module = "tests.headrace.doctor.ranks.launched"
    (work / "work").mkdir()
    done = warm.run("-m", module, name, work / "work", config, fault, everything, limit_s)
    return [json.loads(line) for line in output_of(done).splitlines()]


RING = {"parallel": {"cp": 2, "cp_method": "ring"}, "zero_optimization": {"stage": 3}}


@pytest.mark.sweep
def test_gradients_of_the_configs_layout_equal_those_of_one_process(tmp_path: Path) -> None:
    [finding] = found("trainings_gradients", tmp_path, config=config_with(tmp_path / "c.json", **RING))
    assert finding["passed"], finding
    assert "cp 2" in finding["text"]
    assert finding["figures"]["gradient"] < 1e-5


def test_swapped_gradients_on_one_rank_are_found(tmp_path: Path) -> None:
    config = config_with(tmp_path / "c.json", **RING)
    [finding] = found("trainings_gradients", tmp_path, config=config, fault="swapped_gradients")
    assert finding["passed"] is False
    assert finding["figures"]["gradient"] > 0.01
    assert "_proj" in finding["text"]


@pytest.mark.sweep
def test_every_layout_of_the_table_is_compared(tmp_path: Path) -> None:
    findings = found("trainings_gradients", tmp_path, everything="all", limit_s=1000.0)
    assert len(findings) >= len(LAYOUTS["layouts"])
    assert {each["passed"] for each in findings} <= {True, None}, [f for f in findings if f["passed"] is False]
    assert [each["text"] for each in findings if each["passed"] is None] == [
        "fp8: fp8 products take larger matrices than a shrunk model's: it is seen in bf16."
    ]


def test_schedules_are_timed_against_their_simulation_and_a_straggler_is_named(tmp_path: Path) -> None:
    config = config_with(tmp_path / "c.json", parallel={"pp": 2, "schedule": "gpipe"}, zero_optimization={"stage": 0})
    healthy, slow = found("trainings_schedules", tmp_path, config=config, fault="slow_rank")
    assert healthy["passed"], healthy
    assert healthy["figures"]["ratio"] == pytest.approx(1.0)
    assert slow["passed"] is False
    assert slow["where"] == "rank 1"
    assert slow["figures"]["ratio"] > 2


def test_a_checkpoint_saved_during_steps_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    equal, losses = found("trainings_resume", tmp_path)
    assert equal["passed"], equal
    # 8 layers make 75 parameters, of which a shrunk model keeps 3 layers' ones, each with two moments
    assert equal["figures"]["tensors"] > 50
    assert losses["passed"], losses


@pytest.mark.parametrize(
    ("fault", "words"), [("damaged_checkpoint", "damaged files"), ("changed_moment", "1 differ: exp_avg_sq/")]
)
def test_a_changed_checkpoint_is_found(tmp_path: Path, fault: str, words: str) -> None:
    finding = found("trainings_resume", tmp_path, fault=fault)[0]
    assert finding["passed"] is False
    assert words in finding["text"]


@pytest.mark.sweep
def test_lost_ranks_are_named_and_the_run_goes_on(tmp_path: Path) -> None:
    findings = found("trainings_lost_ranks", tmp_path, everything="all")
    assert [each["passed"] for each in findings] == [True] * 5, findings
    assert all(each["figures"]["seconds_until_all_ended"] < 60 for each in findings[:4])
    assert all("named were ranks [1]" in each["text"] for each in findings[:4])


def test_a_stopped_rank_that_nobody_names_is_found(tmp_path: Path) -> None:
    finding = found("trainings_lost_ranks", tmp_path, fault="no_watchdog")[0]
    assert finding["passed"] is False
    assert "named were ranks [], and processes were left after 6 s" in finding["text"]


def test_memory_beyond_the_plan_and_retries_of_the_allocator_are_found(tmp_path: Path) -> None:
    memory, retries, _ = found("trainings_plan", tmp_path, fault="more_memory")
    assert memory["passed"] is retries["passed"] is False
    assert "retry 3 times" in retries["text"]


@pytest.mark.sweep
def test_the_steps_of_a_config_take_the_memory_of_the_plan(tmp_path: Path) -> None:
    memory, speed = found("trainings_plan", tmp_path)
    assert memory["passed"], memory
    assert speed["passed"] is None  # a CPU has no known peak
