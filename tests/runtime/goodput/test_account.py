"""The account of a run's wall clock from journals that are written here: what is in which category, to the second."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import DataError
from pipeline.runtime.faults.report import append_fault_once
from pipeline.runtime.goodput.account import Goodput, read_goodput
from pipeline.runtime.goodput.measured import inputs_of, kept_share, read_measured
from pipeline.runtime.goodput.text import goodput_line
from pipeline.runtime.metrics.attempts_journal import NAME
from pipeline.runtime.metrics.journal import NAME as METRICS
from pipeline.runtime.metrics.journal import Journal
from pipeline.runtime.metrics.step_clock import Stopwatch
from pipeline.runtime.metrics.time_sums import TimeSums
from tests.support import output_of

T0 = 1_700_000_000.0


def at(seconds: float) -> str:
    return datetime.fromtimestamp(T0 + seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def step(number: int, time: float, *, seconds: float = 1.0, data_wait: float = 0.0) -> dict[str, Any]:
    times = {"time": at(time), "seconds": seconds, "data_wait_seconds": data_wait}
    return {"kind": "step", "step": number, "loss": 5.0, "tokens": number, **times}


def event(name: str, number: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "step": number, "event": name, "time": at(time), **fields}


def attempt(name: str, kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "attempt": name, "time": at(time), **fields}


def write(run_dir: Path, attempts: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Path:
    for name, lines in ((NAME, attempts), (METRICS, rows)):
        (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def account(run_dir: Path) -> Goodput:
    goodput = read_goodput(run_dir, training=False)
    assert goodput is not None
    assert goodput.spent.wall == pytest.approx(goodput.wall, abs=1e-5)
    return goodput


def nonzero(goodput: Goodput) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in asdict(goodput.spent).items() if round(seconds, 3)}


@pytest.fixture
def killed_once(tmp_path: Path) -> Path:
    """Submitted; 20 s later a process; steps 1-8 of 1 s and 3 s of compiling; killed; 30 s later again, from step 5."""
    attempts = [
        attempt("a", "start", 10, process_start=at(0)),
        attempt("a", "training", 20, step=0),
        attempt("b", "start", 70, process_start=at(64), before={"step": 8, "time": at(34)}),
        attempt("b", "loaded", 72, step=5, seconds=2.0),
        attempt("b", "lost", 73, step=5, steps=3, seconds=3.0, since=at(32), until=at(34), evaluation_seconds=0.5),
        attempt("b", "training", 80, step=5),
        attempt("b", "end", 92, code=0, reason="finished"),
    ]
    first = step(1, 24, seconds=4.0)
    rows = [event("started", 0, 20), first, event("compiled", 1, 24, seconds=3.0)]
    rows += [step(number, 23 + number, data_wait=0.25) for number in range(2, 6)]
    rows += [event("checkpoint", 5, 30.5, seconds=2.0, waited_seconds=0.25, blocked_seconds=0.5)]
    rows += [event("resumed", 5, 80), *(step(number, 75 + number) for number in range(6, 11))]
    rows += [{"kind": "eval", "step": 10, "time": at(89), "seconds": 3.0, "loss": 4.0}]
    rows += [event("exchange", 10, 90, seconds=1.5)]
    for number, jobs in ((1, {"prep": ["5"], "train": ["6"]}), (2, {"train": ["7"]})):
        submission = tmp_path / "submissions" / str(number)
        submission.mkdir(parents=True)
        found = {"submitted": at(-300 + 100 * number), "jobs": jobs}  # the first waits for its data to be prepared
        (submission / "submission.json").write_text(json.dumps(found))
    return write(tmp_path, attempts, rows)


def test_each_second_of_a_run_is_in_one_category(killed_once: Path) -> None:
    goodput = account(killed_once)
    assert nonzero(goodput) == {
        "productive": 1.0 + 4 * 0.75 + 5.0,
        "lost": 3.0,
        "startup": 20.0 + 3.0 + 16.0,  # and what compiled in the first step
        "down": 100.0 + 30.0,  # in the queue, and from the last sign of life at 34
        "data_wait": 4 * 0.25,
        "checkpoint": 0.5,
        "evaluation": 3.0 + 0.5,
        "exchange": 1.5,
        "other": 192.0 - 9.0 - 3.0 - 39.0 - 130.0 - 1.0 - 0.5 - 3.5 - 1.5,
    }
    assert goodput.wall == pytest.approx(192)
    assert [(each.begin - T0, each.end - T0) for each in goodput.attempts] == [(-100, 34), (34, 92)]
    assert goodput_line(goodput).startswith("goodput 4.7 % of 0:03:12 in 2 attempts: down 67.7 %, start-up 20.3 %")


def test_rows_that_two_starts_have_removed_are_lost_once(killed_once: Path) -> None:
    """The first of them was killed before it had removed them."""
    before = account(killed_once).spent.lost
    journal = killed_once / NAME
    lost = next(line for line in journal.read_text().splitlines() if '"lost"' in line)
    journal.write_text(journal.read_text().replace(lost, lost + "\n" + lost))
    assert account(killed_once).spent.lost == before


def test_a_hang_is_down_time_until_it_is_found_and_a_crash_loses_its_unfinished_step(tmp_path: Path) -> None:
    attempts = [attempt("a", "start", 0), attempt("a", "training", 10, step=0)]
    rows = [event("started", 0, 10), *(step(number, 10 + number) for number in range(1, 6))]
    for kind, expected in (("stuck", {"down": 45.0}), ("died", {"lost": 45.0})):
        folder = tmp_path / kind
        folder.mkdir()
        write(folder, attempts, rows)
        row = {"event": "fault", "fault": kind, "time": T0 + 60, "step": 5, "ranks": [{"rank": 1, "host": "n"}]}
        append_fault_once(folder, row, token="a")
        assert nonzero(account(folder)) == {"productive": 5.0, "startup": 10.0, **expected}


def test_a_rollback_loses_its_steps_and_loads_again(tmp_path: Path) -> None:
    attempts = [
        attempt("a", "start", 0),
        attempt("a", "training", 10, step=0),
        attempt("a", "lost", 22, step=2, steps=3, seconds=3.0, since=at(13), until=at(15)),
        attempt("a", "training", 23, step=2),
        attempt("a", "end", 26, code=0, reason="finished"),
    ]
    rows = [event("started", 0, 10), step(1, 11), step(2, 12), event("rollback", 2, 22)]
    rows += [step(number, 21 + number) for number in (3, 4, 5)]
    assert nonzero(account(write(tmp_path, attempts, rows))) == {"productive": 5.0, "lost": 3.0, "startup": 10.0 + 8.0}


def test_straggler_reports_count_for_the_steps_before_them_and_the_last_for_the_rest() -> None:
    sums = TimeSums()
    for number in range(1, 8):
        sums.add(step(number, number))
        if number in (2, 4):
            sums.add(event("stragglers", number, number, seconds={"min": 1}, wait_seconds=0.25 * number))
    assert sums.straggler_s == 2 * 0.5 + 2 * 1.0 + 3 * 1.0
    assert sums.straggler_s + 2 * 0.5 == sums.step_s  # never more than the steps took


def test_the_journal_tells_what_it_is_about_to_remove(tmp_path: Path) -> None:
    rows = [event("started", 0, 0), *(step(number, number) for number in (1, 2, 3))]
    write(tmp_path, [], [*rows, event("resumed", 3, 10), step(4, 11)])
    found: list[TimeSums] = []
    before = (tmp_path / METRICS).read_text()

    def removed(parts: Sequence[TimeSums]) -> None:
        found.extend(parts)
        assert (tmp_path / METRICS).read_text() == before

    Journal(tmp_path, from_step=1, on_removed=removed).close()
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2
    assert [(part.steps, part.since, part.until) for part in found] == [(2, T0 + 2, T0 + 3), (1, T0 + 10, T0 + 11)]


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 9), st.booleans()), min_size=1, max_size=6))
def test_the_categories_sum_to_the_wall_clock_whatever_the_journals_say(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[float, float, float, bool]]
) -> None:
    """Also where clocks disagree: steps that together take longer than their attempt."""
    attempts, rows, time = [], [], 0.0
    for number, (until_trained, trained, seconds, ends) in enumerate(lengths):
        name = str(number)
        attempts.append(attempt(name, "start", time, process_start=at(time - seconds)))
        attempts.append(attempt(name, "training", time + until_trained, step=number))
        rows.append(event("resumed", number, time + until_trained))
        time += until_trained + trained
        rows.append(step(number + 1, time, seconds=10 * seconds, data_wait=seconds))
        if ends:
            attempts.append(attempt(name, "end", time + 1, code=75, reason="stopped"))
        time += 2.0
    goodput = account(write(tmp_path_factory.mktemp("run"), attempts, rows))
    assert min(asdict(goodput.spent).values()) >= 0
    for each in goodput.attempts:
        assert each.spent.wall == pytest.approx(each.end - each.begin, abs=1e-5)


def test_a_run_before_its_first_step_has_no_goodput(tmp_path: Path) -> None:
    write(tmp_path, [attempt("a", "start", 0)], [])
    assert read_goodput(tmp_path, training=True) is None


def test_a_stopwatch_counts_a_block_that_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("pipeline.runtime.metrics.step_clock.time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    with watch.running():
        now[0] = 3.0
        with watch.running():
            now[0] = 5.0
        assert watch.take() == 5.0
        now[0] = 6.0
    now[0] = 9.0
    assert (watch.take(), watch.take()) == (1.0, 0.0)


def test_measured_runs_are_the_inputs_of_the_simulation(killed_once: Path, tmp_path: Path) -> None:
    run = read_measured(killed_once)
    assert run.crashes == 1
    inputs = inputs_of([run])
    assert inputs["node_mtbf_s"] == pytest.approx(92)  # without the time in the queue
    assert inputs["requeue_s"] == pytest.approx(30)
    assert (inputs["load_s"], inputs["start_s"]) == (2.0, pytest.approx(14.0))
    assert inputs["save_blocking_s"] == 0.5
    assert inputs["interval_s"] == pytest.approx(9 + 1 + 1.5 + 3)
    kept = 9 + 1 + 1.5
    assert kept_share([run]) == pytest.approx(kept / (kept + 3 + 3 + 16 + 30 + 0.5 - 3))
    with pytest.raises(DataError, match=r"has no attempts.jsonl\n  try:"):
        read_measured(tmp_path / "nowhere")


def test_the_command_compares_runs_with_the_prediction_for_their_own_failures(killed_once: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "goodput", "--run", str(killed_once), "--seeds", "20"]
    said = output_of(subprocess.run(command, capture_output=True, text=True, check=False))
    assert "goodput 4.7 % of 0:03:12 in 2 attempts" in said
    assert "crashes  1 in 0:01:32, one in 0:01:32" in said
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert found["measured"]["runs"][0]["lost"] == pytest.approx(3.0)
    assert found["inputs"]["requeue_s"] == pytest.approx(30.0)
    given = subprocess.run([*command, "--requeue-s", "5", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(given.stdout)["inputs"]["requeue_s"] == 5.0
