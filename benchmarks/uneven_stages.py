"""Benchmark of pipeline stages by speed: pp 2, one rank at half speed, with even, given and measured stages.

    python -m benchmarks.uneven_stages [--steps 30] [--rounds 3] [--slowdown 2] [--engine torch]

Runs of the three kinds, in turns, train the same model on the same random tokens, and rank 1 is suspended for as long
as it works (tests/throttled.py); each rank should have a core. Figures are tokens per second over the steps after the
warm-up, by the median and by the mean of their times, and the largest relative difference of the loss curves.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.uneven_shares import (
    SEQUENCE,
    VOCABULARY,
    print_loss_difference,
    print_speeds,
    rows_of,
    train_throttled,
)
from pipeline.plan.proof.tokens import write_tokens
from pipeline.runtime.metrics.journal import read_rows

SAMPLES, WARM_UP = 8, 3
MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12,
    "num_attention_heads": 4,
}  # fmt: skip
STAGES = {"torch": 0, "deepspeed": 1}
"""Engine -> its ZeRO stage."""
KINDS = ("even", "given", "measured")
"""Divisions of the layers: by cost, by the true speeds, and by measured ones."""


def main() -> None:
    """Runs the benchmark and prints its results."""
    arguments = _arguments()
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=400_000, longest=2 * SEQUENCE)
        runs: dict[str, list[Path]] = {name: [] for name in KINDS}
        for number in range(arguments.rounds):
            for name in KINDS:
                speeds = {"even": None, "given": [arguments.slowdown, 1], "measured": "measured"}[name]
                config = config_of(tokens, arguments.engine, speeds, steps=arguments.steps)
                made = train_throttled(work / f"{name}-{number}", config, slowdown=arguments.slowdown)
                runs[name].append(made)
        report(arguments.engine, runs, slowdown=arguments.slowdown)
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")


def config_of(tokens: Path, engine: str, speeds: Any, *, steps: int) -> dict[str, Any]:
    """A pipeline of two ranks; everything but the directory."""
    return {
        "engine": engine,
        "model": {"config": {**MODEL, "vocab_size": VOCABULARY}},
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": SEQUENCE},
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": STAGES[engine]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"steps": steps, "seed": 7},
        "evaluation": {"samples": 2},
        "stragglers": {"every": None},
        "parallel": {"pp": 2, "stage_speeds": speeds},
    }


def report(engine: str, runs: dict[str, list[Path]], *, slowdown: float) -> None:
    """Prints the speeds of the runs, the measured stages, and how far the losses are apart."""
    rows = rows_of(runs)
    print(f"{engine}, pp 2, rank 1 at 1/{slowdown:g} of its speed: tokens/s by the median and the mean of steps")
    speeds = print_speeds(rows, tokens=SAMPLES * SEQUENCE, warm_up=WARM_UP)
    for name in KINDS[1:]:
        median, mean = (found / even for found, even in zip(speeds[name], speeds["even"], strict=True))
        print(f"{name + ' / even':>26}  {median:>9.2f}  {mean:>9.2f}")
    for run_dir in runs["measured"]:
        for row in read_rows(run_dir, kind="event"):
            if row["event"] == "stages":
                counts = [end - first for first, end in row["layers"]]
                print(f"{'measured':>26}  speeds {row['speeds']}, layers {counts}")
    print_loss_difference([each for name in KINDS for each in rows[name]])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, in turns")
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--engine", choices=STAGES, default="torch")
    parser.add_argument("--work", type=Path, default=None, help="directory of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
