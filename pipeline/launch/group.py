"""Opening the default process group: the backend follows the device, and whoever does not come is named."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError, TrainingError
from pipeline.config.schema import LaunchSection
from pipeline.launch.arrivals import OVER, STOPPED, Rendezvous, ask
from pipeline.launch.environment import Launch
from pipeline.launch.missing_ranks import UnreachableError, deadline
from pipeline.launch.store import SPARE_S, meet

if TYPE_CHECKING:
    from torch.distributed import PrefixStore

DEFAULTS = LaunchSection()
_CONNECTED = "while the process group was opened"


@contextmanager
def process_group(
    launch: Launch,
    *,
    gpu: int | None,
    timeout_s: float = 1800.0,
    config: LaunchSection = DEFAULTS,
) -> Iterator[Rendezvous]:
    """Opens the default process group, and closes it whatever happens inside.

    Without the close, a gloo process was seen to abort at exit in 55 of 80 runs.

    Args:
        launch: from `detect`.
        gpu: index of this process's GPU among those it sees; None on the CPU.
        timeout_s: seconds after which a collective gives up.
        config: the backend, and how long ranks wait for each other here.

    Raises:
        ConfigError: the backend is not there, or the port is taken.
        LostError: a rank never came, or does not answer; says which.
        TrainingError: all have come, but they do not reach each other.
    """
    import torch.distributed as dist  # noqa: PLC0415  so that `detect` needs no torch

    chosen = backend_for(config.backend, gpu=gpu, launcher=launch.launcher)
    os.environ.update(_torchrun_variables(launch, gpu))
    meeting, store = meet(launch, config.timeout)
    _connect(chosen, meeting, store)
    try:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        yield meeting
    except UnreachableError:
        raise
    except BaseException:
        if gpu is None:  # nccl would wait for the collectives of ranks that do not know of this yet
            _close()
        raise
    else:
        if launch.rank == 0 and not ask(lambda: meeting.store.check([STOPPED]), otherwise=True):
            ask(lambda: store.underlying_store.set(OVER, "1"), otherwise=None)
        _close()


def _connect(backend: str, meeting: Rendezvous, store: PrefixStore) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    start, began = timedelta(seconds=meeting.timeout_s), time.monotonic()
    with deadline(meeting, _CONNECTED, spare_s=SPARE_S):
        try:
            dist.init_process_group(
                backend, store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=start
            )
            return
        except (RuntimeError, ValueError) as error:
            if time.monotonic() - began > 0.9 * meeting.timeout_s:
                raise  # else it is this rank's own error
            said = str(error).splitlines()[0]
        raise TrainingError(
            f"rank {meeting.rank} on {socket.gethostname()} could not connect to the other ranks,"
            f" though all have come: {said}\n"
            f"  try: let GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that the hosts share, and let"
            f" their firewalls pass all ports between them"
        )


def _close() -> None:
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(name: str, *, gpu: int | None, launcher: str) -> str:
    """torch.distributed's words for a backend.

    Args:
        name: auto is nccl for tensors on a GPU and gloo for those on the CPU; or gloo, nccl or mpi.
        gpu: None on the CPU.
        launcher: who started this process.

    Raises:
        ConfigError: this build of torch, this device or this launcher does not have it.
    """
    import torch.distributed as dist  # noqa: PLC0415

    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if name in there and not there[name]():
        why = "torch was built without it"
        raise ConfigError("launch.backend", name, why=why, remedy="use auto, or a build of torch that has it")
    if name == "nccl" and gpu is None:
        raise ConfigError("launch.backend", name, why="nccl needs a GPU, and none is seen", remedy="use auto or gloo")
    if name == "mpi" and not launcher.startswith("mpirun"):
        why = f"mpi has to be started by mpirun; this was {launcher}"
        raise ConfigError("launch.backend", name, why=why, remedy="use auto, or mpirun")
    if name == "mpi":
        return name
    if gpu is None:
        return "gloo"
    return f"cpu:gloo,cuda:{'gloo' if name == 'gloo' else 'nccl'}"


def _torchrun_variables(launch: Launch, gpu: int | None) -> dict[str, str]:
    """What torch.distributed and DeepSpeed read, whoever started us.

    DeepSpeed takes LOCAL_RANK for the index of the GPU. It is not that where each task sees only its own one.
    """
    address, port = launch.master.rsplit(":", 1)
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank if gpu is None else gpu),
        "MASTER_ADDR": address,
        "MASTER_PORT": port if port != "0" else str(free_port()),
    }


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
