"""How far each layout's losses are from those of one plain PyTorch process: the table of docs/parity.md.

    python benchmarks/parity.py --config ds_configs/zero3.json --set run.steps=20 [--processes 2]

Runs the config with the reference engine, then with ZeRO 1, 2 and 3 on so many processes, in fp32 and in bf16, and
prints the largest relative difference of a step's loss and gradient norm. Every run is a real one, in a directory that
is removed afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.cli import add_config_arguments
from pipeline.metrics.journal import read_rows

TRAIN = Path(__file__).resolve().parent.parent / "pipeline/train.py"


def run(arguments: argparse.Namespace, run_dir: Path, *sets: str, processes: int) -> list[dict[str, Any]]:
    """One training run; returns its step rows."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    overrides = [*arguments.overrides, *sets, f"run.dir={run_dir}"]
    words = [word for text in overrides for word in ("--set", text)]
    command = [*torchrun, str(TRAIN), "--config", arguments.config, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return read_rows(run_dir, kind="step")


def largest(found: list[dict[str, Any]], expected: list[dict[str, Any]], key: str) -> float:
    """Largest relative difference of a column over all steps."""
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(found, expected, strict=True))


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    print("| dtype | layout | loss, largest relative difference | gradient norm |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        for dtype, bf16 in (("fp32", "false"), ("bf16", "true")):
            precision = f"bf16.enabled={bf16}"
            expected = run(arguments, Path(work, dtype), "engine=torch", precision, processes=1)
            for stage in (1, 2, 3):
                sets = ("engine=deepspeed", precision, f"zero_optimization.stage={stage}")
                found = run(arguments, Path(work, f"{dtype}-{stage}"), *sets, processes=arguments.processes)
                loss, norm = (largest(found, expected, key) for key in ("loss", "grad_norm"))
                print(f"| {dtype} | ZeRO-{stage}, dp {arguments.processes} | {loss:.1e} | {norm:.1e} |", flush=True)


if __name__ == "__main__":
    main()
