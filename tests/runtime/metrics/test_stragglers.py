"""Straggler detection: the rank that others wait for is named, and none where all are equally fast."""

from __future__ import annotations

import re
import socket
import statistics
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pipeline.config.topology import Topology
from pipeline.runtime.metrics.journal import read_rows
from pipeline.runtime.metrics.own_time import CoreClock, Span, host_seconds, kernel_seconds, profiled
from pipeline.runtime.metrics.stragglers import StragglerDetector, peers_of
from tests import warm
from tests.conftest import entry_point, launch, losses, tiny_config, write_config
from tests.support import output_of


def new_stragglers(detector: StragglerDetector, *reports: list[float]) -> list[list[int]]:
    return [detector.update(seconds)[1] for seconds in reports]


def test_a_rank_is_named_once_after_two_slow_reports_in_a_row() -> None:
    detector = StragglerDetector([0] * 4, threshold=0.1)
    quiet, slow = [1.0, 1.01, 1.02, 1.0], [1.0, 1.01, 1.2, 1.0]
    assert new_stragglers(detector, quiet, quiet, slow, quiet, slow, slow, slow, quiet, slow, slow) == [
        *([[]] * 5),
        [2],
        *([[]] * 3),
        [2],
    ]


def test_the_wait_for_the_slowest_rank_leaves_out_what_is_slow_in_a_single_report() -> None:
    detector = StragglerDetector([0, 0, 0, 1], threshold=0.1)
    assert detector.wait_seconds() == 0  # no report yet
    for reports, wait in (
        ([[1.0, 1.0, 3.0, 9.0]], 2.0),  # one report: nothing else is known; rank 3 has no peer
        ([[1.0, 3.0, 1.0, 9.0], [1.0, 1.0, 1.0, 9.0]], 0.0),  # each was slow once
        ([[1.0, 1.0, 2.5, 9.0]] * 3, 1.5),  # rank 2 in three of the newest five
        ([[0.0, 0.0, 0.0, 0.0]] * 5, 0.0),  # without a measurement
    ):
        for seconds in reports:
            detector.update(seconds)
        assert detector.wait_seconds() == pytest.approx(wait)


def test_ranks_are_compared_with_those_of_their_own_pipeline_stage() -> None:
    peers = peers_of(Topology(pp=2, dp=3))
    detector = StragglerDetector(peers, threshold=0.1)
    stages = [1.0, 1.0, 1.0, 3.0, 3.0, 3.6]
    assert new_stragglers(detector, stages, stages, stages) == [[], [], [5]]
    assert detector.update(stages)[0] == pytest.approx([1, 1, 1, 1, 1, 1.2])


def test_context_parallel_ranks_are_compared_with_each_other() -> None:
    detector = StragglerDetector(peers_of(Topology(dp=2, cp=2)), threshold=0.1)
    uneven = [1.0, 1.0, 1.0, 1.5]
    assert new_stragglers(detector, uneven, uneven, uneven) == [[], [], [3]]


def test_a_rank_without_peers_or_without_measurements_is_not_named() -> None:
    detector = StragglerDetector([0, 1], threshold=0.1)
    assert new_stragglers(detector, *[[1.0, 9.0]] * 4) == [[]] * 4
    assert new_stragglers(StragglerDetector([0, 0], threshold=0.1), *[[0.0, 0.0]] * 4) == [[]] * 4


def test_no_rank_is_named_for_less_than_the_variation_between_reports() -> None:
    random, detector = Random(0), StragglerDetector([0, 0], threshold=0.1)
    noise = [[random.lognormvariate(0.0, 0.13) for _ in range(2)] for _ in range(200)]  # as seen on two shared cores
    named = sum(len(ranks) for ranks in new_stragglers(detector, *noise))
    assert named <= 4  # 2 standard deviations, twice in a row: 0.05 % of 200, and as much again while little is known
    slow = [[a, 2 * b] for a, b in noise[:6]]
    assert [1] in new_stragglers(StragglerDetector([0, 0], threshold=0.1), *slow)


def test_host_time_excludes_communication_during_which_no_operator_runs() -> None:
    spans = [
        Span("headrace::step", "user_annotation", 1, 1000, 2000),
        Span("gloo:all_reduce", "user_annotation", 3, 1050, 1300),
        Span("aten::linear", "cpu_op", 1, 1100, 1200),  # beside the message: 50 + 100 of waiting are left
        Span("aten::matmul", "cpu_op", 1, 1250, 1450),
        Span("_c10d_functional::wait_tensor", "cpu_op", 1, 1260, 1290),  # called from an operator: 30 of waiting
        Span("aten::copy_", "cpu_op", 1, 1270, 1280),  # and 10 of them are work again
        Span("autograd::engine::evaluate_function: MulBackward0", "cpu_op", 1, 1500, 1600),
        Span("gloo:recv", "user_annotation", 1, 1510, 1600),  # a node of autograd is no operator: 90
        Span("gloo:send", "user_annotation", 1, 1610, 1660),
        Span(
            "aten::clone", "cpu_op", 1, 1600, 1640
        ),  # sent within an operator; it is listed here, but is asynchronous: 20
        Span("cudaStreamSynchronize", "cuda_runtime", 1, 1700, 1800),  # 100, but for 60 of another thread
        Span("aten::mul", "cpu_op", 2, 1730, 1790),
        Span("FSDP::all_gather (layers.0)", "user_annotation", 1, 1000, 2000),
        Span("sgemm", "kernel", 0, 1000, 1050),
        Span("ncclDevKernel_AllReduce", "kernel", 0, 1000, 1900),
        Span("Memcpy HtoD", "gpu_memcpy", 0, 1000, 1005),
        Span("nccl:all_reduce", "gpu_user_annotation", 0, 1000, 1900),
    ]
    waiting = (50 + 50) + (30 - 10) + 90 + 20 + (100 - 60)
    assert host_seconds(spans) == pytest.approx((1000 - waiting) / 1e9)
    assert kernel_seconds(spans) == pytest.approx(55 / 1e9)
    assert host_seconds(spans[1:]) == 0


def test_core_time_does_not_count_sleeping() -> None:
    clock, waited = CoreClock(), []
    for _ in range(5):  # on a busy machine one may wait for a core after having slept, and that counts
        before = clock.seconds()
        time.sleep(0.1)
        waited.append(clock.seconds() - before)
    before, matrix, started = clock.seconds(), torch.randn(300, 300), time.perf_counter()
    while time.perf_counter() - started < 0.2:
        matrix @ matrix
    assert min(waited) < 0.05
    assert clock.seconds() - before > 0.1


def test_with_another_profiler_active_nothing_is_measured_and_nothing_breaks(capfd: pytest.CaptureFixture[str]) -> None:
    with profiled(gpu=False) as theirs:
        with profiled(gpu=False) as ours:
            torch.ones(3) + 1
        torch.ones(3) + 1
    assert (len(ours), len(theirs) > 0) == (0, True)
    assert capfd.readouterr().err == ""  # Kineto would say so whenever it starts and stops


SLOWED = """
import os, runpy, signal, sys, time
if os.environ["RANK"] == sys.argv[1]:
    rank = os.getpid()
    if not os.fork():  # suspends its parent for three quarters of the time, in intervals far shorter than a report
        while os.getppid() == rank and not os.path.exists("run/metrics.jsonl"):
            time.sleep(0.01)
        while os.getppid() == rank:
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(rank, signal.SIGCONT)
            time.sleep(0.01)
        os._exit(0)
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""

LAYOUTS: dict[str, dict[str, Any]] = {
    "deepspeed-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 64}},
    "torch-tp-2": {"engine": "torch", "parallel": {"tp": 2}, "zero_optimization": {"stage": 0}},
}
"""Layouts in which ranks wait for each other in every layer."""


def trained(tokens: Path, work: Path, layout: str, *, slow: int, threshold: float) -> tuple[list[dict[str, Any]], str]:
    """The straggler reports and the output of a short run on two ranks, one of which may be slowed."""
    # on a busy machine reports are rarer and vary more, and only two in a row name a rank
    run: dict[str, Any] = {"dir": str(work / "run"), "steps": 40 if slow == 1 else 20, "seed": 7}
    config = tiny_config(
        tokens, work / "run", run=run, stragglers={"every": 2, "threshold": threshold}, **LAYOUTS[layout]
    )
    work.mkdir(exist_ok=True)
    words = entry_point("train.py", write_config(work / "c.json", config))
    said = output_of(warm.run("-c", SLOWED, slow, *words, cwd=work, processes=2, merged=True))
    reports = [row for row in read_rows(work / "run", kind="event") if row["event"] == "stragglers"]
    steps = [row["step"] for row in reports]
    gaps = [after - before for before, after in pairwise(steps)]
    assert (steps[0], gaps[0], gaps) == (2, 2, sorted(gaps))  # on a busy machine profiles take long, and become rarer
    return reports, said


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_is_suspended_most_of_the_time_is_named(tokens: Path, tmp_path: Path, layout: str) -> None:
    reports, output = trained(tokens, tmp_path, layout, slow=1, threshold=0.3)
    host = socket.gethostname()
    assert re.search(rf"rank 1 on {host} takes \d+\.\d\d times the median of its peers for its own work", output)
    # it is the slowest in most reports, though in a step of milliseconds it may happen not to be suspended
    assert statistics.median(row["slowest"][0]["rank"] for row in reports) == 1
    assert statistics.median(row["seconds"]["max"] / row["seconds"]["min"] for row in reports) > 1.5


LONG_PROFILES = """
import os, sys
import torch
import torch.distributed as dist
from pipeline.runtime.metrics import stragglers
dist.init_process_group("gloo")
rank = dist.get_rank()
for limit_s in (0.01, 60.0):
    stragglers._MAX_REPORT_S = limit_s
    measuring = stragglers.Stragglers(threshold=0.1, every=2, peers=[0, 0], rank=rank, gpu=False)
    for step in range(1, 9):
        with measuring.measured(step):
            for _ in range(4000 if rank == 1 else 1):
                torch.ones(1)
        report = measuring.report(step)  # hangs unless both ranks decide alike
        if report:
            print(step, report.named, *(line for line in report.lines() if "from now on" in line), flush=True)
os._exit(0)
"""


def test_a_rank_with_more_work_is_named_and_reports_become_rarer_when_profiling_takes_long() -> None:
    done = warm.run("-c", LONG_PROFILES, processes=2, timeout_s=60)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(line[0]) for line in lines] == [2, 4, 8, 2, 4, 6, 8], done.stderr
    assert [line[-2] for line in lines if len(line) > 2] == ["4", "8", "16"]
    # rank 1 has 4,000 times the work; it is named once there are three reports
    assert [line[1] for line in lines[3:]] == ["[]", "[]", "[1]", "[]"]


@pytest.mark.integration
def test_no_rank_is_named_where_none_is_slow(tokens: Path, tmp_path: Path) -> None:
    # other tests on the machine slow a rank down, up to 3.7 times in two reports in a row: but not in each run
    for attempt in ("first", "second", "third"):
        reports, output = trained(tokens, tmp_path / attempt, "deepspeed-3", slow=2, threshold=1.0)
        if "straggler:" not in output:
            break
    assert "straggler:" not in output
    slowest = reports[-1]["slowest"][0]
    assert slowest["seconds"] == reports[-1]["seconds"]["max"]
    assert slowest["seconds"] == max(slowest[c] for c in ("host", "cores", "kernels")) + slowest["loading"]
    assert slowest["host"] > 0


@pytest.mark.integration
def test_reports_change_no_result_and_can_be_switched_off(tokens: Path, tmp_path: Path) -> None:
    found = {}
    for every in (3, None):
        work = tmp_path / str(every)
        work.mkdir()
        config = tiny_config(tokens, work / "run", engine="torch", stragglers={"every": every})
        launch("train.py", write_config(work / "c.json", config), "run.steps=6", "scheduler=auto", processes=2)
        found[every] = losses(work / "run")
        reports = [row for row in read_rows(work / "run", kind="event") if row["event"] == "stragglers"]
        assert len(reports) == (2 if every else 0)
    assert found[3] == found[None]
