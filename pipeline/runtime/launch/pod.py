"""The place of a pod among the pods of a run, from the variables that Kubeflow's Trainer sets; no torch.

| variable | meaning |
|---|---|
| PET_NNODES | number of pods |
| PET_NODE_RANK | number of this pod |
| PET_NPROC_PER_NODE | ranks of each pod; auto or gpu: its GPUs, or one without any |
| PET_MASTER_ADDR, PET_MASTER_PORT | pod 0, where rank 0 opens the rendezvous |

They are torchrun's options as variables, and torchrun in a pod reads them, too. But torchrun turns every failure into
exit code 1, so a pod failure policy could not tell a refused config from a lost node. It also waits only 30 s for a
rank that saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foundation.errors import ConfigError

_NODES, _NODE_RANK, _PROCESSES = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
_ADDRESS, _PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"
_COUNTED = ("auto", "gpu")


@dataclass(frozen=True)
class PodPlace:
    """This host's ranks within a run.

    Attributes:
        first: rank of its first process.
        processes: number of its processes.
        world_size: number of processes on all hosts.
        address, port: address and port of the rendezvous, which rank 0 opens.
    """

    first: int
    processes: int
    world_size: int
    address: str
    port: int


def place_of_pod(environ: Mapping[str, str] = os.environ, *, gpus: Callable[[], int] | None = None) -> PodPlace | None:
    """Reads the place of this pod; None where the variables are not set or torchrun has started this process.

    Args:
        environ: the environment.
        gpus: counts the GPUs of this host; None to count by torch.

    Raises:
        ConfigError: a variable is missing or no number, or the pod's number is not less than the number of pods.
    """
    if _NODES not in environ or _NODE_RANK not in environ or "RANK" in environ:
        return None
    nodes, node_rank, port = (_number(name, environ) for name in (_NODES, _NODE_RANK, _PORT))
    if not node_rank < nodes:
        remedy = "the index of the pod, from 0"
        raise ConfigError(_NODE_RANK, node_rank, why=f"{_NODES} is {nodes}", remedy=remedy)
    if not environ.get(_ADDRESS):
        raise ConfigError(_ADDRESS, why="the pods need the address of pod 0", remedy=f"export {_ADDRESS}")
    counted = environ.get(_PROCESSES, "auto") in _COUNTED
    processes = max(1, (gpus or _gpus)()) if counted else _number(_PROCESSES, environ)
    if processes < 1:
        raise ConfigError(_PROCESSES, processes, why="it is a number of processes", remedy="use 1 or more")
    return PodPlace(node_rank * processes, processes, nodes * processes, environ[_ADDRESS], port)


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            name, text or None, why="it is not a whole number", remedy="set it as Kubeflow's Trainer does"
        )
    return int(text)


def _gpus() -> int:
    import torch  # noqa: PLC0415  takes seconds

    return torch.cuda.device_count()
