"""Reads a training run: its manifest and its metrics journal. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.directory import MANIFEST, Manifest, read_manifest
from headrace.base.errors import DataError
from pipeline.config.rules.renamed_keys import upgrade_keys
from pipeline.runtime.metrics.journal import NAME, read_rows
from pipeline.runtime.metrics.sinks import TASK

Series = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunRecord:
    """One training run.

    Attributes:
        name: in the report.
        path: its directory.
        manifest: of kind `run`; its config under the keys of this version.
        steps: journal rows of finished steps, at least one.
        evaluations: journal rows of held-out evaluations.
        events: the other rows: started, resumed, checkpoint.
        tasks: name of a task -> its journal rows.
    """

    name: str
    path: Path
    manifest: Manifest
    steps: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    tasks: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)

    def series(self, key: str) -> Series:
        """float64 [rows]: a metric of each step; NaN if a row lacks it."""
        return np.array([row.get(key, np.nan) for row in self.steps], dtype=np.float64)

    def has(self, key: str) -> bool:
        """Whether any step recorded this metric."""
        return any(key in row for row in self.steps)

    @property
    def loss_key(self) -> str:
        """The metric comparable with held-out loss: the loss, or of a distilled run its cross-entropy term."""
        return "cross_entropy" if self.has("cross_entropy") else "loss"

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, constant in a run."""
        return float(self.steps[-1]["tokens"] / self.steps[-1]["step"])

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return int(self.steps[-1]["tokens"])

    def evaluated(self) -> tuple[Series, Series]:
        """Held-out evaluations as (tokens trained on until then, loss in nats per token), float64 [evaluations]."""
        return self._figure(self.evaluations, "loss")

    def task_figure(self, task: str, name: str) -> tuple[Series, Series]:
        """A figure of a task as (tokens trained on until then, value), float64 [evaluations with it]."""
        return self._figure([row for row in self.tasks.get(task, ()) if name in row], name)

    def _figure(self, rows: Sequence[dict[str, Any]], name: str) -> tuple[Series, Series]:
        at = np.array([row["step"] * self.tokens_per_step for row in rows], dtype=np.float64)
        return at, np.array([row[name] for row in rows], dtype=np.float64)


def read_run(name: str, path: Path) -> RunRecord:
    """Reads a run's directory.

    Raises:
        DataError: no such directory, no manifest, no journal, a damaged one, or no finished step in it.
    """
    if (path / NAME).is_file() and not (path / MANIFEST).is_file():
        raise DataError(f"{path} has no {MANIFEST} yet: it is written with the first checkpoint\n  try: again then")
    manifest = read_manifest(path, kind="run")
    if not (path / NAME).is_file():
        why = f"{path} has no {NAME}"
        raise DataError(f"{why}\n  try: the directory that run.dir named in the config")
    rows = _rows(path)
    steps, evaluations, events = (_of_kind(rows, kind) for kind in ("step", "eval", "event"))
    if not steps:
        raise DataError(f"{path / NAME} has no finished step\n  try: again after the run's first step")
    manifest = replace(manifest, config=upgrade_keys(manifest.config))
    names = dict.fromkeys(row["kind"].removeprefix(TASK) for row in rows if row["kind"].startswith(TASK))
    tasks = {task: _of_kind(rows, f"{TASK}{task}") for task in names}
    return RunRecord(name, path, manifest, steps, evaluations, events, tasks)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path)
    try:
        # what charts and summary need: a damaged row is reported here instead of as a traceback later
        for row in _of_kind(rows, "step"):
            _ = row["tokens"] + 0, row["loss"] + 0.0
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / NAME} is damaged: {error!r}\n  try: copy it again from where the run was") from None
    return rows


def _of_kind(rows: Sequence[dict[str, Any]], kind: str) -> tuple[dict[str, Any], ...]:
    return tuple(row for row in rows if row["kind"] == kind)
