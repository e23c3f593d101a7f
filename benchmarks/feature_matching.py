"""Distillation with and without matching of hidden states and attention relations, over several seeds.

    python -m benchmarks.feature_matching --config student.json --out out/matching --seeds 1 2 3 --set run.steps=400

Of every seed, the same run (data order, first values, steps) with the loss of the logits alone, and with each matching
added: paired differences of the last held-out losses, and the interval of their mean (Student's t, 95 %). Runs that are
finished are not repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.distillation_seeds import interval
from pipeline.runtime.metrics.journal import read_rows

VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "similarity": {"hidden_states": {"weight": 50.0}},
    "mse": {"hidden_states": {"weight": 0.01, "loss": "mse"}},
    "attention": {"attentions": {"weight": 1.0}},
    "similarity and attention": {"hidden_states": {"weight": 50.0}, "attentions": {"weight": 1.0}},
}
"""Name -> what is added to `distill`."""


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config of a distillation without matching")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs; repeatable")
    arguments = parser.parse_args()
    if "none" not in arguments.variants or len(arguments.seeds) < 2:
        parser.error("a difference needs the variant none, and an interval two seeds")
    ends = {name: [end(arguments, name, seed) for seed in arguments.seeds] for name in arguments.variants}
    print("| matching | " + " | ".join(f"seed {seed}" for seed in arguments.seeds) + " | difference | 95 % interval |")
    print("|---|" + "---|" * (len(arguments.seeds) + 2))
    for name, losses in ends.items():
        mean, half = interval([own - base for own, base in zip(losses, ends["none"], strict=True)])
        row = [name, *(f"{loss:.4f}" for loss in losses), f"{mean:+.4f}", f"{mean - half:+.4f} to {mean + half:+.4f}"]
        print("| " + " | ".join(row) + " |")


def end(arguments: argparse.Namespace, name: str, seed: int) -> float:
    """The last held-out loss of a run, nats per token."""
    run_dir = arguments.out / f"{re.sub('[^a-z]+', '-', name)}-{seed}"
    matching = [f"distill.{key}={json.dumps(value)}" for key, value in VARIANTS[name].items()]
    fields = (f"run.dir={run_dir}", f"run.seed={seed}", "engine=torch", "zero_optimization.stage=2", *matching)
    words = [word for field in (*fields, *arguments.set) for word in ("--set", field)]
    command = [sys.executable, "-m", "headrace", "distill", "--config", arguments.config, *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    loss: float = read_rows(run_dir, kind="eval")[-1]["loss"]
    return loss


if __name__ == "__main__":
    main()
