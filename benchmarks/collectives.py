"""gloo's all-reduce by size on this machine, against the model of `pipeline.plan.predict.collectives`.

    python -m benchmarks.collectives [--ranks 2 4] [--rounds 40]

Latency and bandwidth are fitted (least squares of relative errors) to the first number of processes; the others are
predicted with them. Printed is the best round of the slowest rank's time: other work on the machine makes the others
longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from pipeline.plan.predict.collectives import RankGroup, collective_s
from pipeline.plan.predict.links import Link, LinkTopology

SIZES = [4 << shift for shift in range(8, 25, 2)]
"""Bytes: 1 KiB to 64 MiB."""


def main() -> None:
    """Measures, fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return worker(asked.rounds)
    measured = {ranks: measure(ranks, asked.rounds) for ranks in asked.ranks}
    first = asked.ranks[0]
    link = fit(first, measured[first])
    print(f"fitted to {first} processes: {link.latency_s * 1e6:.0f} us, {link.bandwidth / 1e6:.0f} MB/s")
    print("| bytes |" + "".join(f" {ranks} processes, ms | model, ms | model / measured |" for ranks in asked.ranks))
    print("|---|" + "---|---|---|" * len(asked.ranks))
    for i, size in enumerate(SIZES):
        cells = []
        for ranks in asked.ranks:
            seconds, expected = measured[ranks][i], modelled(ranks, link, size)
            cells.append(f" {seconds * 1e3:.3f} | {expected * 1e3:.3f} | {expected / seconds:.2f} |")
        print(f"| {size:,} |" + "".join(cells))
    return None


def modelled(ranks: int, link: Link, size: int) -> float:
    """Seconds by the ring formula."""
    return collective_s("all_reduce", "ring", RankGroup(ranks, 1), LinkTopology(ranks, link, link), size=size)


def fit(ranks: int, seconds: list[float]) -> Link:
    """Latency and bandwidth with which the ring formula is closest: it is linear in the latency and 1 / bandwidth."""
    steps = 2 * (ranks - 1)
    rows = np.array([[steps, steps * size / ranks] for size in SIZES]) / np.array(seconds)[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(SIZES)), rcond=None)
    return Link(1 / per_byte, max(0.0, latency))


def measure(ranks: int, rounds: int) -> list[float]:
    """Seconds per size."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "benchmarks.collectives", "--worker", "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def worker(rounds: int) -> None:
    """One rank: times every size in turn, and rank 0 prints the best."""
    dist.init_process_group("gloo")
    best = []
    for size in SIZES:
        tensor, times = torch.ones(size // 4), []
        for _ in range(rounds + 2):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            own = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            times.append(float(own))
            tensor.fill_(1.0)
        best.append(min(times[2:]))
    if dist.get_rank() == 0:
        print(json.dumps(best))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
