"""Weights & Biases sink, when the config enables it. Without a login, W&B records offline, in the run's directory."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any

from pipeline.config.sections.deepspeed import WandbSection
from pipeline.runtime.metrics.sinks import OneWarning
from pipeline.runtime.metrics.tags import tagged

STEP = "train_step"
"""The x axis of all W&B charts. W&B's own step can only grow. It equals the run's step until a rollback, or until two
rows of one step share a name; after that it is ahead. So a run that is killed and resumed offline, where W&B does not
know the earlier rows, continues at its own step.
"""


class WandbSink:
    """Logs rows to W&B under the run's name; a resumed run continues the same W&B run.

    A later failure gives one warning: training continues without W&B.

    Args:
        section: the config's `wandb`.
        run_dir: directory of offline records; its name is the run's name.
        config: config of the run, which W&B records.
    """

    def __init__(self, section: WandbSection, run_dir: Path, *, config: dict[str, Any]) -> None:
        import wandb  # noqa: PLC0415  takes seconds and starts threads, only if enabled

        settings: dict[str, Any] = {
            "project": section.project or "headrace",
            "entity": section.team,
            "group": section.group,
            "name": run_dir.name,
            "id": _own_id(run_dir),
            "resume": "allow",
            "dir": str(run_dir),
            "config": config,
        }
        # WANDB_MODE is wandb's own setting and takes precedence
        mode: Any = None if "WANDB_MODE" in os.environ else "online" if wandb.login(prompt=False) else "offline"
        self._run: Any
        try:
            self._run = wandb.init(**settings, mode=mode)
        except wandb.errors.Error as error:
            print(f"warning: W&B cannot be reached ({error}); recording offline, in {run_dir}", file=sys.stderr)
            self._run = wandb.init(**settings, mode="offline")
        self._try = OneWarning("W&B cannot be reached")
        self._newest, self._ahead = -1, 0
        self._row: dict[str, int | float] = {}
        self._try(lambda: self._run.define_metric(STEP))
        self._try(lambda: self._run.define_metric("*", step_metric=STEP))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Logs the numbers of a row under their tags (`tags.py`), by which W&B groups its charts, with the row's step.

        W&B would drop a row of an earlier step (a rollback, a checkpoint written in the background), so it joins the
        row of the newest step, with its own step in `KIND/step`. For two values with one name and step W&B keeps only
        the last, so the second value gets a W&B step of its own.
        """
        numbers = tagged(kind, values)
        if kind != "step":
            numbers[f"{kind}/step"] = step
        if kind == "step" and step + self._ahead <= self._newest:  # after a rollback
            self._ahead = self._newest + 1 - step
        late = step + self._ahead < self._newest
        row = numbers if late else {STEP: step, **numbers}
        if step + self._ahead > self._newest:
            self._newest, self._row = step + self._ahead, {}
        elif any(self._row.get(name, value) != value for name, value in row.items()):
            row = {STEP: self._row[STEP], **numbers}
            self._newest, self._ahead, self._row = self._newest + 1, self._ahead + 1, {}
        self._row |= row
        self._try(lambda: self._run.log(row, step=self._newest))

    def close(self) -> None:
        """Finishes the W&B run."""
        self._try(self._run.finish)


def _own_id(run_dir: Path) -> str:
    """Returns a random id kept in the run's directory: runs of one name stay apart, a resumed run keeps its id."""
    path = run_dir / ".wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
