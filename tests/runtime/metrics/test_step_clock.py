"""The time of a step, from report to report; a run's rows of it; and the profile of a run's steps."""

from __future__ import annotations

import gzip
import json
import pickle
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from pipeline.config.accounts import StepAccounts
from pipeline.config.topology import Topology
from pipeline.engines.base import StepResult
from pipeline.run.hooks.hook import StepNumbers
from pipeline.run.hooks.step_time import MeasuredStepTime
from pipeline.runtime.metrics.journal import read_rows
from pipeline.runtime.metrics.memory import PeakMemory, resident_peak, show_memory
from pipeline.runtime.metrics.step_clock import StepClock
from tests.conftest import launch, tiny_config, write_config


def test_steps_are_timed_from_report_to_report_without_what_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pipeline.runtime.metrics.step_clock.time.perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    def batches():  # type: ignore[no-untyped-def]
        for number in range(3):
            pass_time(0.25)
            yield number

    clock, laps = StepClock(), []
    pass_time(50.0)  # between the start of the process and its first step
    for _ in clock.timed(batches()):
        pass_time(1.0)
        laps.append(clock.lap())
        pass_time(2.0)  # what the device still does after the report is part of the next step
        with clock.excluded():
            pass_time(30.0)
            with clock.excluded():  # a checkpoint that is finished while an evaluation runs
                pass_time(10.0)
    assert laps == [(1.25, 0.25), (3.25, 0.25), (3.25, 0.25)]


def test_the_mfu_of_a_step_is_that_of_one_device() -> None:
    clock: Any = SimpleNamespace(lap=lambda: (2.0, 0.5))
    run: Any = SimpleNamespace(accounts=StepAccounts.constant(2, 32, 9), topology=Topology(dp=2, tp=2))
    numbers = StepNumbers(1, StepResult(1.0, {}, 1.0), begun=2, parts={})
    MeasuredStepTime(clock, run, None, flops=3.0, peak=96.0).numbers(numbers, raised=False)
    assert numbers.cost.tokens_per_second == 64 / 2.0
    assert numbers.cost.mfu == 64 / 2.0 / 4 * 3.0 / 96.0


def test_the_peak_of_a_process_counts_what_was_freed() -> None:
    before = resident_peak()
    # other tests may have left the peak far above what the process holds now
    held = psutil.Process().memory_info().rss
    block = torch.ones(before - held + (128 << 20), dtype=torch.uint8)
    del block
    [peak] = PeakMemory(torch.device("cpu")).read()
    assert peak > before
    assert peak - before < 1 << 30


@pytest.mark.integration
def test_a_run_has_its_costs_in_every_row_and_profiles_the_steps_asked_for(tokens: Path, tmp_path: Path) -> None:
    fields = {"engine": "torch", "zero_optimization": {"stage": 0}, "profile": {"steps": [7, 9]}}
    config = tiny_config(tokens, tmp_path / "run", **fields)
    config["evaluation"]["every"] = 10
    said = launch("train.py", write_config(tmp_path / "c.json", config))
    rows = read_rows(tmp_path / "run", kind="step")
    assert len(rows) == 20
    for row in rows:
        assert 0 <= row["data_wait_seconds"] <= row["seconds"]
        assert row["tokens_per_second"] == pytest.approx(8 * 32 / row["seconds"])
        assert 50e6 < row["memory_resident_bytes"] < 20e9
    assert "  RSS " in said
    assert "  data wait " in said
    # without checkpoints (steps 5, 10, 15), the profile (7 to 9) and evaluations, steps fill the time between rows
    times = {row["step"]: datetime.fromisoformat(row["time"]).timestamp() for row in rows}
    filled = [row["seconds"] / (times[row["step"]] - times[row["step"] - 1] + 1e-3) for row in rows[1:4] + rows[11:14]]
    assert min(filled) > 0.5
    trace = tmp_path / "run/profile/steps-7-9-rank-0.trace.json.gz"
    assert f"profile of steps 7-9: {trace} (open it in " in said
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") in ("user_annotation", "cpu_op")]
    assert {f"step {step}" for step in (7, 8, 9)} == {name for name in names if name.startswith("step ")}
    assert any(name.startswith("aten::") for name in names)
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_the_peaks_and_retries_of_a_gpu_are_those_since_the_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 7 << 30, "reserved_bytes.all.peak": 9 << 30, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: stats)
    meter = PeakMemory(torch.device("cuda", 0))
    values = dict(zip(meter.names, meter.read(), strict=True))
    peaks = {"memory_allocated_bytes": 7 << 30, "memory_reserved_bytes": 9 << 30}
    assert values == peaks | {"allocator_retries": 2}
    assert show_memory(values) == "mem 7.0 GiB (9.0 reserved)"


@pytest.mark.integration
def test_a_profile_of_another_rank_is_written_by_it_and_said_by_rank_0(tokens: Path, tmp_path: Path) -> None:
    fields = {"profile": {"steps": [2, 2], "ranks": [1]}}
    config = tiny_config(tokens, tmp_path / "run", **fields)
    said = launch("train.py", write_config(tmp_path / "c.json", config), "run.steps=9", processes=2)
    assert f"profile of steps 2-2, of ranks 1: in {tmp_path / 'run/profile'}; open it in " in said
    [trace] = (tmp_path / "run/profile").iterdir()
    assert trace.name == "steps-2-2-rank-1.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any(str(name).startswith("gloo:") for name in names)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_rows_have_its_memory_and_a_profile_has_kernels_and_a_snapshot(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", profile={"steps": [7, 8]})
    said = launch("train.py", write_config(tmp_path / "c.json", config))
    for row in read_rows(tmp_path / "run", kind="step"):
        assert 0 < row["memory_allocated_bytes"] <= row["memory_reserved_bytes"]
        assert row["allocator_retries"] == 0
    folder = tmp_path / "run/profile"
    snapshot = pickle.loads((folder / "steps-7-8-rank-0.memory.pickle").read_bytes())
    assert snapshot["device_traces"][0]
    trace = json.loads(gzip.decompress((folder / "steps-7-8-rank-0.trace.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    assert "memory_viz" in said
