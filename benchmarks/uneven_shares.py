"""Benchmark of uneven shares: two ranks, one at half speed, with even shares and with `parallel.shares` "auto".

    python -m benchmarks.uneven_shares [--steps 60] [--rounds 3] [--slowdown 2] [--layout torch-0] [--unthrottled]

Runs of both kinds, in turns, train the same model on the same random tokens, and rank 1 is suspended for as long as it
works (tests/throttled.py); each rank should have a core. Figures are tokens per second over the steps after the
warm-up, by the median and by the mean of their times, and the largest relative difference of the loss curves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.plan.proof.tokens import write_tokens
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import ROOT

VOCABULARY, SEQUENCE, SAMPLES = 512, 128, 24
WARM_UP = 20
"""Steps that are not counted: by then the shares have been measured four times."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "torch-0": {"engine": "torch", "zero_optimization": {"stage": 0}},
    "torch-2": {"engine": "torch", "zero_optimization": {"stage": 2}},
    "torch-3": {"engine": "torch", "zero_optimization": {"stage": 3}},
    "deepspeed-1": {"engine": "deepspeed", "zero_optimization": {"stage": 1}},
    "deepspeed-3": {"engine": "deepspeed", "zero_optimization": {"stage": 3}},
}
MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip

Curve = list[dict[str, Any]]
"""The rows of a run's steps."""


def main() -> None:
    """Runs the benchmark and prints its results."""
    arguments = _arguments()
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=400_000, longest=2 * SEQUENCE)
        for layout in arguments.layout:
            runs: dict[str, list[Path]] = {}
            for _ in range(arguments.rounds):
                for name, shares in (("even", None), ("auto", "auto")):
                    at = work / f"{layout}-{name}-{len(runs.get(name, []))}"
                    made = train(at, tokens, layout, shares, arguments.slowdown, arguments.steps)
                    runs.setdefault(name, []).append(made)
            if arguments.unthrottled:
                runs["even, no rank throttled"] = [
                    train(work / f"{layout}-full", tokens, layout, None, 1.0, arguments.steps)
                ]
            report(layout, runs, slowdown=arguments.slowdown)
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")


def train(run_dir: Path, tokens: Path, layout: str, shares: str | None, slowdown: float, steps: int) -> Path:
    """Trains with rank 1 throttled; returns the run's directory."""
    config = {
        "model": {"config": {**MODEL, "vocab_size": VOCABULARY}},
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": SEQUENCE},
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"steps": steps, "seed": 7},
        "evaluation": {"samples": 2},
        "stragglers": {"every": None},
        "parallel": {"shares": shares},
        **LAYOUTS[layout],
    }
    return train_throttled(run_dir, config, slowdown=slowdown)


def train_throttled(run_dir: Path, config: dict[str, Any], *, slowdown: float) -> Path:
    """Trains on two processes of which rank 1 is throttled; returns the run's directory."""
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps({**config, "run": {**config["run"], "dir": str(run_dir)}}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(ROOT / "tests/throttled.py"), "1", f"{slowdown:g}", str(ROOT / "pipeline/train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*torchrun, *script, "--config", str(path)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return run_dir


def report(layout: str, runs: dict[str, list[Path]], *, slowdown: float) -> None:
    """Prints the speeds of a layout's runs, the shares, and how far their losses are apart."""
    rows = rows_of(runs)
    print(f"{layout}, 2 ranks, rank 1 at 1/{slowdown:g} of its speed: tokens/s by the median and the mean of steps")
    speeds = print_speeds(rows, tokens=SAMPLES * SEQUENCE, warm_up=WARM_UP)
    ratios = [auto / even for auto, even in zip(speeds["auto"], speeds["even"], strict=True)]
    print(f"{'auto / even':>26}  {ratios[0]:>9.2f}  {ratios[1]:>9.2f}")
    for run_dir in runs["auto"]:
        events = [row for row in read_rows(run_dir, kind="event") if row["event"] == "shares"]
        print(f"{'shares of auto':>26}  " + ", ".join(f"{row['samples']} from step {row['step']}" for row in events))
    print_loss_difference([*rows["even"], *rows["auto"]])


def rows_of(runs: dict[str, list[Path]]) -> dict[str, list[Curve]]:
    """Kind of run -> the rows of the steps of each."""
    return {name: [list(read_rows(each, kind="step")) for each in found] for name, found in runs.items()}


def print_speeds(rows: dict[str, list[Curve]], *, tokens: int, warm_up: int) -> dict[str, list[float]]:
    """Prints and returns tokens/s of every kind, by the median and the mean of the steps after the warm-up."""
    speeds: dict[str, list[float]] = {}
    for name, found in rows.items():
        seconds = [row["seconds"] for each in found for row in each if row["step"] > warm_up]
        speeds[name] = [tokens / each for each in (statistics.median(seconds), statistics.fmean(seconds))]
        print(f"{name:>26}  {speeds[name][0]:>9,.0f}  {speeds[name][1]:>9,.0f}")
    return speeds


def print_loss_difference(curves: list[Curve]) -> None:
    """Prints how far the losses of runs are from those of the first."""
    losses = [[row["loss"] for row in each] for each in curves]
    apart = max(abs(a / b - 1) for curve in losses for a, b in zip(curve, losses[0], strict=True))
    print(f"{'largest loss difference':>26}  {apart:.1e} (relative, {len(losses[0])} steps, fp32)", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, in turns")
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--unthrottled", action="store_true", help="also with two ranks at full speed")
    parser.add_argument("--work", type=Path, default=None, help="directory of the runs")
    arguments = parser.parse_args()
    arguments.layout = arguments.layout or ["torch-0"]
    return arguments


if __name__ == "__main__":
    main()
