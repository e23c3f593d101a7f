"""Opens the default process group of torch.distributed: chooses the backend and reports ranks that do not join."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from foundation.errors import ConfigError, TrainingError
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch.environment import Launch
from pipeline.runtime.launch.gpu_environment import compiler_defaults, flight_recorder_defaults, host_group_defaults
from pipeline.runtime.launch.missing_ranks import UnreachableError, deadline
from pipeline.runtime.launch.rank_devices import rank_device
from pipeline.runtime.launch.rendezvous import RUN_FINISHED, RUN_STOPPED, Rendezvous, store_call
from pipeline.runtime.launch.store import EXTRA_S, open_rendezvous

if TYPE_CHECKING:
    from torch.distributed import PrefixStore

DEFAULTS = LaunchSection()
_CONNECTING = "while the process group was opened"
_OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


@contextmanager
def process_group(
    launch: Launch,
    *,
    gpu: int | None,
    timeout_s: float = 1800.0,
    config: LaunchSection = DEFAULTS,
) -> Iterator[Rendezvous]:
    """Opens the default process group, and closes it on any exit from the block.

    Without closing it, a gloo process aborted at exit in 55 of 80 runs.

    Args:
        launch: launch of this process, from `detect`.
        gpu: index of this process's GPU among those it sees; None on the CPU.
        timeout_s: timeout of collectives.
        config: section `launch`: the backend, and how long ranks wait for each other.

    Raises:
        ConfigError: the backend is not available, or the port is taken.
        LostError: a rank did not join or does not answer; the error names it.
        TrainingError: all ranks have joined the rendezvous, but they do not reach each other.
    """
    import torch.distributed as dist  # noqa: PLC0415  so that `detect` needs no torch

    backend = backend_for(config.backend, gpu=gpu, launcher=launch.launcher)
    os.environ.update(flight_recorder_defaults(os.environ) | _torchrun_variables(launch, gpu))
    if gpu is not None:
        os.environ.update(host_group_defaults(os.environ))
    rendezvous, store = open_rendezvous(launch, config.timeout, device=rank_device(backend, gpu))
    _share_cores(rendezvous.ranks_here)
    _connect(backend, rendezvous, store, gpu=gpu)
    try:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        _list_ranks()
        yield rendezvous
    except UnreachableError:
        raise
    except BaseException:
        if gpu is None:  # nccl would wait for the pending collectives of other ranks
            _close()
        raise
    else:
        if launch.rank == 0 and not store_call(lambda: rendezvous.store.check([RUN_STOPPED]), default=True):
            store_call(lambda: store.underlying_store.set(RUN_FINISHED, "1"), default=None)
        _close()


def _connect(backend: str, rendezvous: Rendezvous, store: PrefixStore, *, gpu: int | None = None) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    # with a device, NCCL connects here, under this deadline, and later groups are split from this one without their own
    # rendezvous. A single process needs no connection
    eager = "nccl" in backend and rendezvous.world_size > 1
    device = torch.device("cuda", gpu) if eager and gpu is not None else None
    timeout, start = timedelta(seconds=rendezvous.timeout_s), time.monotonic()
    with deadline(rendezvous, _CONNECTING, extra_s=EXTRA_S):
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=timeout,
                device_id=device,
            )
            return
        except (RuntimeError, ValueError) as error:
            if time.monotonic() - start > 0.9 * rendezvous.timeout_s:
                raise  # a timeout; any other error is this rank's own
            reason = str(error).splitlines()[0]
        raise TrainingError(
            f"rank {rendezvous.rank} on {socket.gethostname()} could not connect to the other ranks,"
            f" though all have joined: {reason}\n"
            f"  try: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface that the hosts share, and"
            f" open all ports between them in their firewalls"
        )


def _share_cores(ranks: int) -> None:
    """Limits Inductor's worker processes, in its config too if it has been imported; `ranks` are those of this host."""
    allowed = len(os.sched_getaffinity(0))
    chosen = compiler_defaults(os.environ, ranks=ranks, cores=os.cpu_count() or allowed, allowed=allowed)
    os.environ.update(chosen)
    inductor: Any = sys.modules.get("torch._inductor.config")
    for workers in chosen.values() if inductor is not None else ():
        inductor.compile_threads = int(workers)


def _list_ranks() -> None:
    """Gives the backends of the default group the list of their ranks, which splitting the group needs.

    Torch 2.13 leaves the list empty, and only in a process's first group does empty stand for all ranks. In the second
    training of a process, `split` reads beyond the end of the empty list and the process dies (pytorch/pytorch#192109,
    #192106).
    """
    import torch.distributed as dist  # noqa: PLC0415

    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend() != dist.Backend.MPI:
        for device in world._device_types:
            options: Any = world._get_backend(device).options
            options.global_ranks_in_group = list(range(world.size()))


def _close() -> None:
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(name: str, *, gpu: int | None, launcher: str) -> str:
    """Returns the backend string for torch.distributed.

    Args:
        name: auto (nccl for GPU tensors and gloo for CPU tensors), gloo, nccl or mpi.
        gpu: index of this process's GPU; None on the CPU.
        launcher: name of this process's launcher.

    Raises:
        ConfigError: this build of torch, this device or this launcher does not support it.
    """
    import torch.distributed as dist  # noqa: PLC0415

    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if name in available and not available[name]():
        why = "torch was built without it"
        raise ConfigError("launch.backend", name, why=why, remedy="use auto, or a build of torch that has it")
    if name == "nccl" and gpu is None:
        raise ConfigError(
            "launch.backend", name, why="nccl needs a GPU, and none is visible", remedy="use auto or gloo"
        )
    if name == "mpi" and not launcher.startswith("mpirun"):
        why = f"mpi has to be started by mpirun; this process was started by {launcher}"
        raise ConfigError("launch.backend", name, why=why, remedy="use auto, or mpirun")
    if name == "mpi":
        return name
    if gpu is None:
        return "gloo"
    return f"cpu:gloo,cuda:{'gloo' if name == 'gloo' else 'nccl'}"


def _torchrun_variables(launch: Launch, gpu: int | None) -> dict[str, str]:
    """Returns the variables that torch.distributed and DeepSpeed read, for any launcher.

    DeepSpeed takes LOCAL_RANK for the index of the GPU, which is wrong where each task sees only its own GPU. Under
    Open MPI it asserts that mpirun's own variable is the same.
    """
    local_rank = str(launch.local_rank if gpu is None else gpu)
    open_mpi = {_OPEN_MPI_LOCAL_RANK: local_rank} if _OPEN_MPI_LOCAL_RANK in os.environ else {}
    address, port = launch.master.rsplit(":", 1)
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": local_rank,
        **open_mpi,
        "MASTER_ADDR": address,
        "MASTER_PORT": port if port != "0" else str(free_port()),
    }


def free_port() -> int:
    """Finds a port of this host on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
