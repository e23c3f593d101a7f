"""Islands (DiLoCo) against data parallelism at equal tokens: held-out loss and bytes between sites, counted.

    python -m benchmarks.islands --config demo/teacher.json --islands 4 --inner 100 --steps 400 --out out/islands

Data parallelism is one run with a batch of all islands' samples, for as many steps; its bytes are those of a ring
all-reduce of fp32 gradients between as many sites, computed: 2 (m - 1) / m x 4 bytes per parameter, step and site.
Islands' bytes are the journals' `bytes_sent`. All with the native engine, ZeRO stage 0, a process each; learning rate
and schedule are the config's, tuned for neither.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint.metadata import read_metadata
from pipeline.config.load import read_config
from pipeline.launch.group import free_port
from pipeline.metrics.journal import read_rows


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config of a run")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--inner", type=int, default=100, help="inner steps between exchanges (H)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("out/islands"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    common = ["engine=torch", "zero_optimization.stage=0", f"run.steps={arguments.steps}", "evaluation.every=null"]
    common += [f"run.checkpoint_every={arguments.steps}", *arguments.overrides]
    print("| run | held-out loss | MB sent per site | wall s |\n|---|---|---|---|")
    parameters = _data_parallel(arguments, common)
    for compress in ("none", "int8"):
        _islands(arguments, common, compress)
    print(f"\n{parameters:,} parameters, {arguments.islands} islands, H = {arguments.inner}, {arguments.steps} steps")


def _data_parallel(arguments: argparse.Namespace, common: Sequence[str]) -> int:
    batch = read_config(arguments.config, common).config.train_batch_size
    assert batch is not None
    folder, sites = arguments.out / "data-parallel", arguments.islands
    seconds = _run("train", arguments.config, [*common, f"train_batch_size={batch * sites}", f"run.dir={folder}"])
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    parameters = sum(each.numel for each in read_metadata(checkpoint).tensors if each.key.startswith("weight/"))
    sent = 2 * (sites - 1) / sites * 4 * parameters * arguments.steps
    print(f"| data parallelism | {_loss(folder):.4f} | {sent / 1e6:,.1f} (computed) | {seconds:.0f} |", flush=True)
    return parameters


def _islands(arguments: argparse.Namespace, common: Sequence[str], compress: str) -> None:
    folder = arguments.out / f"islands-{compress}"
    section = [f"islands.count={arguments.islands}", f"islands.steps={arguments.inner}", "islands.start_s=600"]
    section += [f"islands.compress={compress}", f"islands.lighthouse=127.0.0.1:{free_port()}"]
    seconds = _run("islands", arguments.config, [*common, *section, f"run.dir={folder}"])
    rows = [row for row in read_rows(folder / "island-0", kind="event") if row["event"] == "exchange"]
    assert all(len(row["trained"]) == arguments.islands for row in rows)
    sent = sum(row["bytes_sent"] for row in rows) / 1e6
    loss = _loss(folder / "island-0")
    print(f"| islands, {compress} | {loss:.4f} | {sent:,.1f} (counted) | {seconds:.0f} |", flush=True)


def _run(verb: str, config: Path, overrides: Sequence[str]) -> float:
    words = [word for text in overrides for word in ("--set", text)]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "headrace", verb, "--config", str(config), *words], check=True, stdout=subprocess.DEVNULL
    )
    return time.monotonic() - began


def _loss(run_dir: Path) -> float:
    return float(read_rows(run_dir, kind="eval")[-1]["loss"])


if __name__ == "__main__":
    main()
