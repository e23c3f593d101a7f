"""Goodput under failures: the simulation against the closed formula, a naive one, and what has to hold of any."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from foundation.errors import ConfigError
from pipeline.runtime.goodput.failures.model import (
    DAY,
    HOUR,
    FailureModel,
    daly_interval_s,
    expected_goodput,
    with_best_interval,
)
from pipeline.runtime.goodput.failures.simulation import _Run, sensitivity, simulate

NO_NODE_LOST = FailureModel(node_loss_share=0.0)
SEEDS = range(200)


def test_without_failures_only_the_saves_cost_anything() -> None:
    model = FailureModel(node_mtbf_s=math.inf, interval_s=99.0, save_s=10.0, save_blocking_s=1.0)
    assert expected_goodput(model) == pytest.approx(0.99)
    found = simulate(model, seeds=(1, 2))
    assert found.mean == pytest.approx(0.99, abs=1e-5)  # of the last cycle a part
    assert found.failures[0] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"interval_s": 3600.0},
        {"node_mtbf_s": 20 * DAY, "interval_s": 600.0},  # a failure in 23 minutes
        {"node_mtbf_s": 2 * DAY, "interval_s": 60.0, "days": 5.0},  # in 2.3 minutes: the restarts fail, too
        {"save_s": 500.0},
        {"save_blocking_s": 60.0, "save_s": 0.0},
    ],
)
def test_the_simulation_agrees_with_the_closed_formula(changes: dict[str, float]) -> None:
    model = replace(NO_NODE_LOST, **changes)
    found = simulate(model, seeds=SEEDS)
    # three standard errors; a part of the last interval of a month counts in the simulation
    assert found.mean == pytest.approx(expected_goodput(model), abs=3 / 1.96 * found.half_width + 2e-4)


def test_failures_come_as_often_as_in_llama_3s_54_days() -> None:
    model = FailureModel(nodes=2048, days=54.0, spares=1000)
    counts = simulate(model, seeds=range(100)).failures
    assert sum(counts) / 100 == pytest.approx(419, abs=3 * math.sqrt(419 / 100))


def test_what_a_failure_leaves_is_that_of_a_second_by_second_count() -> None:
    model = replace(NO_NODE_LOST, interval_s=100.0, save_blocking_s=7.0, save_s=40.0)
    for seconds in (0, 30, 100, 106, 107, 146, 147, 148, 200, 254, 300, 1000, 1234):
        trained = kept = 0
        ready: list[tuple[int, int]] = []
        for second in range(seconds):
            phase = second % 107
            trained += phase < 100
            if phase == 106:  # the blocking part is over with this second
                ready.append((second + 1 + 40, trained))
        kept = max((work for at, work in ready if at <= seconds), default=0)
        run = _Run(model, random.Random(0))
        run._until_failure = lambda until=seconds: float(until)  # type: ignore[method-assign,misc]
        assert run._train(10 * DAY)
        assert (run.spent.useful, run.spent.useful + run.spent.repeated) == (kept, trained)
        assert run.spent.saving == seconds - trained


def test_all_time_is_accounted_for() -> None:
    for model in (FailureModel(), FailureModel(spares=0, repair_s=10 * DAY), FailureModel(node_mtbf_s=DAY)):
        for spent in simulate(model, seeds=(1, 2)).times:
            parts = tuple(asdict(spent).values())
            assert sum(parts) == pytest.approx(30 * DAY)
            assert min(parts) >= 0


@pytest.mark.parametrize("name", ["detect_s", "requeue_s", "start_s", "load_s", "first_step_s", "save_s"])
def test_goodput_falls_with_every_time(name: str) -> None:
    values = [expected_goodput(replace(NO_NODE_LOST, **{name: value})) for value in (0.0, 60.0, 300.0, 600.0)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 4
    ends = [simulate(replace(NO_NODE_LOST, **{name: value}), seeds=SEEDS) for value in (0.0, 600.0)]
    assert ends[0].mean - ends[0].half_width > ends[1].mean + ends[1].half_width


def test_goodput_grows_with_the_time_between_failures_and_falls_with_nodes() -> None:
    assert expected_goodput(FailureModel(node_mtbf_s=DAY)) < expected_goodput(FailureModel())
    assert expected_goodput(FailureModel(nodes=10_000)) < expected_goodput(FailureModel())
    assert expected_goodput(FailureModel(node_mtbf_s=10.0)) == 0.0


@pytest.mark.parametrize(("mtbf", "blocking"), [(5 * HOUR, 1.0), (5 * HOUR, 60.0), (600.0, 60.0), (3 * HOUR, 600.0)])
def test_dalys_interval_is_the_best_of_all(mtbf: float, blocking: float) -> None:
    def at(interval: float) -> float:
        fields = {"nodes": 1, "node_mtbf_s": mtbf, "save_s": 0.0, "save_blocking_s": blocking}
        return expected_goodput(FailureModel(**fields, interval_s=interval))  # type: ignore[arg-type]

    best = max(at(mtbf * 1.02**-power) for power in range(600))
    assert at(daly_interval_s(mtbf_s=mtbf, blocking_s=blocking)) == pytest.approx(best, rel=1e-3)
    assert daly_interval_s(mtbf_s=mtbf, blocking_s=3 * mtbf) == mtbf


def test_the_interval_is_no_shorter_than_a_save() -> None:
    assert with_best_interval(FailureModel(save_s=500.0)).interval_s == 500.0
    assert with_best_interval(FailureModel(save_s=10.0)).interval_s == pytest.approx(190, abs=1)


def test_without_spares_lost_nodes_are_missed_until_they_are_repaired() -> None:
    few, many = FailureModel(spares=0), FailureModel(spares=100)
    missed = [simulate(model, seeds=SEEDS) for model in (few, many)]
    assert missed[0].mean < missed[1].mean
    share = sum(spent.missing for spent in missed[0].times) / (len(SEEDS) * 30 * DAY)
    # Little's law: failures per second x share that takes a node x seconds of repair, of all nodes; a node waits a
    # little longer, for the checkpoint after its repair
    expected = few.node_loss_share * few.repair_s / few.node_mtbf_s
    assert expected * 0.9 < share < expected * 1.1
    assert all(spent.missing == 0 for spent in missed[1].times)


def test_the_sensitivity_is_sorted_and_names_the_interval_when_it_is_much_too_long() -> None:
    gains = sensitivity(replace(NO_NODE_LOST, interval_s=4 * HOUR), seeds=range(50))
    assert [gain.simulated for gain in gains] == sorted((gain.simulated for gain in gains), reverse=True)
    assert "interval_s / 2" in {gain.change for gain in gains[:2]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, "nodes = 0"),
        ({"node_loss_share": 1.5}, "share of the failures"),
        ({"interval_s": 10.0}, "interval_s = 10.0"),
        ({"detect_s": -1.0}, "0 or more"),
        ({"node_mtbf_s": math.nan}, "above 0"),
    ],
)
def test_inputs_without_a_meaning_are_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FailureModel(**fields)  # type: ignore[arg-type]


def test_the_command_prints_the_goodput_with_its_interval_and_needs_no_torch() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipeline", "goodput", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    found = json.loads(run("--seeds", "20", "--json").stdout)
    assert abs(found["goodput"]["mean"] - found["formula"]) < 0.005
    assert found["inputs"]["interval_s"] == pytest.approx(found["daly_interval_s"])
    assert sum(found["time"].values()) == pytest.approx(1)
    shown = run("--seeds", "20").stdout
    assert "1,250 nodes, 10,000 GPUs" in shown
    assert "what matters" in shown
    refused = run("--seeds", "1")
    assert (refused.returncode, "--seeds = 1" in refused.stderr) == (2, True)
    code = "import sys, pipeline.runtime.goodput.command; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
