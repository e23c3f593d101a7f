"""Simulated seconds of a pipeline's step against measured ones on the CPU, for every schedule.

    python -m benchmarks.pipeline_simulation [--work FOLDER] [--ranks 2] [--steps 12]

A llama in fp32 is trained over gloo with each schedule, and every pass is recorded (`recorded_passes.py`). A measured
step lasts from the first pass to the last over all ranks. It is simulated twice: with the median times of a stage's
passes, and step by step with each pass's own time. The second shows what the schedule's model leaves out on a machine
whose speed varies. Messages take the shortest time between two stages' forward passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import llama, make_parser, print_head, print_row, ratio, spread, work_folder
from benchmarks.loop import make_tokens
from pipeline.plan.predict.passes import Instruction, Program
from pipeline.plan.predict.pipeline_simulation import StageTimes, simulate_pipeline
from pipeline.plan.predict.schedule_programs import make_program

HERE = Path(__file__).parent
SEQUENCE, MICRO_BATCHES = 64, 8
CASES = [
    ("torch", "gpipe", 1),
    ("torch", "1f1b", 1),
    ("torch", "interleaved_1f1b", 2),
    ("torch", "zero_bubble", 2),
    ("deepspeed", "1f1b", 1),
]


def main() -> None:
    """Runs and simulates every schedule, and prints a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    head = ("schedule", "measured step, ms (quartiles)", "by medians, ms", "by medians / measured")
    print_head(*head, "each pass's own time / measured (quartiles)", "bubble, simulated")
    with work_folder() as temporary:
        work = asked.work or temporary
        tokens = make_tokens(work)
        for engine, schedule, virtual in CASES:
            folder = work / f"{engine}-{schedule}"
            run(folder, tokens, engine, schedule, ranks=asked.ranks, steps=asked.steps)
            steps = recorded(folder, asked.ranks)[2:]  # the first steps allocate
            program = make_program(
                engine, schedule, ranks=asked.ranks, micro_batches=MICRO_BATCHES, virtual_stages=virtual
            )
            links = transfers(steps, program)
            timeline = simulate_pipeline(program, stage_times(steps, program), transfers=links)
            replayed = [
                simulate_pipeline(program, [Recorded(step)] * program.stages, transfers=links).seconds for step in steps
            ]
            measured = [span(step) for step in steps]
            by_medians = (f"{timeline.seconds * 1e3:.1f}", f"{timeline.seconds / median(measured):.3f}")
            own = ratio(replayed, measured)
            in_ms = spread([each * 1e3 for each in measured], 1)
            print_row(f"{engine} {schedule}", in_ms, *by_medians, own, f"{timeline.bubble:.1%}")


class Recorded:
    """The times of the passes of one step."""

    def __init__(self, step: Sequence[Any]) -> None:
        passes = (each for rank in step for each in rank)
        self._seconds = {(kind, stage, index): end - start for kind, stage, index, start, end in passes}

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a pass, as in `StageTimes.seconds`."""
        return self._seconds[instruction.kind.value, instruction.stage, instruction.micro_batch]


def run(folder: Path, tokens: Path, engine: str, schedule: str, *, ranks: int, steps: int) -> None:
    """Trains, and records every pass."""
    folder.mkdir(parents=True)
    config = {
        "engine": engine,
        "model": llama(hidden=128, layers=8),
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": SEQUENCE},
        "parallel": {"pp": ranks, "schedule": schedule},
        "train_batch_size": 4 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"dir": str(folder / "run"), "steps": steps, "checkpoint_every": steps},
        "evaluation": {"samples": 4},
        "stragglers": {"every": None},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "benchmarks.recorded_passes", str(folder), "--config", str(path)]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def recorded(folder: Path, ranks: int) -> list[list[list[Any]]]:
    """The recorded passes: of every step, for every rank."""
    rows = [[json.loads(line)["passes"] for line in (folder / f"{r}.jsonl").open()] for r in range(ranks)]
    return [list(step) for step in zip(*rows, strict=True)]


def span(step: Sequence[Sequence[Any]]) -> float:
    """Seconds from the first pass of any rank to the last."""
    return max(each[-1] for rank in step for each in rank) - min(each[-2] for rank in step for each in rank)


def stage_times(steps: Sequence[Sequence[Any]], program: Program) -> list[StageTimes]:
    """Median time of a stage's passes."""
    seconds: Mapping[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for kind, stage, _, start, end in (each for rank in step for each in rank):
            seconds[kind, stage].append(end - start)
    middle = {key: median(values) for key, values in seconds.items()}
    return [
        StageTimes(
            middle["F", stage],
            middle["B", stage] if ("B", stage) in middle else middle["I", stage],
            middle.get(("W", stage), 0.0),
        )
        for stage in range(program.stages)
    ]


def transfers(steps: Sequence[Sequence[Any]], program: Program) -> list[float]:
    """Shortest time between two stages' forward passes of a micro-batch: the least time of its message."""
    shortest = [float("inf")] * (program.stages - 1)
    for step in steps:
        passes = {(kind, stage, index): (start, end) for rank in step for kind, stage, index, start, end in rank}
        for (kind, stage, index), (_, end) in passes.items():
            if kind == "F" and stage < program.stages - 1:
                shortest[stage] = min(shortest[stage], passes["F", stage + 1, index][0] - end)
    return shortest


if __name__ == "__main__":
    main()
