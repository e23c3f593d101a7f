"""`pipeline/train.py` with a record of every pipeline pass: which, when, on which rank.

    torchrun --nproc-per-node 2 -m benchmarks.recorded_passes FOLDER --config FILE [--set ...]

Each rank appends one JSON line per training step to FOLDER/RANK.jsonl: `start` and `end` in seconds of a clock that all
processes of a host share, and `passes`: [kind, virtual stage, micro-batch, start, end]. Evaluations are not recorded.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Recorder:
    """Collects the passes of the current step."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.environ['RANK']}.jsonl"
        self._passes: list[Any] | None = None

    def timed(self, function: Callable[..., Any], name: Callable[..., list[Any]]) -> Callable[..., Any]:
        """Wraps a function whose calls within a step are passes; `name` gives kind, virtual stage and micro-batch."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if self._passes is not None:
                self._passes.append([*name(*args, **kwargs), start, time.perf_counter()])
            return result

        return call

    def step(self, function: Callable[..., Any], trains: Callable[..., bool]) -> Callable[..., Any]:
        """Wraps a function whose calls are steps if `trains` returns true."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not trains(*args, **kwargs):
                return function(*args, **kwargs)
            self._passes, start = [], time.perf_counter()
            result = function(*args, **kwargs)
            row = {"start": start, "end": time.perf_counter(), "passes": self._passes}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._passes = None
            return result

        return call


def record_torch(recorder: Recorder) -> None:
    """Records torch's schedules."""
    from torch.distributed.pipelining import schedules  # noqa: PLC0415
    from torch.distributed.pipelining.stage import _PipelineStageBase as Stage  # noqa: PLC0415

    def backward(stage: Any, index: int, *_: Any, full_backward: bool = True, **__: Any) -> list[Any]:
        return ["B" if full_backward else "I", stage.stage_index, index]

    Stage.forward_one_chunk = recorder.timed(
        Stage.forward_one_chunk, lambda stage, index, *_, **__: ["F", stage.stage_index, index]
    )
    Stage.backward_one_chunk = recorder.timed(Stage.backward_one_chunk, backward)
    Stage.backward_weight_one_chunk = recorder.timed(
        Stage.backward_weight_one_chunk, lambda stage, index, *_, **__: ["W", stage.stage_index, index]
    )
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind.step = recorder.step(kind.step, lambda *_, **__: True)


def record_deepspeed(recorder: Recorder) -> None:
    """Records DeepSpeed's schedule; micro-batches are counted, because its instructions name only buffers."""
    from deepspeed.runtime.pipe import schedule  # noqa: PLC0415
    from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: PLC0415

    done: Counter[str] = Counter()

    def named(kind: str) -> Callable[..., list[Any]]:
        def name(engine: Any, *_: Any, **__: Any) -> list[Any]:
            done[kind] += 1
            return [kind, engine.stage_id, (done[kind] - 1) % engine.micro_batches]

        return name

    table = PipelineEngine._INSTRUCTION_MAP
    for kind, instruction in (("F", schedule.ForwardPass), ("B", schedule.BackwardPass)):
        table[instruction] = recorder.timed(table[instruction], named(kind))
    PipelineEngine._exec_schedule = recorder.step(
        PipelineEngine._exec_schedule, lambda _, pipe_schedule: isinstance(pipe_schedule, schedule.TrainSchedule)
    )


if __name__ == "__main__":
    own = Recorder(Path(sys.argv.pop(1)))
    record_torch(own)
    record_deepspeed(own)
    from foundation.cli import guarded, leave
    from pipeline.train import main

    leave(guarded(main))
