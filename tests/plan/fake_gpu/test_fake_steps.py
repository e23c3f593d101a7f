"""Configs of every kind, and the training loop, execute steps on the fake device as the committed table says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.plan.fake_gpu import guard
from pipeline.plan.fake_gpu.case import StepCase
from tests.conftest import ROOT, selected, tiny_config, write_config
from tests.plan.fake_gpu.cells import differences, gating_cases, measured, run_cases
from tests.support import output_of

pytestmark = pytest.mark.skipif(guard.missing() is not None, reason=guard.missing() or "")


EXCHANGES = {
    "gate: expert parallelism": {"_sizes": 2 * 4},  # once per layer, and once more when it is computed again
    "gate: expert parallelism, selective": {"_sizes": 4},
    "gate: expert parallelism beside another micro-batch": {"_sizes": 2 * 2 * 8},  # of each of two micro-batches
    "gate: latent attention and shared experts": {"_sizes": 2},
}


SWEPT = {
    "gate: small moments",
    "gate: ring attention",
    "gate: mixture of experts",
    "gate: expert parallelism",
}
"""Cells for `make sweep-tests`: others have their options, or the ring and whole experts on CPU ranks."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    wanted = selected(request.session, test_a_step_at_real_width_and_world_does_what_the_table_says, "name")
    cases = {name: case for name, case in gating_cases().items() if name in wanted}
    return dict(zip(cases, run_cases(list(cases.values()), timeout_s=1200), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name in SWEPT)) for name in gating_cases()]
)
def test_a_step_at_real_width_and_world_does_what_the_table_says(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    assert "report" in result, result["traceback"]
    wrong = differences(result["report"], measured()[name])
    assert not wrong, "\n".join([*wrong, f"if it is meant: python -m tests.plan.fake_gpu.document '{name}'"])
    assert not measured()[name]["unpinned"]
    # the host never waits before it has begun the next step, but for the sizes of an exchange of experts
    waits = {where.split()[1]: count for where, count in measured()[name]["host_reads"].items()}
    assert waits == EXCHANGES.get(name, {})
    assert sum(measured()[name]["deferred_reads"].values()) == 1


@pytest.mark.integration
def test_a_device_mix_up_a_host_read_and_an_unpinned_copy_are_seen() -> None:
    command = [sys.executable, "-m", "tests.plan.fake_gpu.mistakes"]
    report = json.loads(output_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)))
    assert "same device" in report["mix_up"]
    assert report["host_reads"] == 3
    assert report["unpinned"] == 1
    assert report["all_reduce"] == [1, 4096]
    assert report["peak"] == 3 * 2**20


@pytest.mark.integration
def test_a_zero_stage_3_step_of_deepspeed_runs_with_its_own_collectives() -> None:
    (result,) = run_cases([StepCase("ds_configs/zero3.json", 2, vocabulary=4096)], timeout_s=1200)
    assert "report" in result, result["traceback"]
    kinds = {row[0] for row in result["report"]["collectives"]}
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= kinds


@pytest.mark.sweep
@pytest.mark.integration
def test_layouts_of_deepspeed_are_executed_one_after_another_with_process_groups_of_their_own() -> None:
    # in one process, the second one found DeepSpeed's groups of the first: "is not registered"
    stages = [
        StepCase("ds_configs/zero1.json", 2, vocabulary=4096, overrides=(f"zero_optimization.stage={n}",))
        for n in (0, 1, 2)
    ]
    results = run_cases(stages, timeout_s=1200)
    assert [result.get("error") for result in results] == [None] * 3
    peaks = [result["report"]["peak"] for result in results]
    assert len(set(peaks)) == 3  # each its own step


@pytest.mark.integration
def test_a_step_that_is_killed_is_reported_and_the_next_is_executed() -> None:
    command = [sys.executable, "-m", "tests.plan.fake_gpu.killed_step", "1", "2"]
    said = output_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT))
    killed, after = (json.loads(line) for line in said.splitlines())
    assert "SIGKILL" in killed["error"]
    assert after["report"] == {"peak": 1}


@pytest.mark.integration
def test_a_step_ends_with_the_process_that_waits_for_it() -> None:
    command = [sys.executable, "-m", "tests.plan.fake_gpu.killed_step", "3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as waiting:
        step = int(next(line for line in waiting.stderr if line.strip().isdigit()))
        began = time.monotonic()
        waiting.kill()
        waiting.stderr.read()  # ends when no process has it any more: the step would have slept for 600 s
    assert time.monotonic() - began < 300
    assert step != waiting.pid


@pytest.mark.integration
def test_the_loop_reads_the_device_once_a_step_a_step_late_and_once_an_evaluation(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tokens,
        tmp_path / "run",
        engine="torch",
        zero_optimization={"stage": 0},
        bf16={"enabled": True},
        evaluation={"samples": 16, "every": 2},
    )
    command = [sys.executable, "-m", "tests.plan.fake_gpu.loop", str(write_config(tmp_path / "c.json", config))]
    said = output_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300))
    found = json.loads(said.splitlines()[-1])
    assert found["steps"] == 5  # up to the first checkpoint
    assert found["waits"] == {}
    assert sum(found["deferred"].values()) == 5
    assert found["unpinned"] == {}
    assert [each["step"] for each in found["evaluations"]] == [2, 4]
    for evaluation in found["evaluations"]:
        assert evaluation["batches"] == 8
        assert sum(evaluation["waits"].values()) == 1  # the sum, after the last batch
        assert evaluation["deferred"] == {}
