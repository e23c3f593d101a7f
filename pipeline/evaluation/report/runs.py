"""Reads a training run: its manifest and its metrics journal. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foundation.directory import MANIFEST, Manifest, read_manifest
from foundation.errors import DataError
from pipeline.runtime.metrics.journal import NAME, iterate_rows
from pipeline.runtime.metrics.sinks import SOURCES, TASK, JournalRow

Series = npt.NDArray[np.float64]
MEMORY = ("memory_reserved_bytes", "memory_resident_bytes")
"""Metrics of memory that a report shows, of which a run has one: on a GPU, and on a CPU."""
_LOSSES, _SPEEDS = ("loss", "cross_entropy", "kl"), ("tokens_per_second", "seconds", "mfu")
_SHOWN = ("step", "tokens", *_LOSSES, "lr", "grad_norm", *_SPEEDS, *MEMORY)
"""Metrics of steps that a report shows. They are read as columns: rows of two million steps would take gigabytes."""


@dataclass(frozen=True)
class StageBand:
    """A stage of a run in its charts.

    Attributes:
        name: name of the stage.
        begin, end: tokens trained on before the stage and up to its end.
    """

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class RunRecord:
    """One training run.

    Attributes:
        name: name in the report.
        path: directory of the run.
        manifest: manifest of kind `run`; its config has the keys of this version.
        columns: metric of a step -> float64 [steps], at least one; NaN where a row lacks it.
        evaluations: journal rows of held-out evaluations.
        events: all other journal rows: started, resumed, checkpoint.
        tasks: name of a task -> its journal rows.
    """

    name: str
    path: Path
    manifest: Manifest
    columns: dict[str, Series]
    evaluations: tuple[JournalRow, ...]
    events: tuple[JournalRow, ...]
    tasks: dict[str, tuple[JournalRow, ...]] = field(default_factory=dict)

    def series(self, key: str) -> Series:
        """float64 [steps]: a metric of each step; NaN if a row lacks it."""
        return self.columns[key]

    def has(self, key: str) -> bool:
        """Whether any step recorded this metric."""
        return not np.isnan(self.columns[key]).all()

    @property
    def loss_key(self) -> str:
        """The metric comparable with held-out loss: the loss, or for a distilled run its cross-entropy term."""
        return "cross_entropy" if self.has("cross_entropy") else "loss"

    @property
    def tokens_per_step(self) -> list[int]:
        """Tokens per step; the smallest and the largest where steps differ (stages, a batch ramp)."""
        steps, tokens = self.columns["step"], self.columns["tokens"]
        sizes = np.diff(tokens, prepend=0.0) / np.diff(steps, prepend=0.0)
        if sizes[0] != tokens[0]:  # rows before the first are missing
            sizes = sizes[1:] if sizes.size > 1 else sizes
        return sorted({round(float(sizes.min())), round(float(sizes.max()))})

    def hours(self) -> Series:
        """float64 [steps]: hours of all steps up to each, without checkpoints and evaluations between them."""
        total: Series = np.nancumsum(self.columns["seconds"]) / 3600
        return total

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return int(self.columns["tokens"][-1])

    @property
    def steps(self) -> int:
        """Number of finished steps."""
        return int(self.columns["step"].size)

    @property
    def stages(self) -> list[StageBand]:
        """The stages as ranges of tokens, as they are planned; empty for a run without stages."""
        bands: list[StageBand] = []
        seen = 0
        for row in self.manifest.details.get("ledger") or []:
            begin, seen = seen, seen + row["tokens"]
            if bands and bands[-1].name == row.get("stage"):
                begin = bands.pop().begin
            if "stage" in row:
                bands.append(StageBand(row["stage"], begin, seen))
        return bands

    def evaluated(self) -> tuple[Series, Series]:
        """Held-out evaluations as (tokens trained on before, loss in nats per token), float64 [evaluations]."""
        return self._figure(self.evaluations, "loss")

    def task_figure(self, task: str, name: str) -> tuple[Series, Series]:
        """A figure of a task as (tokens trained on before, value), float64 [evaluations with the figure]."""
        return self._figure([row for row in self.tasks.get(task, ()) if name in row], name)

    def source_losses(self) -> dict[str, tuple[Series, Series]]:
        """Held-out losses of the sources, by name, as in `evaluated`; empty for a run of one source."""
        names = dict.fromkeys(name for row in self.evaluations for name in row.get(SOURCES, {}))
        rows = [{"step": row["step"], **row[SOURCES]} for row in self.evaluations if SOURCES in row]
        return {name: self._figure([row for row in rows if name in row], name) for name in names}

    def _figure(self, rows: Sequence[JournalRow], name: str) -> tuple[Series, Series]:
        steps, tokens = (np.concatenate([[0.0], self.columns[key]]) for key in ("step", "tokens"))
        at = np.interp([row["step"] for row in rows], steps, tokens)
        return at, np.array([row[name] for row in rows], dtype=np.float64)


def read_run(name: str, path: Path) -> RunRecord:
    """Reads a run's directory.

    Raises:
        DataError: no such directory; manifest or journal missing or damaged; or no finished step.
    """
    if (path / NAME).is_file() and not (path / MANIFEST).is_file():
        raise DataError(f"{path} has no {MANIFEST} yet: it is written with the first checkpoint\n  try: again then")
    manifest = read_manifest(path, kind="run")
    if not (path / NAME).is_file():
        why = f"{path} has no {NAME}"
        raise DataError(f"{why}\n  try: the directory that run.dir named in the config")
    columns, rows = _read(path)
    evaluations, events = (_of_kind(rows, kind) for kind in ("eval", "event"))
    if not columns["step"].size:
        raise DataError(f"{path / NAME} has no finished step\n  try: again after the run's first step")
    names = dict.fromkeys(row["kind"].removeprefix(TASK) for row in rows if row["kind"].startswith(TASK))
    tasks = {task: _of_kind(rows, f"{TASK}{task}") for task in names}
    return RunRecord(name, path, manifest, columns, evaluations, events, tasks)


def _read(path: Path) -> tuple[dict[str, Series], list[JournalRow]]:
    """Reads the columns of the steps, and the other rows."""
    columns, rows = {key: array("d") for key in _SHOWN}, []
    for row in iterate_rows(path):
        if row["kind"] != "step":
            rows.append(row)
            continue
        try:
            # charts and summary need these: a damaged row is reported here instead of as a traceback later
            _ = row["tokens"] + 0, row["loss"] + 0.0
        except (KeyError, TypeError) as error:
            why = f"{path / NAME} is damaged: {error!r}"
            raise DataError(f"{why}\n  try: copy it again from where the run was") from None
        for key, column in columns.items():
            value = row.get(key)
            column.append(value if isinstance(value, int | float) else math.nan)
    return {key: np.frombuffer(column) if column else np.empty(0) for key, column in columns.items()}, rows


def _of_kind(rows: Sequence[JournalRow], kind: str) -> tuple[JournalRow, ...]:
    return tuple(row for row in rows if row["kind"] == kind)
