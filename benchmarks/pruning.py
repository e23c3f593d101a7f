"""Pruning and training again: pruned and random initial values, each with distillation and with cross-entropy alone.

    python -m benchmarks.pruning [--share 0.45] [--steps 400] [--seeds 1 2 3] [--work out/pruning]

Needs the demo's teacher (`make demo`). The teacher is pruned to a share of its parameters; then four students of the
pruned shape are trained on the same tokens in the same order with the same learning rate, one process each, and the
held-out loss is that of the last evaluation. What is done is not done again. Prints a row per arm: held-out loss in
nats for each seed, mean, and perplexity of the mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from math import exp, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pipeline.models.folder.model_folder import ModelFolder

ROOT = Path(__file__).resolve().parents[1]
TEACHER, TOKENS = Path("out/demo/models/teacher"), Path("out/demo/tokens")
SEQUENCE, BATCH = 128, 8
ARMS = {
    "pruned, distillation": ("distill.py", False),
    "pruned, cross-entropy": ("train.py", False),
    "random, distillation": ("distill.py", True),
    "random, cross-entropy": ("train.py", True),
}
"""Name -> (entry point, whether the initial values are random)."""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--share", type=float, default=0.45, help="of the teacher's parameters")
    parser.add_argument("--steps", type=int, default=400, help=f"of {BATCH} samples of {SEQUENCE} tokens")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("out/pruning"))
    asked = parser.parse_args()
    pruned = prune(asked)
    tokens = asked.steps * BATCH * SEQUENCE
    print(f"{ModelFolder.open(pruned).parameters:,} parameters, {tokens:,} tokens, lr {asked.lr}")
    print("arm | held-out loss by seed | mean | 95 % interval | perplexity")
    for arm in ARMS:
        losses = [train(asked, pruned, arm, seed) for seed in asked.seeds]
        print(f"{arm} | {', '.join(f'{loss:.4f}' for loss in losses)} | {row(losses)}", flush=True)


def row(losses: list[float]) -> str:
    """Mean, 95 % interval of the mean (Student's t), and perplexity."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(losses))
    interval = "-" if t is None else f"+- {t * stdev(losses) / sqrt(len(losses)):.4f}"
    return f"{mean(losses):.4f} | {interval} | {exp(mean(losses)):.2f}"


def prune(asked: argparse.Namespace) -> Path:
    """The pruned folder."""
    output: Path = asked.work / f"pruned-{asked.share:g}"
    if not output.exists():
        target = {"parameters": int(asked.share * ModelFolder.open(TEACHER).parameters)}
        data = {"path": str(TOKENS), "sequence_length": SEQUENCE, "max_tokens": 40_000}
        fields = {"model": str(TEACHER), "output": str(output), "target": target, "data": data}
        _run("prune.py", _written(asked.work / "prune.json", {**fields, "consumers": ["transformers"]}))
    return output


def train(asked: argparse.Namespace, pruned: Path, arm: str, seed: int) -> float:
    """Held-out loss of one arm, in nats."""
    script, fresh = ARMS[arm]
    name = f"{arm.replace(', ', '-')}-{asked.share:g}-{asked.steps}-{asked.lr:g}-{seed}"
    run = asked.work / name
    if not (run / "metrics.jsonl").exists() or (found := last_loss(run, asked.steps)) is None:
        config: dict[str, Any] = {
            "extends": str(ROOT / "demo/teacher.json"),
            "engine": "torch",
            "zero_optimization": {"stage": 0},
            "model": {"config": "auto", "path": str(pruned), "fresh": fresh},
            "optimizer": {"params": {"lr": asked.lr}},
            "run": {"dir": str(run), "steps": asked.steps, "checkpoint_every": asked.steps, "seed": seed},
            "evaluation": {"every": asked.steps},
        }
        if script == "distill.py":
            config["distill"] = {"teacher": str(TEACHER), "temperature": 1.0, "alpha": 0.9}
        _run(script, _written(asked.work / f"{name}.json", config))
        found = last_loss(run, asked.steps)
    assert found is not None
    return found


def last_loss(run: Path, step: int) -> float | None:
    """Held-out loss of the evaluation at a step; None where there was none."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [float(each["loss"]) for each in rows if each["kind"] == "eval" and each["step"] == step]
    return found[-1] if found else None


def _written(path: Path, config: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1))
    return path


def _run(script: str, config: Path) -> None:
    command = [sys.executable, str(ROOT / "pipeline" / script), "--config", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
