"""Trains on the fake device up to the first checkpoint, by `session.train`, and prints what the loop reads of it.

python -m tests.plan.fake_gpu.loop CONFIG
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pipeline.plan.fake_gpu.device as fake  # isort: skip  before torch
import torch

from pipeline.checkpoint.save import CheckpointWriter
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.engines.objective import CrossEntropy
from pipeline.plan.fake_gpu.kinds import makers, watched
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.fake_gpu.recorder import StepRecorder
from pipeline.run import connect, session
from pipeline.run.batches import RankBatches
from pipeline.run.prepare import prepare
from pipeline.run.trainer import Trainer
from pipeline.runtime.faults.agreement import Agreement, StepFlags
from pipeline.runtime.faults.stop_signals import Stop, StopSignals


class _CheckpointReachedError(Exception):
    """Raised where the first checkpoint would copy the state to the host: there are no numbers to write."""


class _Phases:
    """Counts reads of the device by what the loop does: steps, evaluations, and the rest."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self.evaluations: list[dict[str, Any]] = []
        self.batches = 0
        self.steps = 0

    def begin(self, trainer: Trainer, batch: Any) -> None:
        """In the place of `Trainer._begin`."""
        if not self.steps:  # what was read before is not the loop's
            self._recorder.begin()
        self.steps += 1
        _BEGIN(trainer, batch)

    def evaluate(self, trainer: Trainer, step: int) -> Stop:
        """In the place of `Trainer._evaluate`: its reads are kept apart from those of steps."""
        before, batches = self._reads(), self.batches
        stop = _EVALUATE(trainer, step)
        waits, late = (now - then for now, then in zip(self._reads(), before, strict=True))
        scored = self.batches - batches
        self.evaluations.append({"step": step, "waits": dict(waits), "deferred": dict(late), "batches": scored})
        for counts, added in ((self._recorder.host_reads, waits), (self._recorder.deferred_reads, late)):
            counts.subtract(added)
        return stop

    def scored(self, source: Any, dataset: Any) -> Any:
        """In the place of `RankBatches.evaluation`: counts batches."""
        for batch in _HELDOUT(source, dataset):
            self.batches += 1
            yield batch

    def _reads(self) -> tuple[Counter[str], Counter[str]]:
        return Counter(self._recorder.host_reads), Counter(self._recorder.deferred_reads)


_BEGIN, _EVALUATE, _HELDOUT = Trainer._begin, Trainer.evaluate, RankBatches.evaluation


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is bound to the object it is called of."""
    return lambda owner, *args: function(owner, *args)  # noqa: PLW0108  a bound method would not be


def main() -> None:
    run = resolve(load_config(sys.argv[1], ["compile.enabled=false"]), world_size=1)
    prepared = prepare(run)  # computes numbers: tries the layout on a tiny model
    memory = Memory(makers(), head=(1, 1))
    recorder = StepRecorder(memory, axes_of=str)
    phases = _Phases(recorder)
    # what the host reads of fakes are ones, which would ask the loop to stop; this one process asks nothing
    no_flags = StepFlags(Stop.NO)

    def reached(_writer: Any, *_args: Any, **_kwargs: Any) -> None:
        raise _CheckpointReachedError

    with (
        patch.object(connect, "prepare", lambda _run: prepared),
        patch.object(Trainer, "_begin", _method(phases.begin)),
        patch.object(Trainer, "evaluate", _method(phases.evaluate)),
        patch.object(RankBatches, "evaluation", _method(phases.scored)),
        patch.object(CheckpointWriter, "begin", reached),
        patch.object(Agreement, "begin_max", lambda _self, *values: SimpleNamespace(read=lambda: list(values))),
        patch.object(StepFlags, "agreed", classmethod(lambda _cls, _sums: no_flags)),
        StopSignals(announce=False) as signals,
        fake.fake_tensors(),
        watched(memory),
        recorder.reading_lists(),
        recorder.deferring_reads(),
        recorder,
        contextlib.suppress(_CheckpointReachedError),
    ):
        session.train(run, lambda *_rank: CrossEntropy(), signals=signals)
    found = {
        "steps": phases.steps,
        "waits": {line: count for line, count in recorder.host_reads.items() if count},
        "deferred": {line: count for line, count in recorder.deferred_reads.items() if count},
        "unpinned": dict(recorder.unpinned),
        "evaluations": phases.evaluations,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    assert torch.cuda.is_available()
    main()
