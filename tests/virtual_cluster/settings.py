"""Configuration of the virtual cluster: slurm.conf and gres.conf, with the reason for each line."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

CONTROLLER = "controller"
CONTROLLER_ADDRESS = "10.77.0.254"

_SLURM_CONF = """
ClusterName=headrace
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
MailProg=/bin/true
StateSaveLocation={state}/state
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdPidFile={state}/slurmd.%n.pid
SlurmdLogFile={state}/slurmd.%n.log
SlurmdSpoolDir={state}/spool.%n
# cred_expire is also how long a requeued job waits before it may start again: 120 s by default
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire={requeue_after_s}
# use the number of CPUs given here: the real machine may have fewer
SlurmdParameters=config_overrides
# no cgroups: the virtual nodes share those of the real machine
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# a dead node is detected after this many seconds, and returns to service when it boots again
SlurmdTimeout={down_after_s}
ReturnToService=2
MessageTimeout=5
TCPTimeout=2
KillWait=5
# how long finished jobs stay visible: by default until the cluster ends, at most sites for 300 s
MinJobAge={visible_s}
# look for jobs to start every second; the defaults of 30 and 60 s save work on a cluster of thousands
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
NodeName=n[1-{nodes}] NodeAddr=10.77.0.[1-{nodes}] CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_GRES_CONF = """
AutoDetect=off
NodeName=n[1-{nodes}] Name=gpu File={state}/gpu[0-{last_gpu}]
"""


def node_address(name: str) -> str:
    """The address of node `n3` is 10.77.0.3; every cluster has its own network, so that all can use the same ones."""
    return f"10.77.0.{name.removeprefix('n')}"


def hosts_of(name: str) -> str:
    """/etc/hosts as Debian's installer writes it: a host resolves its own name, to a loopback address, and no other.

    Jobs that resolve each other's names, or listen on the address of their own name, work on a workstation and fail on
    many clusters; here they fail, too.
    """
    return f"127.0.0.1 localhost\n127.0.1.1 {name}\n"


@dataclass(frozen=True)
class Patience:
    """Seconds until Slurm declares a silent node dead, starts a requeued job again, forgets a finished one."""

    down_after_s: int = 10
    requeue_after_s: int = 5
    visible_s: int = 86400


SITE = Patience(down_after_s=300, requeue_after_s=120, visible_s=300)
"""What Slurm has by default, and so most sites."""


def write_settings(state: Path, *, nodes: int, cpus: int, gpus: int, patience: Patience) -> Path:
    """Writes the configuration into `state` and returns the path of slurm.conf.

    The GPUs are copies of /dev/null: Slurm sets CUDA_VISIBLE_DEVICES for a character device and only counts a file.
    """
    (state / "state").mkdir()
    for node in range(1, nodes + 1):
        (state / f"spool.n{node}").mkdir()
    for gpu in range(gpus):
        os.mknod(state / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (state / "gres.conf").write_text(_GRES_CONF.format(state=state, nodes=nodes, last_gpu=gpus - 1))
    conf = state / "slurm.conf"
    conf.write_text(
        _SLURM_CONF.format(
            controller=CONTROLLER,
            address=CONTROLLER_ADDRESS,
            state=state,
            nodes=nodes,
            cpus=cpus,
            gpus=gpus,
            **asdict(patience),
        )
    )
    return conf
