"""Compares the devices of all ranks in the rendezvous store, before a process group is made.

Ranks on the CPU and ranks on GPUs would wait for each other in a rendezvous of different backends until it times out;
for two ranks on one GPU, NCCL's error names neither rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foundation.errors import ConfigError
from pipeline.runtime.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store

_DIFFERENT, _FIRST = "devices differ", "device"


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank.

    Attributes:
        kind: `cpu` or `cuda`.
        backend: backend string for torch.distributed.
        gpu: UUID of the rank's GPU if no other rank may use that GPU, otherwise empty. Empty for AMD GPUs, too: models
            without a serial number all have one UUID.
    """

    kind: str
    backend: str
    gpu: str = ""


def rank_device(backend: str, gpu: int | None) -> RankDevice:
    """Returns this process's device; `gpu` is the index of its GPU among the visible ones."""
    if gpu is None:
        return RankDevice("cpu", backend)
    import torch  # noqa: PLC0415  so that `detect` needs no torch

    alone = "nccl" in backend and torch.version.hip is None  # over gloo several ranks can share a GPU
    return RankDevice("cuda", backend, str(torch.cuda.get_device_properties(gpu).uuid) if alone else "")


def register(store: Store, rank: int, device: RankDevice) -> None:
    """Writes a rank's device; call it before the rank counts as joined."""
    kind = f"{device.kind} ({device.backend})"
    store.set(f"device/{rank}", f"{kind}|{device.gpu}")
    first = store.compare_set(_FIRST, "", kind).decode()
    if first != kind or (device.gpu and store.add(f"gpu/{device.gpu}", 1) > 1):
        store.set(_DIFFERENT, "1")


def check_devices(rendezvous: Rendezvous) -> None:
    """Refuses ranks on different kinds of devices, and two ranks on one GPU; call it when all ranks have joined.

    Raises:
        ConfigError: the devices do not fit together; every rank raises it, with the ranks and their hosts.
    """
    if not rendezvous.store.check([_DIFFERENT]):
        return
    values = rendezvous.store.multi_get([f"device/{rank}" for rank in rendezvous.ranks])
    kinds, gpus = dict[str, list[int]](), dict[str, list[int]]()
    for rank, value in enumerate(values):
        kind, _, gpu = value.decode().partition("|")
        kinds.setdefault(kind, []).append(rank)
        gpus.setdefault(gpu or f"rank {rank}", []).append(rank)
    if len(kinds) > 1:
        why = "; ".join(f"{kind}: {rendezvous.describe(ranks)}" for kind, ranks in kinds.items())
        remedy = "see why torch finds no GPU on those hosts (nvidia-smi, python -c 'import torch; torch.cuda.init()')"
        error = ConfigError("launch.device", why=f"ranks compute on different devices: {why}", remedy=remedy)
    else:
        why = "; ".join(f"GPU {gpu}: {rendezvous.describe(ranks)}" for gpu, ranks in gpus.items() if len(ranks) > 1)
        remedy = "give each process a GPU of its own, or let all see every GPU of their host (srun --gpus-per-node=N)"
        error = ConfigError("LOCAL_RANK", why=f"several ranks have one GPU: {why}", remedy=remedy)
    if rendezvous.rank == 0:
        time.sleep(1.0)  # the other ranks still read from the store in this process
    raise error
