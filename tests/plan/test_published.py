"""Published training speeds: how many the planner's intervals hold, of runs that ranges came from and of others."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.planner_published import error, predicted, published, rows, summary
from pipeline.runtime.machines.known import load_machine

SOURCES, RUNS = published()
IN_CI = 8
"""Every so many runs; all of them: `make sweep-tests`."""


@pytest.mark.integration
@pytest.mark.parametrize("every", [IN_CI, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("fitted", [True, False])
def test_most_published_speeds_are_within_the_intervals(every: int, fitted: bool) -> None:
    runs = [run for run in RUNS if run.fitted == fitted][::every]
    inside = [run for run in runs if predicted(run).holds(run)]
    assert len(inside) >= 0.9 * len(runs), [(run.name, f"{error(run):+.0%}") for run in runs if run not in inside]
    assert median(abs(error(run)) for run in runs) < 0.12  # 7 % when docs/reference/planner.md was written
    assert max(abs(error(run)) for run in runs) < 0.4  # 35 % then


def test_a_run_is_in_the_file_once_and_the_tables_name_its_publication() -> None:
    assert len(RUNS) == len(set(RUNS))
    of_one = [run for run in RUNS if run.source == "torchao"]
    assert any(of_one[0].name in line and "torchao" in line for line in rows(of_one))
    assert any(of_one[0].kind in line for line in summary(of_one))
    assert {run.source for run in RUNS} == set(SOURCES)


def test_the_best_published_runs_have_an_efficiency_of_their_own() -> None:
    machine = load_machine("h100")
    best = machine.as_best_published()
    assert best is not None
    assert best.rate("bf16")[1] > machine.rate("bf16")[1]
    assert best.rate("tf32") == machine.rate("tf32")
    assert best.attention_rate("bf16")[1] == 0.4 * machine.peak_flops["bf16"]
    assert load_machine("l4").as_best_published() is None
    assert load_machine("l4").attention_rate("bf16") == load_machine("l4").rate("bf16")
