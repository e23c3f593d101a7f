"""How far a training run is, from its manifest, journal, checkpoints and lock. No torch; the run is not disturbed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.directory import MANIFEST, read_manifest
from headrace.base.errors import DataError
from pipeline.checkpoint.naming import finished_checkpoints
from pipeline.faults.report import read_faults
from pipeline.metrics.journal import NAME as JOURNAL
from pipeline.metrics.journal import read_rows
from pipeline.run.lock import is_training

_NOTABLE = frozenset({"rollback", "fault", "checkpoint_failed", "replicas", "non_finite", "spike"})
"""Events of the journal that somebody should look at."""


@dataclass(frozen=True)
class RunStatus:
    """How far a run is.

    Attributes:
        dir: the run's directory.
        steps: of the whole run; None where its manifest cannot be read.
        step: the newest one in the journal, 0 before the first.
        loss: of that step, in nats per token.
        tokens_per_second: of that step, over all ranks.
        heldout_loss: of the newest evaluation, in nats per token.
        checkpoint: the newest finished checkpoint.
        checkpoint_step: the step after which it was written.
        training: whether a process trains there now; None where the file system has no locks.
        idle_seconds: since the journal was last written.
        faults: lost and failed ranks, rollbacks and failed checkpoints, oldest first.
    """

    dir: Path
    steps: int | None
    step: int
    loss: float | None
    tokens_per_second: float | None
    heldout_loss: float | None
    checkpoint: Path | None
    checkpoint_step: int | None
    training: bool | None
    idle_seconds: float | None
    faults: tuple[dict[str, Any], ...]

    @property
    def finished(self) -> bool:
        """Whether its last step is done."""
        return self.steps is not None and self.step >= self.steps

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.loads(json.dumps({**fields, "finished": self.finished}, default=str))  # type: ignore[no-any-return]


def read_status(run_dir: Path) -> RunStatus:
    """Looks at a run.

    Raises:
        DataError: no run has begun there, or its manifest is damaged.
    """
    journal = run_dir / JOURNAL
    if not journal.exists() and not (run_dir / MANIFEST).exists():
        raise DataError(f"{run_dir}: no run has begun there\n  try: the directory that run.dir names in its config")
    steps = None
    if (run_dir / MANIFEST).exists():
        steps = int(read_manifest(run_dir, kind="run").details["steps"])
    rows = read_rows(run_dir)
    newest: dict[str, Any] = next((row for row in reversed(rows) if row["kind"] == "step"), {"step": 0})
    evaluation: dict[str, Any] = next((row for row in reversed(rows) if row["kind"] == "eval"), {})
    checkpoint_step, checkpoint = next(iter(finished_checkpoints(run_dir)), (None, None))
    events = [row for row in rows if row["kind"] == "event" and row.get("event") in _NOTABLE]
    return RunStatus(
        dir=run_dir,
        steps=steps,
        step=newest["step"],
        loss=newest.get("loss"),
        tokens_per_second=newest.get("tokens_per_second"),
        heldout_loss=evaluation.get("loss"),
        checkpoint=checkpoint,
        checkpoint_step=checkpoint_step,
        training=is_training(run_dir),
        idle_seconds=max(0.0, time.time() - journal.stat().st_mtime) if journal.exists() else None,
        faults=tuple(sorted([*events, *read_faults(run_dir)], key=lambda row: int(row.get("step", 0)))),
    )
