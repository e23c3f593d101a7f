"""Islands (DiLoCo) against data parallelism for equal tokens: held-out loss, and bytes between sites.

    python -m benchmarks.islands --config demo/teacher.json --islands 4 --inner 100 --first 500 --steps 1000

As in DiLoCo's paper all runs begin with one model, trained for `--first` steps by an ordinary run with the samples of
all islands as its batch. Data parallelism continues like that run. Islands train for as many steps, each with a batch
of the config's size. Both restart the config's learning rate (`--lr`; `--islands-lr` for islands alone) and schedule.
With `--schedule-steps` the first run is a part of a longer schedule: its learning rate has not decayed to nothing.
Native engine, ZeRO stage 0; one process per island, and `--processes` for ordinary runs.

Data parallelism's bytes are computed for a ring all-reduce of fp32 gradients between as many sites: 2 (m - 1) / m x 4
bytes per parameter, step and site. Islands' bytes are `bytes_sent` in the journals; on the wire there are 1.00 to 1.15
times as many (benchmark `islands_netem` of b3bed26c).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import Seconds, make_parser, print_head, print_row
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.config.load import read_config
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.metrics.journal import read_rows


class Result(NamedTuple):
    """A run: its name, (step, held-out loss), MB sent per site (computed or counted), and seconds of its command."""

    name: str
    losses: tuple[tuple[int, float], ...]
    megabytes: float
    how: str
    seconds: float

    def print(self, reference: Result) -> None:
        """Prints the run's row of the table."""
        loss, other = self.losses[-1][1], reference.losses[-1][1]
        sent, fewer = f"{self.megabytes:,.1f} ({self.how})", f"{reference.megabytes / self.megabytes:,.0f}"
        print_row(self.name, f"{loss:.4f}", f"{loss / other - 1:+.1%}", sent, fewer, f"{self.seconds:,.0f}")


def main() -> None:
    """Prints the table in Markdown."""
    arguments = _arguments()
    common = ["engine=torch", "zero_optimization.stage=0", f"evaluation.every={arguments.inner}"]
    common += arguments.overrides
    if arguments.first:
        model = _first_model(arguments, common)
        common += ["model.config=null", f"model.path={model}"]
    common += [f"optimizer.params.lr={arguments.lr}"] if arguments.lr else []
    common += [f"run.steps={arguments.steps}", f"run.checkpoint_every={arguments.steps}"]
    parameters, reference = _data_parallel(arguments, common)
    print_head("run", "held-out loss", "over data parallelism", "MB sent per site", "times fewer", "wall s")
    results = [reference]
    reference.print(reference)
    for compress in arguments.compress:
        results.append(_islands(arguments, common, compress))
        results[-1].print(reference)
    for each in results:
        print(f"\n{each.name}: " + ", ".join(f"{step} {loss:.4f}" for step, loss in each.losses))
    print(f"\n{parameters:,} parameters, {arguments.islands} islands, H = {arguments.inner}, {arguments.steps} steps")


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config of a run")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--inner", type=int, default=100, help="inner steps between exchanges (H)")
    parser.add_argument("--first", type=int, default=0, help="steps of the ordinary run that all begin with")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, help="peak learning rate of all runs but the first")
    parser.add_argument("--islands-lr", type=float, help="peak learning rate of the islands; --lr by default")
    parser.add_argument("--schedule-steps", type=int, help="length of the schedule of the first run")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--momentum-follows-lr", action="store_true", help="islands.outer.momentum_follows_lr")
    parser.add_argument("--compress", nargs="+", default=["none", "int8"])
    parser.add_argument("--processes", type=int, default=1, help="of ordinary runs")
    parser.add_argument("--out", type=Path, default=Path("out/islands"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="FIELD=VALUE")
    return parser.parse_args()


def _batch(arguments: argparse.Namespace, common: Sequence[str]) -> int:
    batch = read_config(arguments.config, common).config.train_batch_size
    assert batch is not None
    return batch * int(arguments.islands)


def _first_model(arguments: argparse.Namespace, common: Sequence[str]) -> Path:
    """Trains the ordinary run with whose model all others begin; returns the model as a Hugging Face directory."""
    folder, model = arguments.out / "first", arguments.out / "first-model"
    if not model.exists():
        steps = [f"run.steps={arguments.first}", f"run.dir={folder}", f"train_batch_size={_batch(arguments, common)}"]
        if arguments.schedule_steps:
            steps.append(f"scheduler.params.total_num_steps={arguments.schedule_steps}")
        _run("train", arguments, [*common, *steps], processes=arguments.processes)
        command = [sys.executable, "-m", "headrace", "export", str(folder), str(model)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Path(model)


def _data_parallel(arguments: argparse.Namespace, common: Sequence[str]) -> tuple[int, Result]:
    folder, sites = arguments.out / "data-parallel", arguments.islands
    steps = [f"train_batch_size={_batch(arguments, common)}", f"run.dir={folder}"]
    seconds = _run("train", arguments, [*common, *steps], processes=arguments.processes)
    checkpoint = (folder / "checkpoints/latest").resolve()
    parameters = sum(each.numel for each in read_metadata(checkpoint).tensors if each.key.startswith("weight/"))
    sent = 2 * (sites - 1) / sites * 4 * parameters * arguments.steps / 1e6
    return parameters, Result("data parallelism", _losses(folder), sent, "computed", seconds)


def _islands(arguments: argparse.Namespace, common: Sequence[str], compress: str) -> Result:
    folder = arguments.out / f"islands-{compress}"
    section = [f"islands.count={arguments.islands}", f"islands.steps={arguments.inner}", "islands.start_s=600"]
    section += [f"islands.compress={compress}", f"islands.lighthouse=127.0.0.1:{free_port()}"]
    section += [f"islands.outer.lr={arguments.outer_lr}", f"islands.outer.momentum={arguments.outer_momentum}"]
    if arguments.momentum_follows_lr:
        section.append("islands.outer.momentum_follows_lr=true")
    if arguments.islands_lr:
        section.append(f"optimizer.params.lr={arguments.islands_lr}")
    seconds = _run("islands", arguments, [*common, *section, f"run.dir={folder}"])
    rows = [row for row in read_rows(folder / "island-0", kind="event") if row["event"] == "exchange"]
    assert all(len(row["trained"]) == arguments.islands for row in rows)
    sent = sum(row["bytes_sent"] for row in rows) / 1e6
    kind = "fp32" if compress == "none" else compress
    return Result(f"islands, {kind}", _losses(folder / "island-0"), sent, "counted", seconds)


def _run(verb: str, arguments: argparse.Namespace, overrides: Sequence[str], *, processes: int = 1) -> float:
    words = [word for text in overrides for word in ("--set", text)]
    words += ["--nproc", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "headrace", verb, "--config", str(arguments.config), *words]
    return Seconds.of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)).wall


def _losses(run_dir: Path) -> tuple[tuple[int, float], ...]:
    return tuple((int(row["step"]), float(row["loss"])) for row in read_rows(run_dir, kind="eval"))


if __name__ == "__main__":
    main()
