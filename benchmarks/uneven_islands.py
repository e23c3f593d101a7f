"""Islands of different speeds: synchronous, overlapped and asynchronous at equal tokens; held-out loss and tokens/s.

    python -m benchmarks.uneven_islands --config FILE --slots 400 --inner 10 --delays 0.2,0.4 --out out/uneven

Each island is a process that sleeps before every step, so that speeds are known on a machine with few cores: the delays
should be longer than the steps themselves. Seconds are from the first step of any island to the last one's end of
training, by the journals: without the start. The islands' own link is the loopback interface.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.config.load import read_config
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.metrics.journal import read_rows


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config of a run")
    parser.add_argument("--slots", type=int, default=400, help="global batches of all islands together")
    parser.add_argument("--inner", type=int, default=10, help="inner steps between exchanges (H)")
    parser.add_argument("--delays", default="0.2,0.4", help="seconds that each island sleeps before a step")
    parser.add_argument("--warmup", type=int, default=40, help="of the slots")
    parser.add_argument("--out", type=Path, default=Path("out/uneven"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    count = len(arguments.delays.split(","))
    print("| mode | held-out loss | tokens/s | seconds | steps of each island |\n|---|---|---|---|---|")
    for name, sets in {
        "synchronous": [],
        f"synchronous, overlap {arguments.inner // 2}": [f"islands.overlap={arguments.inner // 2}"],
        "asynchronous": ["islands.mode=asynchronous"],
    }.items():
        share = 1 if name == "asynchronous" else count
        steps, warmup = arguments.slots // share, arguments.warmup // share
        common = [
            "engine=torch", "zero_optimization.stage=0", "evaluation.every=null", f"run.steps={steps}",
            f"run.checkpoint_every={steps}", f"scheduler.params.warmup_num_steps={warmup}",
            f"islands.count={count}", f"islands.steps={arguments.inner}", "islands.start_s=600",
            f"islands.lighthouse=127.0.0.1:{free_port()}", *sets, *arguments.overrides,
        ]  # fmt: skip
        folder = arguments.out / name.replace(", ", "-").replace(" ", "-")
        _run(arguments, common, folder)
        print(_row(arguments, common, folder, name), flush=True)


def _run(arguments: argparse.Namespace, common: Sequence[str], folder: Path) -> None:
    def words(sets: Sequence[str]) -> list[str]:
        return ["--config", str(arguments.config), *(word for text in sets for word in ("--set", text))]

    folder.mkdir(parents=True)
    lighthouse = subprocess.Popen(
        [sys.executable, "-m", "headrace", "islands", "--only-lighthouse", *words(common)], stdout=subprocess.DEVNULL
    )
    try:
        islands = []
        for number, delay in enumerate(arguments.delays.split(",")):
            sets = [*common, f"islands.name=island-{number}", f"run.dir={folder / f'island-{number}'}"]
            command = [sys.executable, "-m", "benchmarks.delayed_island", delay, "train", *words(sets)]
            with (folder / f"island-{number}.log").open("wb") as log:
                islands.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        while any(each.poll() is None for each in islands):
            time.sleep(0.2)
        assert all(each.returncode == 0 for each in islands), f"see {folder}"
    finally:
        lighthouse.terminate()
        lighthouse.wait()


def _row(arguments: argparse.Namespace, common: Sequence[str], folder: Path, name: str) -> str:
    config = read_config(arguments.config, common).config
    assert config.train_batch_size is not None
    tokens = arguments.slots * config.train_batch_size * config.data.sequence_length
    runs = [folder / f"island-{number}" for number in range(config.islands.count if config.islands else 0)]
    steps = [read_rows(run, kind="step") for run in runs]
    ends = [row for run in runs for row in read_rows(run, kind="event") if row["event"] == "exchange"]
    began = min(_time(rows[0]) - float(rows[0]["seconds"]) for rows in steps)
    seconds = max(_time(row) for row in (*ends, *(rows[-1] for rows in steps))) - began
    loss = float(read_rows(runs[0], kind="eval")[-1]["loss"])
    counts = " and ".join(str(len(rows)) for rows in steps)
    return f"| {name} | {loss:.4f} | {tokens / seconds:,.0f} | {seconds:.1f} | {counts} |"


def _time(row: dict[str, Any]) -> float:
    return datetime.fromisoformat(str(row["time"])).timestamp()


if __name__ == "__main__":
    main()
