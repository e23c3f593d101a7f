"""Skipped data after two million steps and five hundred rollbacks: what a step and a resume cost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.config.batch import BatchSizes
from pipeline.data.loader import StepLoader
from pipeline.data.skips import NO_SKIPS, Skips
from pipeline.run.batches import skips_after
from pipeline.runtime.metrics.journal import NAME
from pipeline.runtime.metrics.times import iso_time
from tests.scale.measuring import Figures, Part, measured
from tests.scale.parts.data import opened, written
from tests.scale.parts.journals import STEPS, TARGET, write_run

_PER_ROLLBACK, _BACK = 4000, 50
"""Steps between two rollbacks: 500 in two million; and steps that each goes back."""


def _after(rollbacks: int) -> Skips:
    """The skips of a run with so many rollbacks."""
    skips = NO_SKIPS
    for number in range(1, rollbacks + 1):
        step = number * _PER_ROLLBACK
        skips = skips.past(step, since=step - _BACK)
    return skips


def a_step(rollbacks: int, work: Path) -> Figures:
    """A rank reads its sample of 32 steps behind all skips, per step; with document masks."""
    mixture, steps, samples = opened(written(4000, work, sources=1), stat_files=False), 32, 512
    batch = BatchSizes(samples=samples, micro=1, accumulation=1, dp=samples, sequence_length=4096)
    first = rollbacks * _PER_ROLLBACK + 1
    about: dict[str, Any] = {"dp_rank": 3, "steps": (first, first + steps - 1), "mask_documents": True}
    skips = _after(rollbacks)
    loader = StepLoader(mixture, batch, **about, skips=skips, target_sum=lambda own: lambda: own)
    with measured() as figures:
        assert len(list(loader)) == steps
        for step in range(first, first + steps):
            assert skips.data_step(step) == step + _BACK * rollbacks
    return figures.times(1 / steps)


def resumed(steps: int, work: Path) -> Figures:
    """A resume finds the skips: those of the newest rollback in the journal, each of which has all that came before."""
    run = write_run(steps, work / "run")
    rollbacks = steps // _PER_ROLLBACK
    rows = []
    for number in range(1, rollbacks + 1):
        step = number * _PER_ROLLBACK
        row = {"kind": "event", "step": step - _BACK, "time": iso_time(1.7e9), "event": "rollback", "bad_step": step}
        rows.append(json.dumps({**row, "skips": _after(number).plain()}) + "\n")
    with (run / NAME).open("a") as file:
        file.writelines(rows)
    checkpoint = SimpleNamespace(manifest=SimpleNamespace(details={}), step=steps)
    with measured() as figures:
        found = skips_after(cast("Checkpoint", checkpoint), run)
    assert found == _after(rollbacks)
    figures.read_bytes = sum(map(len, rows))
    return figures


PARTS = [
    Part(
        "data passed over: a step",
        "a rank reads its one sample of a step after this many rollbacks, from 4,000 shards, with a document mask.",
        "rollbacks",
        (64, 128, 256, 512),
        512,
        a_step,
    ),
    Part(
        "data passed over: resume",
        "rank 0 finds the skipped data in the metrics' journal, with a rollback every 4,000 steps; the bytes are those"
        " of the rollbacks' rows, each of which lists all earlier ranges.",
        "steps",
        STEPS,
        TARGET,
        resumed,
    ),
]
