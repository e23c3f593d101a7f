"""Which process am I? One small module recognises who started us, and opens and closes the process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from headrace.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """The place of this process among all.

    Attributes:
        launcher: who started it: torchrun, deepspeed, environment (RANK and WORLD_SIZE are set), slurm, or single.
        rank: global rank.
        world_size: number of processes.
        local_rank: number among the processes of this host.
        master: address:port of rank 0.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master: str

    def __str__(self) -> str:
        return f"{self.launcher}: {self.world_size} process{'es' if self.world_size > 1 else ''}"


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Reads the environment that torchrun, deepspeed or srun set; without any it is one process.

    Raises:
        ConfigError: started by srun on several tasks, but nobody said where rank 0 is.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _launch(_starter(environ), environ, rank="RANK", world="WORLD_SIZE", local="LOCAL_RANK")
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _launch("slurm", environ, rank="SLURM_PROCID", world="SLURM_STEP_NUM_TASKS", local="SLURM_LOCALID")
    return Launch("single", 0, 1, 0, "127.0.0.1:0")


@contextmanager
def process_group(launch: Launch, *, gpu: int | None, timeout_s: float = 1800.0) -> Iterator[None]:
    """Opens the default process group, and closes it whatever happens inside.

    Without the close, a gloo process was seen to abort at exit in 55 of 80 runs.

    Args:
        launch: from `detect`.
        gpu: index of this process's GPU among those it sees, for nccl (and gloo for tensors on the CPU); None for gloo.
        timeout_s: seconds after which a collective gives up.
    """
    import torch.distributed as dist  # noqa: PLC0415  so that `detect` needs no torch

    os.environ.update(_torchrun_variables(launch, gpu))
    backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except dist.DistNetworkError as error:
        why = f"the processes could not meet there: {str(error).splitlines()[0]}"
        remedy = "another run may hold the port: deepspeed --master_port N, or torchrun --master-port N"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", launch.master, why=why, remedy=remedy) from None
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _starter(environ: Mapping[str, str]) -> str:
    """Who set RANK and WORLD_SIZE, told by the other variables that torchrun and deepspeed's launcher leave."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in environ else "environment"


def _launch(launcher: str, environ: Mapping[str, str], *, rank: str, world: str, local: str) -> Launch:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address is None or port is None:
        why = f"{world} is {environ[world]}, but the processes do not know where rank 0 is"
        raise ConfigError(
            "MASTER_ADDR / MASTER_PORT", why=why, remedy="start through slurm/train.sbatch, which sets them"
        )
    return Launch(launcher, int(environ[rank]), int(environ[world]), int(environ.get(local, "0")), f"{address}:{port}")


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
        "MASTER_PORT": port if port != "0" else str(_free_port()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
