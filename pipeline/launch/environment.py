"""Which process am I, and who started me? Told by the variables that every launcher leaves; no torch.

| launcher | rank | world size | rank on this host | known by |
|---|---|---|---|---|
| torchrun | RANK | WORLD_SIZE | LOCAL_RANK | TORCHELASTIC_RUN_ID |
| deepspeed | RANK | WORLD_SIZE | LOCAL_RANK | CROSS_RANK |
| python --nproc | RANK | WORLD_SIZE | LOCAL_RANK | HEADRACE_NPROC |
| anything else | RANK | WORLD_SIZE | LOCAL_RANK | RANK |
| mpirun of Open MPI | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK | its rank |
| mpirun of MPICH, Intel MPI | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID | MPI_LOCALRANKID |
| srun | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID | SLURM_STEP_NUM_TASKS above 1 |

The order counts: inside a Slurm job mpirun starts its own helpers by srun, and their variables are inherited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from headrace.base.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """The place of this process among all.

    Attributes:
        launcher: who started it, e.g. torchrun, "mpirun (Open MPI)", or "python" for one process that nobody started.
        rank: global rank.
        world_size: number of processes.
        local_rank: number among the processes of this host.
        master: address:port of rank 0; port 0 where it is alone and any will do.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master: str

    def __str__(self) -> str:
        return f"{self.launcher}: {self.world_size} process{'es' if self.world_size > 1 else ''}"


ALONE = Launch("python", 0, 1, 0, "127.0.0.1:0")
"""One process that no launcher started."""


@dataclass(frozen=True)
class _Launcher:
    """What a launcher leaves in the environment.

    Attributes:
        name: in words.
        mark: the variable it is known by.
        rank, world, local: variables with the three numbers.
        on_host: variable with the number of processes on this host, where the launcher says it.
        job: variable whose value is the same on all ranks of a job, and on no other.
        export: how it hands a variable to processes on other hosts; None where one process per host asks for it.
    """

    name: str
    mark: str
    rank: str = "RANK"
    world: str = "WORLD_SIZE"
    local: str = "LOCAL_RANK"
    on_host: str | None = None
    job: str | None = None
    export: str = ""


_OPEN_MPI = _Launcher(
    "mpirun (Open MPI)",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    on_host="OMPI_COMM_WORLD_LOCAL_SIZE",
    job="PMIX_NAMESPACE",
    export="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., with HOST the host of rank 0",
)
_HYDRA = _Launcher(
    "mpirun (MPICH, Intel MPI)",
    "MPI_LOCALRANKID",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    on_host="MPI_LOCALNRANKS",
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
_BY_HAND = _Launcher("environment", "RANK", export="export both, the same on every process")
_LAUNCHERS = (
    _Launcher("torchrun", "TORCHELASTIC_RUN_ID", export=_BY_HAND.export),
    _Launcher("deepspeed", "CROSS_RANK", export=_BY_HAND.export),
    _Launcher("python --nproc", "HEADRACE_NPROC", export=_BY_HAND.export),
    _BY_HAND,
    _OPEN_MPI,
    _HYDRA,
    _SRUN,
)


def detect(environ: Mapping[str, str] = os.environ, *, parent: int | None = None) -> Launch:
    """Reads the environment that a launcher set; without any this is one process.

    Args:
        environ: the environment.
        parent: id of the parent process; this process's own when None.

    Raises:
        ConfigError: there are several processes, and nobody said where rank 0 is.
    """
    found = next((each for each in _LAUNCHERS if _is(each, environ)), None)
    if found is None:
        return ALONE
    rank, world = _number(found.rank, environ), _number(found.world, environ)
    local = _number(found.local, environ) if found.local in environ else 0
    if not rank < world:
        why = f"{found.world} is {world}"
        raise ConfigError(found.rank, rank, why=why, remedy="unset what an earlier launcher has left")
    return Launch(found.name, rank, world, local, _master(found, environ, world, parent or os.getppid()))


def _is(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    if not all(name in environ for name in (launcher.mark, launcher.rank, launcher.world)):
        return False
    # the batch script of a job has most of srun's variables too, but is one process
    return launcher is not _SRUN or environ[launcher.world] != "1"


def _number(name: str, environ: Mapping[str, str]) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(name, environ[name], why="it is not a whole number", remedy="unset it, or use a launcher")
    return int(environ[name])


def _master(launcher: _Launcher, environ: Mapping[str, str], world: int, parent: int) -> str:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address and port:
        return f"{address}:{port}"
    if world == 1:
        return ALONE.master
    if launcher.on_host is not None and environ.get(launcher.on_host) == environ[launcher.world]:
        return f"{address or '127.0.0.1'}:{port or _port(launcher, environ, parent)}"
    why = f"{launcher.world} is {world}, but the processes do not know where rank 0 is"
    raise ConfigError("MASTER_ADDR / MASTER_PORT", why=why, remedy=launcher.export)


def _port(launcher: _Launcher, environ: Mapping[str, str], parent: int) -> int:
    """A port that all ranks of a job on one host agree on without talking, and another job rarely takes.

    Below 32768, where Linux takes ports at random.
    """
    job = environ.get(launcher.job, "") if launcher.job else ""
    return 10000 + crc32((job or str(parent)).encode()) % 20000
