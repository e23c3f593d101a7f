"""`headrace plan --score`: measured runs, signed errors, a machine fitted to runs; intervals hold published speeds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.planner_published import error, predicted, published, rows, summary
from foundation.errors import ConfigError, DataError
from pipeline.plan.calibration.command_score import score_command
from pipeline.plan.calibration.fit import fitted
from pipeline.plan.calibration.score import Score, machine_of, read_measured, rescored, score
from pipeline.plan.predict.plan import make_plan
from pipeline.plan.predict.planned_run import open_run
from pipeline.runtime.machines.known import load_machine
from pipeline.runtime.metrics.attempts_journal import NAME, read_events
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.support import output_of

CPU_MACHINE = "cpu"


@pytest.fixture(scope="module")
def runs(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    work = tmp_path_factory.mktemp("scored")
    made = []
    for name, processes, fields in (("one", 1, {}), ("two", 2, {"parallel": {"pp": 2}})):
        run_dir = work / name
        config = tiny_config(tokens, run_dir, engine="torch", **fields)
        config["run"] |= {"steps": 12, "checkpoint_every": 12}
        launch("train.py", write_config(work / f"{name}.json", config), processes=processes)
        made.append(run_dir)
    return made


def record_of(run_dir: Path) -> dict[str, Any]:
    [record] = [event for event in read_events(run_dir)[0] if event["event"] == "measured"]
    return record


def rewritten(run_dir: Path, target: Path, **fields: Any) -> Path:
    """A copy of a run whose record has other values; None leaves one out."""
    shutil.copytree(run_dir, target)
    events = [
        {k: v for k, v in {**event, **fields}.items() if v is not None} if event["event"] == "measured" else event
        for event in read_events(run_dir)[0]
    ]
    (target / NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
    return target


def scores_of(paths: Sequence[Path]) -> list[Score]:
    return [score(read_measured(path), load_machine(CPU_MACHINE)) for path in paths]


def test_a_run_records_its_step_time_its_peak_by_pipeline_rank_and_the_predicted_peak(runs: list[Path]) -> None:
    for run_dir, stages, processes in zip(runs, (1, 2), (1, 2), strict=True):
        record = record_of(run_dir)
        assert record["steps"] == 9  # of 12, without the warm-up
        low, median, high = record["step_s"]
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        seconds = sorted(row["seconds"] for row in rows if row["kind"] == "step" and row["step"] > 3)
        assert median == pytest.approx(seconds[4])
        assert seconds[0] <= low <= median <= high <= seconds[-1]
        assert record["cpu_s"] > 0
        assert len(record["memory"]["memory_resident_bytes"]) == stages
        # a process with torch imported
        assert all(50e6 < size < 20e9 for size in record["memory"]["memory_resident_bytes"])
        assert len(record["predicted_memory_bytes"]) == stages
        assert (record["device"], record["world_size"]) == ("cpu", processes)


def test_the_manifest_of_a_run_says_nothing_of_what_was_measured(runs: list[Path]) -> None:
    assert set(json.loads((runs[0] / "manifest.json").read_text())["details"]) == {"step", "steps", "finished"}


def test_an_error_is_signed_and_of_the_median_step(runs: list[Path], tmp_path: Path) -> None:
    slow = rewritten(runs[0], tmp_path / "slow", step_s=[90.0, 100.0, 110.0])
    fast = rewritten(runs[0], tmp_path / "fast", step_s=[0.9e-9, 1e-9, 1.1e-9])
    below, above = scores_of([slow, fast])
    assert below.step.measured == 100.0
    assert -1 < below.step.error < -0.9
    assert above.step.error > 0
    assert below.step.predicted == above.step.predicted
    assert below.drift == pytest.approx(0, abs=1e-6)


def test_ranks_that_share_the_cores_of_a_host_are_predicted_slower_than_on_their_own(runs: list[Path]) -> None:
    core = load_machine(CPU_MACHINE).model_copy(update={"devices_per_node": 1})
    run = read_measured(runs[1])
    assert (run.hosts, run.ranks_per_host) == (1, 2)
    apart = type(run)(run.path, run.config, run.record, hosts=2)
    shared, alone = score(run, core), score(apart, core)
    assert shared.parts.products == pytest.approx(2 * alone.parts.products)
    assert shared.parts.kernels == pytest.approx(2 * alone.parts.kernels)


def test_more_processes_than_cores_are_planned_on_one_host(runs: list[Path]) -> None:
    machine = load_machine(CPU_MACHINE).model_copy(update={"devices_per_node": 2})
    planned = open_run(str(runs[0].parent / "one.json"), (), machine, nodes=None, processes=4)
    assert planned.nodes == 1
    assert any("4 ranks share the 2 cores" in note for note in planned.notes)
    two = open_run(str(runs[0].parent / "one.json"), (), machine, nodes=2)
    assert (two.nodes, two.run.topology.world_size) == (2, 4)
    assert planned.machine.rate("fp32")[1] == pytest.approx(two.machine.rate("fp32")[1] / 2)


def test_a_changed_prediction_is_named(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = record_of(runs[0])["predicted_memory_bytes"][0]
    old = rewritten(runs[0], tmp_path / "old", predicted_memory_bytes=[2 * before])
    assert score_command([str(old)], None, save=None, as_json=False) == 0
    assert "-50.0% of the memory predicted" in capsys.readouterr().out


def test_a_fitted_machine_predicts_the_runs_that_it_was_made_from(runs: list[Path], tmp_path: Path) -> None:
    base, slower = load_machine(CPU_MACHINE), []
    for each, run, factor in zip(scores_of(runs), runs, (3.0, 4.0), strict=True):
        times = [share * factor * each.step.predicted for share in (0.95, 1.0, 1.05)]
        slower.append(rewritten(run, tmp_path / run.name, step_s=times))
    scores = scores_of(slower)
    machine = fitted(scores, base)
    after = [rescored(each.measured, each.planned, machine) for each in scores]
    errors = [each.step.error for each in after]
    assert sum(map(abs, errors)) < sum(abs(each.step.error) for each in scores)
    assert abs(min(errors)) < 1
    for each in after:
        assert abs(each.memory.error) < 0.2
        plan = make_plan(each.planned.run, each.planned.costs, machine)
        quartiles = each.measured.step_s
        # what was measured is within the interval
        assert plan.step_s.low * 0.99 <= quartiles[1] <= plan.step_s.high * 1.01


def test_one_run_is_fitted_exactly(runs: list[Path]) -> None:
    [before] = scores_of(runs[:1])
    machine = fitted([before], load_machine(CPU_MACHINE))
    after = rescored(before.measured, before.planned, machine)
    assert after.step.error == pytest.approx(0, abs=1e-6)
    assert after.memory.error == pytest.approx(0, abs=0.01)


def test_links_are_fitted_where_runs_tell_them_from_the_device(runs: list[Path]) -> None:
    base = load_machine(CPU_MACHINE)
    slower = base.links.within.model_copy(update={"bytes_per_s": base.links.within.bytes_per_s / 1000})
    slow = base.model_copy(update={"links": base.links.model_copy(update={"within": slower})})
    known = read_measured(runs[1])
    flat = known.config.model_copy(
        update={
            "parallel": known.config.parallel.model_copy(update={"pp": 1}),
            "zero_optimization": known.config.zero_optimization.model_copy(update={"stage": 2}),
        }
    )
    two = type(known)(known.path, flat, known.record)
    one = read_measured(runs[0])
    predicted = [score(each, slow) for each in (one, two)]
    # as measured on a device that is three times as slow, with links that are twice as slow
    truth = [
        type(each.measured)(each.measured.path, each.measured.config, {**each.measured.record, "step_s": [seconds] * 3})
        for each, seconds in zip(predicted, (3 * predicted[0].step.predicted, _links_twice(predicted[1])), strict=True)
    ]
    machine = fitted([score(each, slow) for each in truth], slow)
    assert slow.efficiency.memory[1] / machine.efficiency.memory[1] == pytest.approx(3, rel=0.05)
    assert slow.links.within.bytes_per_s / machine.links.within.bytes_per_s == pytest.approx(2, rel=0.1)


def _links_twice(each: Score) -> float:
    links = each.parts.data_parallel
    assert links > 0.05 * each.step.predicted
    return 3 * (each.step.predicted - links) + 2 * links


def test_the_command_prints_a_row_for_a_run_and_saves_a_machine_for_plan(runs: list[Path], tmp_path: Path) -> None:
    saved, words = tmp_path / "own.json", [str(run) for run in runs]
    said = output_of(
        warm.run("-m", "pipeline", "plan", "--score", *words, "--save-calibration", str(saved), merged=True)
    )
    assert "torch, stage 3, pp 2" in said
    assert "error: memory median" in said
    machine = load_machine(str(saved))
    assert machine.scored.runs == tuple(words)
    config = runs[0].parent / "one.json"
    words = ["--config", str(config), "--machine", str(saved), "--processes", "1", "--verbose"]
    output = output_of(warm.run("-m", "pipeline", "plan", *words, merged=True))
    assert "calibrated" in output
    assert "the spread of 2 runs on cpu" in output


def test_json_has_every_run_with_its_errors_and_medians(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert score_command([str(run) for run in runs], None, save=None, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    errors = [row["step_s"]["error"] for row in found["runs"]]
    for row in found["runs"]:
        step = row["step_s"]
        assert step["error"] == pytest.approx((step["predicted"] - step["measured"]) / step["measured"])
    assert found["error"]["step"]["worst"] == max(errors, key=abs)
    assert found["error"]["step"]["median"] == pytest.approx(sum(errors) / 2)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"event": "other"}, "has no measurement"),
        ({"steps": 2}, "timed 2 steps"),
        ({"step_s": None, "steps": 1}, "timed 1 steps"),
    ],
)
def test_a_run_of_few_steps_is_refused(runs: list[Path], tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        read_measured(rewritten(runs[0], tmp_path / "run", **fields))
    assert "try:" in str(caught.value)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        read_measured(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no manifest\.json"):
        read_measured(tmp_path)


def test_a_device_without_a_machine_is_refused_with_how_to_measure_one(runs: list[Path], tmp_path: Path) -> None:
    run = read_measured(rewritten(runs[0], tmp_path / "run", device="Some GPU 9000"))
    with pytest.raises(ConfigError, match="Some GPU 9000") as caught:
        machine_of(run)
    assert "--calibrate" in caught.value.remedy


def test_runs_of_several_devices_make_no_machine(runs: list[Path], tmp_path: Path) -> None:
    other = rewritten(runs[0], tmp_path / "run", device="H100")
    with pytest.raises(ConfigError, match="one kind of device"):
        fitted(scores_of([runs[0], other]), load_machine(CPU_MACHINE))


def test_a_calibration_never_replaces_a_file_and_is_refused_before_any_work(tmp_path: Path) -> None:
    there = tmp_path / "machine.json"
    there.write_text("{}")
    for name, why in ((there, "exists"), (tmp_path / "machine.txt", "JSON"), (tmp_path / "no" / "m.json", "directory")):
        with pytest.raises(ConfigError, match=why):
            score_command([str(tmp_path / "nothing")], None, save=str(name), as_json=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--score"], "names no run"),
        (["runs/a"], "only --score takes runs"),
        (["--config", "c.json", "--save-calibration", "m.json"], "made from scored runs"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], told: str) -> None:
    done = warm.run("-m", "pipeline", "plan", *words, merged=True)
    assert done.returncode != 0
    assert told in done.stdout


SOURCES, RUNS = published()
IN_CI = 8
"""Every so many runs; all of them: `make sweep-tests`."""


@pytest.mark.integration
@pytest.mark.parametrize("every", [IN_CI, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("fitted", [True, False])
def test_most_published_speeds_are_within_the_intervals(every: int, fitted: bool) -> None:
    runs = [run for run in RUNS if run.fitted == fitted and not run.experts][::every]
    inside = [run for run in runs if predicted(run).holds(run)]
    assert len(inside) >= 0.9 * len(runs), [(run.name, f"{error(run):+.0%}") for run in runs if run not in inside]
    assert median(abs(error(run)) for run in runs) < 0.12  # 7 % when docs/reference/planner.md was written
    assert max(abs(error(run)) for run in runs) < 0.4  # 35 % then


@pytest.mark.integration
@pytest.mark.sweep
def test_most_unseen_speeds_of_experts_are_within_the_intervals() -> None:
    runs = [run for run in RUNS if run.experts and not run.fitted]
    assert sum(predicted(run).holds(run) for run in runs) >= 0.75 * len(runs)  # 33 of 42
    assert median(abs(error(run)) for run in runs) < 0.2  # 18 %


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
