"""A virtual Slurm cluster for tests: a real Slurm with several hosts (namespaces) on one machine.

    with VirtualCluster(tmp_path, nodes=2) as cluster:
        job = cluster.wait(cluster.sbatch("slurm/train.sbatch", "ds_configs/zero3.json", cwd=ROOT))
        assert job.state == "COMPLETED"

The controller is a machine of namespaces with a bridge, munged and slurmctld; each node is a machine inside it, with a
veth link to the bridge and a slurmd. All share the file system, as on most clusters. Every cluster has its own network,
so any number of them can run at once, with the same addresses and ports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.virtual_cluster.machine import Machine
from tests.virtual_cluster.settings import (
    CONTROLLER,
    CONTROLLER_ADDRESS,
    Patience,
    hosts_of,
    node_address,
    write_settings,
)

_PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
_POLL_S = 0.1
_START_S = 30
T = TypeVar("T")


@cache
def missing_requirements() -> str | None:
    """Why this machine cannot run a virtual cluster, or None when it can."""
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: slurm-wlm munge iproute2 util-linux)"
    if os.geteuid() != 0:
        return "needs root, to give every node its own host name, network and processes"
    probe = subprocess.run(
        ["unshare", "--uts", "--net", "--ipc", "--mount", "--pid", "--fork", "mount", "-t", "proc", "proc", "/proc"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else None


class VirtualCluster:
    """A running cluster; use it as a context manager.

    Args:
        directory: for all files, in a new subdirectory `slurm`. Short: the path of a socket is limited to 107 bytes.
        nodes: number of nodes, named n1, n2, ...
        cpus: CPUs of each node, as Slurm counts them.
        gpus: GPUs of each node. They do not exist: Slurm only counts and assigns them.
        patience: how long Slurm waits.
    """

    def __init__(
        self, directory: Path, *, nodes: int = 2, cpus: int = 2, gpus: int = 2, patience: Patience | None = None
    ) -> None:
        self.state = directory / "slurm"
        self.state.mkdir(mode=0o755)
        conf = write_settings(self.state, nodes=nodes, cpus=cpus, gpus=gpus, patience=patience or Patience())
        # without the variables of a Slurm job in which the tests themselves may run
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.env = inherited | {"SLURM_CONF": str(conf)}
        self._names = [f"n{number}" for number in range(1, nodes + 1)]

    def __enter__(self) -> VirtualCluster:
        self.controller = Machine(CONTROLLER, hosts=hosts_of(CONTROLLER), state=self.state)
        self._nodes = {
            name: Node(name, controller=self.controller, state=self.state, env=self.env) for name in self._names
        }
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def nodes(self) -> list[Node]:
        """The compute nodes, n1 first."""
        return list(self._nodes.values())

    def node(self, name: str) -> Node:
        return self._nodes[name]

    def run(
        self, *command: str, cwd: Path = Path("/"), env: dict[str, str] | None = None, timeout_s: float = 30
    ) -> str:
        """Runs a command as a user on the login node, with `env` on top of the environment; returns what it printed."""
        return self.controller.run(*command, cwd=cwd, env=self.env | (env or {}), timeout_s=timeout_s)

    def sbatch(
        self,
        script: str | Path,
        *arguments: str,
        options: Sequence[str] = (),
        cwd: Path,
        env: dict[str, str] | None = None,
    ) -> int:
        """Submits a script from directory `cwd` and returns the job's id."""
        printed = self.run("sbatch", "--parsable", *options, str(script), *arguments, cwd=cwd, env=env)
        return int(printed.strip())

    def jobs(self) -> list[Job]:
        return parse_jobs(self.run("scontrol", "show", "job", "--oneliner"))

    def wait(self, job_id: int, *, timeout_s: float = 60) -> Job:
        return self._until(
            lambda: next((job for job in self.jobs() if job.id == job_id and job.ended), None),
            what=f"the end of job {job_id}",
            timeout_s=timeout_s,
        )

    def wait_for_all(self, *, timeout_s: float = 60) -> list[Job]:
        """Waits until every job has ended, also those that jobs have submitted. Returns all of them."""

        def ended() -> list[Job] | None:
            jobs = self.jobs()
            return jobs if all(job.ended for job in jobs) else None

        return self._until(ended, what="the end of all jobs", timeout_s=timeout_s)

    def wait_for_nodes(self, state: str, *names: str, timeout_s: float = _START_S) -> None:
        """Waits until Slurm shows these nodes in a state such as `idle` or `down`."""

        def reached() -> bool:
            shown = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
            # an asterisk marks a node that does not respond at the moment
            states = dict(line.rstrip("*").split() for line in shown)
            return all(states.get(name) == state for name in names)

        self._until(reached, what=f"{', '.join(names)} to be {state}", timeout_s=timeout_s)

    def _start(self) -> None:
        self.controller.ip("link add bridge type bridge")
        self.controller.ip(f"address add {CONTROLLER_ADDRESS}/24 dev bridge")
        self.controller.ip("link set bridge up")
        self._start_munge()
        self.controller.run("slurmctld", "-c", env=self.env)
        for node in self.nodes:
            node.up()
        self.wait_for_nodes("idle", *self._names)

    def _stop(self) -> None:
        self.controller.stop()
        for node in self.nodes:  # their processes are dead by now; this only closes our pipes
            node.stop()

    def _start_munge(self) -> None:
        key = self.state / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{kind}-file={self.state}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        # --force: a test's directory is private to its user, and munged warns that others cannot reach the socket
        self.controller.run("munged", "--force", f"--socket={self.state}/munge.socket", *files)

    def _until(self, probe: Callable[[], T | None], *, what: str, timeout_s: float) -> T:
        end = time.monotonic() + timeout_s
        while not (found := probe()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout_s} s for {what}\n{self._overview()}")
            time.sleep(_POLL_S)
        return found

    def _overview(self) -> str:
        log = (self.state / "slurmctld.log").read_text().splitlines()[-20:]
        return "\n".join([self.run("sinfo", "--Node", "--long"), self.run("squeue"), *log])


_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}


@dataclass(frozen=True)
class Job:
    """One job, or one element of an array.

    Fields: `id` of the job, of the whole array for an element; `element` within it, None for other jobs; `exit_code`
    of the batch script, 128 + n after signal n; `nodes` as Slurm abbreviates them (`n[1-2]`).
    """

    id: int
    element: str | None
    name: str
    state: str
    reason: str
    exit_code: int
    nodes: str

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


def parse_jobs(text: str) -> list[Job]:
    """The jobs in the output of `scontrol show job --oneliner`, oldest first."""
    jobs = [_parse(line) for line in text.splitlines() if line.startswith("JobId=")]
    return sorted(jobs, key=lambda job: (job.id, job.element or ""))


def _parse(line: str) -> Job:
    field = dict(re.findall(r"(\w+)=(\S*)", line))
    code, signal = (int(part) for part in field["ExitCode"].split(":"))
    return Job(
        id=int(field.get("ArrayJobId", field["JobId"])),
        element=field.get("ArrayTaskId"),
        name=field["JobName"],
        state=field["JobState"],
        reason=field["Reason"],
        exit_code=128 + signal if signal else code,
        nodes=field["NodeList"],
    )


class Node:
    def __init__(self, name: str, *, controller: Machine, state: Path, env: dict[str, str]) -> None:
        self.name = name
        self._controller, self._state, self._env = controller, state, env
        self._machine: Machine | None = None

    @property
    def machine(self) -> Machine:
        assert self._machine is not None, f"{self.name} is down"
        return self._machine

    def up(self) -> None:
        """Boots: a machine, a veth link to the bridge, slurmd."""
        self._machine = Machine(self.name, hosts=hosts_of(self.name), state=self._state, inside=self._controller)
        address = node_address(self.name)
        # a fixed hardware address: after a reboot the others still know the old one
        mac = f"02:00:00:00:00:{int(self.name.removeprefix('n')):02x}"
        self._controller.ip(f"link add {self.name} type veth peer name eth0 address {mac} netns {self._machine.pid}")
        self._controller.ip(f"link set {self.name} master bridge up")
        self._machine.ip(f"address add {address}/24 dev eth0")
        self._machine.ip("link set eth0 up")
        self._machine.run("slurmd", env=self._env)  # finds its entry in slurm.conf by the host name

    def crash(self) -> None:
        """Power failure. The network link goes first: a dead host does not close its connections."""
        self._controller.ip(f"link delete {self.name}")
        self.stop()

    def stop(self) -> None:
        if self._machine is not None:
            self._machine.stop()
            self._machine = None
