"""Measurements of runs, as inputs of the simulation of failures and to compare with its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from foundation.errors import DataError
from pipeline.runtime.goodput.account import STOPPED, Goodput, TimeSpent, goodput_of, submission_time
from pipeline.runtime.goodput.attempts import RecordedAttempt, read_attempts
from pipeline.runtime.goodput.failures.model import DAY
from pipeline.runtime.goodput.metrics import MetricsReader
from pipeline.runtime.metrics.attempts_journal import NAME as ATTEMPTS
from pipeline.runtime.metrics.journal import read_rows


@dataclass(frozen=True)
class MeasuredGoodput:
    """Measurements of a run from its journals, up to its last row; a run in progress counts up to now.

    Attributes:
        path: directory of the run.
        goodput: time of the run by category.
        attempts: attempts of the run, oldest first.
        saves: seconds in which each checkpoint was saved in the background, after training had waited for it.
    """

    path: Path
    goodput: Goodput
    attempts: tuple[RecordedAttempt, ...]
    saves: tuple[float, ...]

    @property
    def crashes(self) -> int:
        """Number of attempts not ended by their last step, a signal to stop, or an error before training began."""
        return sum(
            each.ended is not None and each.code not in STOPPED and each.trained is not None for each in self.attempts
        )

    @property
    def seconds(self) -> float:
        """Seconds in which the run could crash: from its first start to its end (its last record if it was killed)."""
        return self.goodput.wall - self.goodput.attempts[0].spent.down

    @property
    def nodes(self) -> int:
        """Largest number of nodes of an attempt."""
        return max(max(1, len(each.nodes)) for each in self.attempts)

    @property
    def after_the_start(self) -> TimeSpent:
        """Time without the submission, first start, evaluations and `other`, which the simulation does not model."""
        first, *later = self.goodput.attempts
        began = TimeSpent(down=-first.spent.down, startup=-first.spent.startup)
        found = sum((each.spent for each in later), first.spent) + began
        return found + TimeSpent(evaluation=-found.evaluation, other=-found.other)


def read_measured(path: Path) -> MeasuredGoodput:
    """Reads a run's directory.

    Raises:
        DataError: the run has no journal of attempts, or no step.
    """
    metrics = MetricsReader(path).read()
    last = {"last_step": metrics.step["step"], "last_time": metrics.last_time}
    attempts, _ = read_attempts(path, training=False, **last)
    now = max((each.ended or each.started for each in attempts), default=0.0)
    goodput = goodput_of(metrics, attempts, now=now, submitted=submission_time(path)) if attempts else None
    if goodput is None:
        why = f"{path} has no step yet" if attempts else f"{path} has no {ATTEMPTS}"
        raise DataError(f"{why}\n  try: the directory that run.dir named in the config, after the run's first step")
    rows = (row for row in read_rows(path, kind="event") if row.get("event") == "checkpoint")
    saves = tuple(max(0.0, row["seconds"] - row["waited_seconds"]) for row in rows)
    return MeasuredGoodput(path, goodput, tuple(attempts), saves)


def kept_share(runs: Sequence[MeasuredGoodput]) -> float:
    """Returns the share of `after_the_start` spent on steps that count; the simulation predicts this share."""
    spent = sum((run.after_the_start for run in runs), TimeSpent())
    return _kept(spent) / spent.wall if spent.wall > 0 else 0.0


def inputs_of(runs: Sequence[MeasuredGoodput]) -> dict[str, Any]:
    """Returns the fields of `FailureModel` that runs of one setup have measured."""
    spent = sum((run.after_the_start for run in runs), TimeSpent())
    wall, nodes = sum(run.seconds for run in runs), max(run.nodes for run in runs)
    crashes, saves = sum(run.crashes for run in runs), [save for run in runs for save in run.saves]
    found: dict[str, Any] = {"nodes": nodes, "detect_s": 0.0, "first_step_s": 0.0, "node_loss_share": 0.0}
    found["days"] = max(run.seconds for run in runs) / DAY
    if crashes:
        found["node_mtbf_s"] = wall * nodes / crashes
    restarts = [pair for run in runs for pair in zip(run.goodput.attempts[1:], run.attempts[1:], strict=True)]
    if restarts:
        found["requeue_s"] = fmean(time.spent.down for time, _ in restarts)
        found["load_s"] = fmean(attempt.loading_s for _, attempt in restarts)
        found["start_s"] = max(0.0, fmean(time.spent.startup for time, _ in restarts) - found["load_s"])
    if saves:
        trained = _kept(spent) + spent.lost
        found["interval_s"] = trained / len(saves)
        found["save_blocking_s"] = spent.checkpoint / len(saves)
        found["save_s"] = min(fmean(saves), found["interval_s"])
    return found


def _kept(spent: TimeSpent) -> float:
    return spent.productive + spent.data_wait + spent.stragglers + spent.exchange
