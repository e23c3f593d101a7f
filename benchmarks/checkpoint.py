"""Cost of a checkpoint: time for which training is blocked and time until it is on disk, against `torch.save`.

    python -m benchmarks.checkpoint [--parameters 50e6] [--rounds 8] [--dir DIRECTORY]

One process has fp32 weights and two moments (12 bytes per parameter) in tensors of 4M elements. The methods alternate,
and each flushes to disk. Ours also checksums every byte, writes the manifest, renames, and deletes the previous
checkpoint. The table shows medians with quartiles of seconds, and of the ratio to `torch.save` in the same round.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.harness import Seconds, alternate, make_parser, print_head, print_row, ratio, spread, work_folder
from pipeline.checkpoint import named_state
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.sections.optimizers import ADAMW

TENSOR = 4 << 20
"""Elements of a tensor: a matrix of 2048 x 2048."""
Method = Callable[[], tuple[float, float]]
"""Function that saves; returns the seconds for which training is blocked, and until everything is on disk."""


def main() -> None:
    """Prints the table in Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dir", help="a directory on the disk to measure; the temporary one when absent")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    state = make_state(int(arguments.parameters))
    with work_folder(arguments.dir) as work:
        methods = {
            "torch.save": bare(state, work / "bare"),
            "dcp.save": plain_dcp(state, work / "dcp"),
            "ours, blocking": ours(state, work / "blocking", background=False),
            "ours, in background": ours(state, work / "background", background=True),
        }
        # no method waits for another's dirty pages
        times = alternate(methods, arguments.rounds, before=os.sync)
    print(f"{sum(t.numel() for t in state.values()) * 4 / 1e6:,.0f} MB\n")
    print_head("", "blocked, s", "total, s", "blocked / torch.save", "total / torch.save")
    base = [total for _, total in times["torch.save"]]
    for name, rows in times.items():
        both = [*zip(*rows, strict=True)]
        print_row(name, *map(spread, both), *(ratio(each, base) for each in both))


def make_state(parameters: int) -> dict[str, Tensor]:
    """Makes named tensors like an engine's state."""
    names = [f"model.layers.{n}.weight" for n in range(max(1, parameters // TENSOR))]
    kinds = [named_state.weight_key, *(lambda name, m=m: named_state.moment_key(m, name) for m in ADAMW.states)]
    return {kind(name): torch.randn(2048, 2048) for name in names for kind in kinds}


def bare(state: dict[str, Tensor], folder: Path) -> Method:
    """Saves by `torch.save` to one file, which is flushed."""
    folder.mkdir()
    path = folder / "state.pt"

    def write() -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    return waiting(write, path.unlink)


def plain_dcp(state: dict[str, Tensor], folder: Path) -> Method:
    """Saves by torch.distributed.checkpoint as in its documentation."""
    return waiting(lambda: dcp.save(dict(state), checkpoint_id=folder, no_dist=True), lambda: shutil.rmtree(folder))


def waiting(write: Callable[[], object], delete: Callable[[], object]) -> Method:
    """Makes a method that blocks training until everything is on disk; deletion is not timed."""

    def save() -> tuple[float, float]:
        seconds = Seconds.of(write).wall
        delete()
        return seconds, seconds

    return save


def ours(state: dict[str, Tensor], folder: Path, *, background: bool) -> Method:
    """Saves by the trainer's checkpoint writer."""
    writer = CheckpointWriter(CheckpointStore(folder, keep=1), background=background)
    shards = {key: NamedShard(tuple(t.shape), start=0, values=t.view(-1)) for key, t in state.items()}
    numbers = count()

    def save() -> tuple[float, float]:
        started = time.perf_counter()
        writer.begin(CheckpointInfo(next(numbers), {}, {}, {}), lambda: shards)
        blocked = time.perf_counter() - started
        result = writer.wait()
        assert result is not None
        assert result.checkpoint is not None, result.failure
        total = time.perf_counter() - started
        return (blocked if background else total), total

    return save


if __name__ == "__main__":
    main()
