"""One of two ranks of a real group: rank 1 kills itself, rank 0 prints what it raises and whether that is secondary.

python -m tests.runtime.faults.broken_link RANK PORT HOW
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from foundation.link_errors import is_link_error

VALUES = 1 << 20
STORE_RANK = 1
"""The rank that keeps the store: the one that dies, where waiting for the store is what breaks."""


def all_reduce(device: str) -> None:
    dist.all_reduce(torch.ones(VALUES, device=device))


def send_and_receive(device: str) -> None:
    dist.recv(torch.ones(VALUES, device=device), src=1)


def barrier(_device: str) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=20))


def gather_objects(_device: str) -> None:
    dist.all_gather_object([None, None], {"rank": 0})


def deepspeed_collective(device: str) -> None:
    from deepspeed import comm  # noqa: PLC0415  seconds

    from pipeline.engines.deepspeed.operators import skip_shared_memory  # noqa: PLC0415

    skip_shared_memory()  # as headrace does
    comm.init_distributed("gloo", verbose=False, dist_init_required=False)
    comm.all_reduce(torch.ones(VALUES, device=device))


def store_wait(_device: str) -> None:
    STORES[0].wait(["never set"], timedelta(seconds=20))


def store_set(_device: str) -> None:
    time.sleep(1.0)
    for number in range(100):
        STORES[0].set("key", str(number))


CALLS: dict[str, Callable[[str], None]] = {
    call.__name__: call
    for call in (all_reduce, send_and_receive, barrier, gather_objects, deepspeed_collective, store_wait, store_set)
}
STORES: list[dist.TCPStore] = []


def main() -> None:
    rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, 2, rank == STORE_RANK, timedelta(seconds=60))
    STORES.append(store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        CALLS[how]("cpu")
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        print(json.dumps({"types": names, "text": str(error), "secondary": is_link_error(error)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
