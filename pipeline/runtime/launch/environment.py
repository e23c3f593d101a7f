"""Detects the launcher (torchrun, deepspeed, mpirun, srun, ...) and this process's rank from the environment; no torch.

| launcher | rank | world size | local rank | detected by |
|---|---|---|---|---|
| torchrun | RANK | WORLD_SIZE | LOCAL_RANK | TORCHELASTIC_RUN_ID |
| deepspeed | RANK | WORLD_SIZE | LOCAL_RANK | CROSS_RANK |
| python --nproc | RANK | WORLD_SIZE | LOCAL_RANK | HEADRACE_NPROC |
| an agent of `pipeline.cluster.elastic` | RANK | WORLD_SIZE | LOCAL_RANK | HEADRACE_AGENT_STARTS |
| a pod of Kubeflow's Trainer (`pod.py`) | RANK | WORLD_SIZE | LOCAL_RANK | HEADRACE_POD |
| anything else | RANK | WORLD_SIZE | LOCAL_RANK | RANK |
| mpirun of Open MPI | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK | its rank |
| mpirun of MPICH, Intel MPI | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID | MPI_LOCALRANKID |
| srun | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID | SLURM_STEP_NUM_TASKS above 1 |

The order matters: inside a Slurm job mpirun starts its own helpers by srun, and their variables are inherited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

from foundation.errors import ConfigError

AGENT_STARTS = "HEADRACE_AGENT_STARTS"
"""Variable by which an agent tells its ranks that it has started them, and how many starts there were."""

RANK_STARTED = "HEADRACE_RANK_STARTED"
"""Variable with the time when a warm process became a rank, in seconds since the epoch."""

POD = "HEADRACE_POD"
"""Variable by which the first process of a pod tells its ranks that it has started them."""


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and its place among the ranks.

    Attributes:
        launcher: e.g. torchrun, "mpirun (Open MPI)", or "python" for a single process without a launcher.
        rank: global rank.
        world_size: number of processes.
        local_rank: rank among the processes of this host.
        master: address:port of rank 0; port 0 for a single process, which may use any.
        variables: the environment variables from which the launch was read.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master: str
    variables: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.launcher}: {self.world_size} process{'es' if self.world_size > 1 else ''}"


SINGLE_PROCESS = Launch("python", 0, 1, 0, "127.0.0.1:0")
"""One process without a launcher."""


@dataclass(frozen=True)
class _Launcher:
    """The environment variables that a launcher sets.

    Attributes:
        name: name in messages.
        marker: variable by which the launcher is detected.
        rank, world_size, local_rank: variables with the rank, world size and local rank.
        local_world_size: variable with the number of processes on this host, where the launcher sets one.
        job_id: variable whose value is the same on all ranks of a job, and differs between jobs.
        export: how to export a variable to the processes on other hosts with this launcher.
    """

    name: str
    marker: str
    rank: str = "RANK"
    world_size: str = "WORLD_SIZE"
    local_rank: str = "LOCAL_RANK"
    local_world_size: str | None = None
    job_id: str | None = None
    export: str = ""


_OPEN_MPI = _Launcher(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job_id="PMIX_NAMESPACE",
    export="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., with HOST the host of rank 0",
)
_HYDRA = _Launcher(
    "mpirun (MPICH, Intel MPI)",
    "MPI_LOCALRANKID",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
    export="mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ..., with HOST the host of rank 0",
)
_SRUN = _Launcher(
    "srun",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    export="start through slurm/train.sbatch, which sets them",
)
_GENERIC = _Launcher("environment", "RANK", export="export both, the same on every process")
_LAUNCHERS = (
    _Launcher("torchrun", "TORCHELASTIC_RUN_ID", export=_GENERIC.export),
    _Launcher("deepspeed", "CROSS_RANK", export=_GENERIC.export),
    _Launcher("agent", AGENT_STARTS, export=_GENERIC.export),
    _Launcher("pods", POD, export=_GENERIC.export),
    _Launcher("python --nproc", "HEADRACE_NPROC", export=_GENERIC.export),
    _GENERIC,
    _OPEN_MPI,
    _HYDRA,
    _SRUN,
)


def detect(environ: Mapping[str, str] = os.environ, *, parent: int | None = None) -> Launch:
    """Reads the variables that a launcher has set; without any this is a single process.

    Args:
        environ: the environment.
        parent: id of the parent process; this process's own when None.

    Raises:
        ConfigError: there are several processes, and the address of rank 0 is not set.
    """
    launcher = next((each for each in _LAUNCHERS if _matches(each, environ)), None)
    if launcher is None:
        return SINGLE_PROCESS
    rank, world_size = _number(launcher.rank, environ), _number(launcher.world_size, environ)
    local_rank = _number(launcher.local_rank, environ) if launcher.local_rank in environ else 0
    if not rank < world_size:
        why = f"{launcher.world_size} is {world_size}"
        raise ConfigError(launcher.rank, rank, why=why, remedy="unset the variables of an earlier launcher")
    master = _master(launcher, environ, world_size, parent or os.getppid())
    read = (launcher.marker, launcher.rank, launcher.world_size, launcher.local_rank)
    variables = tuple(dict.fromkeys(name for name in read if name in environ))
    return Launch(launcher.name, rank, world_size, local_rank, master, variables)


def _matches(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    if not all(name in environ for name in (launcher.marker, launcher.rank, launcher.world_size)):
        return False
    # a job's batch script has most of srun's variables, too, but is a single process
    return launcher is not _SRUN or environ[launcher.world_size] != "1"


def _number(name: str, environ: Mapping[str, str]) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(name, environ[name], why="it is not a whole number", remedy="unset it, or use a launcher")
    return int(environ[name])


def _master(launcher: _Launcher, environ: Mapping[str, str], world_size: int, parent: int) -> str:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address and port:
        return f"{address}:{port}"
    if world_size == 1:
        return SINGLE_PROCESS.master
    on_one_host = launcher.local_world_size and environ.get(launcher.local_world_size) == environ[launcher.world_size]
    if on_one_host:
        return f"{address or '127.0.0.1'}:{port or _port(launcher, environ, parent)}"
    why = f"{launcher.world_size} is {world_size}, but the address of rank 0 is not set"
    raise ConfigError("MASTER_ADDR / MASTER_PORT", why=why, remedy=launcher.export)


def _port(launcher: _Launcher, environ: Mapping[str, str], parent: int) -> int:
    """Derives a port without communication: the same for all ranks of a job on one host, rarely another job's.

    The port is below 32768, where the ephemeral ports of Linux begin.
    """
    job = environ.get(launcher.job_id, "") if launcher.job_id else ""
    return 10000 + crc32((job or str(parent)).encode()) % 20000
