"""The nodes that `headrace doctor` checks, and an agent on each: on this machine, or in the Slurm job's allocation."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from foundation.errors import ConfigError
from foundation.slurm import run_slurm

_DROPPED = re.compile("SLURM_(GPUS|GPUS_PER_(NODE|TASK|SOCKET)|GPU_BIND|CPUS_PER_GPU|NTASKS_PER_GPU|TRES_PER_TASK)$")
"""Options of the job that srun would apply to the agents' step, as in slurm/ranks.sh: one GPU per task, for example."""


@dataclass(frozen=True)
class DoctorNodes:
    """The nodes to check.

    Attributes:
        addresses: node -> address, in order.
        own: address of this process, as the nodes reach it.
        slurm: whether the agents are started by srun.
    """

    addresses: Mapping[str, str]
    own: str
    slurm: bool

    def start_agents(self, port: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts an agent on each node, in a session of its own: Ctrl-C reaches only this process.

        Args:
            port: port on which this process listens.
            environ: variables for the agents besides this process's own.
        """
        module = [sys.executable, "-m", "headrace.doctor.agent", f"{self.own}:{port}"]
        kept = {name: value for name, value in os.environ.items() if not self.slurm or not _DROPPED.match(name)}
        command = [*_srun([*self.addresses], os.environ), *module] if self.slurm else [*module, *self.addresses]
        env = {**kept, **environ}
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)


def find_nodes(asked: str | None) -> DoctorNodes:
    """Finds the nodes to check: those of the Slurm job in which this process runs, or this machine.

    Args:
        asked: the text of `--nodes`: a number or names; None for all nodes of the allocation.

    Raises:
        ConfigError: there are no such nodes.
    """
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    allocated = _allocated() or {here: "127.0.0.1"}
    names = list(allocated)
    if asked is not None:
        names = names[: int(asked)] if asked.isdecimal() else asked.split(",")
        if not {*names} <= {*allocated} or (asked.isdecimal() and len(names) != int(asked)) or not names:
            why = f"there are {', '.join(allocated)} (in a Slurm job: its nodes)"
            raise ConfigError("--nodes", asked, why=why, remedy="name these, or sbatch --nodes=N slurm/doctor.sbatch")
    if names == [here]:
        return DoctorNodes({here: "127.0.0.1"}, "127.0.0.1", slurm=False)
    return DoctorNodes({name: allocated[name] for name in names}, allocated.get(here, socket.gethostname()), slurm=True)


def _allocated() -> dict[str, str]:
    """Node -> address of all nodes of this process's Slurm job, in Slurm's order; empty outside of a job."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return {}
    shown = run_slurm("scontrol", "show", "node", "--oneliner", listed)
    found = dict(re.findall(r"^NodeName=(\S+) .*? NodeAddr=(\S+) ", shown.stdout, re.MULTILINE))
    if not found:
        raise ConfigError("SLURM_JOB_NODELIST", listed, why=f"scontrol: {shown.stderr.strip()}", remedy="run it again")
    return found


def _srun(nodes: list[str], environ: Mapping[str, str]) -> list[str]:
    """The step of the agents: one task on each node, with all its cores of the job and all its GPUs."""
    gpus = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE")
    cores = re.sub(r"\(x\d+\)", "", environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))  # such as 16(x3),8
    text = f"srun --nodes={len(nodes)} --ntasks={len(nodes)} --ntasks-per-node=1 --overlap --no-kill"
    text += f" --kill-on-bad-exit=0 --cpus-per-task={min(map(int, cores.split(',')))}"
    return [*text.split(), f"--nodelist={','.join(nodes)}", *([f"--gpus-per-node={gpus}"] if gpus else [])]
