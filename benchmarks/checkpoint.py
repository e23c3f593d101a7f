"""Cost of a checkpoint: time for which training is blocked and time until it is on disk, against `torch.save`.

    python -m benchmarks.checkpoint [--parameters 50e6] [--rounds 8] [--dir DIRECTORY]

One process, fp32 weights and two moments (12 bytes per parameter) in tensors of 4M elements. The methods
alternate, and each one flushes to disk. Ours also checksums every byte, writes the manifest, renames, and deletes the
previous one. Printed are medians with quartiles, of seconds and of the ratio to `torch.save` in the same round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from pipeline.checkpoint import named_state
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.store import CheckpointStore
from pipeline.config.sections.optimizers import ADAMW

TENSOR = 4 << 20
"""Elements of a tensor: a matrix of 2048 x 2048."""
Method = Callable[[int], tuple[float, float]]
"""Saves; returns the seconds for which training is blocked, and until everything is on disk."""


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dir", help="a directory on the disk to measure; the temporary one when absent")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    state = make_state(int(arguments.parameters))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as work:
        methods = {
            "torch.save": bare(state, Path(work, "bare")),
            "dcp.save": plain_dcp(state, Path(work, "dcp")),
            "ours, blocking": ours(state, Path(work, "blocking"), background=False),
            "ours, in background": ours(state, Path(work, "background"), background=True),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for number in range(arguments.rounds + 1):
            for name, method in methods.items():
                os.sync()  # so that no method waits for the dirty pages of another
                seconds = method(number)
                if number > 0:  # the first one makes buffers and plans
                    times[name].append(seconds)
    table(times, megabytes=sum(t.numel() for t in state.values()) * 4 / 1e6)


def make_state(parameters: int) -> dict[str, Tensor]:
    """Named tensors, as in an engine's state."""
    names = [f"model.layers.{n}.weight" for n in range(max(1, parameters // TENSOR))]
    kinds = [named_state.weight_key, *(lambda name, m=m: named_state.moment_key(m, name) for m in ADAMW.states)]
    return {kind(name): torch.randn(2048, 2048) for name in names for kind in kinds}


def bare(state: dict[str, Tensor], folder: Path) -> Method:
    """`torch.save` to one file, flushed."""
    folder.mkdir()

    def save(number: int) -> tuple[float, float]:
        started = time.perf_counter()
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        total = time.perf_counter() - started
        (folder / f"{number - 1}.pt").unlink(missing_ok=True)
        return total, total

    return save


def plain_dcp(state: dict[str, Tensor], folder: Path) -> Method:
    """torch.distributed.checkpoint as in its documentation."""

    def save(number: int) -> tuple[float, float]:
        started = time.perf_counter()
        dcp.save(dict(state), checkpoint_id=folder / str(number), no_dist=True)
        total = time.perf_counter() - started
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)
        return total, total

    return save


def ours(state: dict[str, Tensor], folder: Path, *, background: bool) -> Method:
    """The checkpoint writer of the trainer."""
    writer = CheckpointWriter(CheckpointStore(folder, keep=1), background=background)
    shards = {key: NamedShard(tuple(t.shape), start=0, values=t.view(-1)) for key, t in state.items()}

    def save(number: int) -> tuple[float, float]:
        started = time.perf_counter()
        writer.begin(CheckpointInfo(number, {}, {}, {}), lambda: shards)
        blocked = time.perf_counter() - started
        result = writer.wait()
        assert result is not None
        assert result.checkpoint is not None, result.failure
        total = time.perf_counter() - started
        return (blocked if background else total), total

    return save


def table(times: dict[str, list[tuple[float, float]]], *, megabytes: float) -> None:
    """Prints the figures."""
    base = times["torch.save"]
    print(f"{megabytes:,.0f} MB\n")
    print("| | blocked, s | total, s | blocked / torch.save | total / torch.save |")
    print("|---|---|---|---|---|")
    for name, rows in times.items():
        cells = [spread([t[kind] for t in rows]) for kind in (0, 1)]
        cells += [spread([t[kind] / b[1] for t, b in zip(rows, base, strict=True)]) for kind in (0, 1)]
        print(f"| {name} | {' | '.join(cells)} |")


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


if __name__ == "__main__":
    main()
