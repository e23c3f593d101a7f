"""Distillation against its cross-entropy control over several seeds, with the interval of the mean difference.

    python -m benchmarks.distillation_seeds --config demo/student.json --out out/seeds --seeds 1 2 3 --set run.steps=360

For every seed: `headrace distill` and `headrace distill --control` of the config, one process each. The seed decides
the order of the data (and the first values of a student that starts afresh), the same for both, so that differences are
taken within pairs. The interval is Student's t at 95 % for the mean of the paired differences. Runs that are finished
are not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from pathlib import Path

from pipeline.runtime.metrics.journal import read_rows

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantile 0.975 of Student's t by degrees of freedom."""


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config of a distillation")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both runs; repeatable")
    arguments = parser.parse_args()
    if not 2 <= len(arguments.seeds) <= len(T_95) + 1:
        parser.error(f"an interval needs 2 to {len(T_95) + 1} seeds")
    pairs = [pair(arguments.config, arguments.out / f"seed-{seed}", seed, arguments.set) for seed in arguments.seeds]
    print("| seed | distilled | control | difference |\n|---|---|---|---|")
    for seed, (distilled, control) in zip(arguments.seeds, pairs, strict=True):
        print(f"| {seed} | {distilled:.4f} | {control:.4f} | {distilled - control:+.4f} |")
    mean, half = interval([distilled - control for distilled, control in pairs])
    print(f"\nmean difference {mean:+.4f} nats per token, 95 % interval {mean - half:+.4f} to {mean + half:+.4f}")


def pair(config: str, run_dir: Path, seed: int, overrides: list[str]) -> tuple[float, float]:
    """The last held-out losses of a distillation and its control, nats per token."""
    fields = (f"run.dir={run_dir}", f"run.seed={seed}", "engine=torch", "zero_optimization.stage=2", *overrides)
    common = ["--config", config, *(word for field in fields for word in ("--set", field))]
    for extra in ([], ["--control"]):
        subprocess.run([sys.executable, "-m", "headrace", "distill", *extra, *common], check=True, stdout=sys.stderr)
    ends = [read_rows(path, kind="eval")[-1]["loss"] for path in (run_dir, Path(f"{run_dir}-control"))]
    return ends[0], ends[1]


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean of the differences, and half the width of its 95 % interval."""
    half = T_95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


if __name__ == "__main__":
    main()
