"""Measures all-reduces between the devices of this node, in processes of their own.

    python -m pipeline.planner.measure_links RANK RANKS PORT

One such process for each device; the first prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from pipeline.machines.machine import MeasuredCollective
from pipeline.planner.measure import Ends, seconds_of

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of the tensor of an all-reduce."""

LARGEST_ON_GPUS = 1 << 28
"""Bytes of another one, which a CPU would take seconds for."""

_TIMEOUT_S = 600.0
"""Of all processes, imports included: only a hang takes so long."""


def collectives(*, ranks: int) -> list[MeasuredCollective]:
    """All-reduces between so many devices of this node, by size; none of a single device.

    Raises:
        RuntimeError: a process failed; with what it wrote.
    """
    if ranks < 2:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipeline.planner.measure_links"]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"an all-reduce between {ranks} devices failed: {errors.decode()[-1000:]}")
    rows = json.loads(outputs[0][0].splitlines()[-1])
    return [
        MeasuredCollective(axis="within", ranks=ranks, bytes=size, seconds=tuple(seconds)) for size, seconds in rows
    ]


def _measured(device: torch.device) -> list[tuple[int, Ends]]:
    found = []
    for size in (*SIZES, LARGEST_ON_GPUS) if device.type == "cuda" else SIZES:
        values: Any = torch.ones(size // 4, dtype=torch.float32, device=device)
        # the same number of calls on every rank
        found.append((size, seconds_of(lambda values=values: dist.all_reduce(values), device, least_s=0.0)))  # type: ignore[misc]
    return found


def main() -> None:
    """One rank."""
    rank, ranks, port = map(int, sys.argv[1:])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=ranks)
    found = _measured(device)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
