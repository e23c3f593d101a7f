"""Pods of a TrainJob as namespaces of this machine: own host name, address, processes and shared memory.

What the Trainer, JobSet and the Job controller of Kubernetes do is done here, by the built manifests: the PET_* values
(pkg/runtime/framework/plugins/torch of kubeflow/trainer v2.3.0), names that resolve through a headless service, and a
new pod with the same number and another address when one ends, if the pod failure policy says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import warm_python
from tests.conftest import ROOT
from tests.k8s.manifests import document, jobs_of
from tests.virtual_cluster.machine import Machine

FOLDER = "overlays/cpu-small/train"
_PORT = "29400"
_BACK_OFF_S = 2.0
"""Kubernetes waits 10 s before the first replacement, and twice as long before each further one."""


def command_of_manifest(config: Path, *sets: str) -> list[str]:
    """What the container runs, with another config and further overrides."""
    args = list(document(FOLDER, "TrainJob")["spec"]["trainer"]["args"])
    assert args[0] == "headrace"
    words = [str(config) if word == "/etc/headrace/train.json" else word for word in args[1:]]
    return [warm_python.python(), "-m", "headrace", *words, *(word for text in sets for word in ("--set", text))]


@dataclass
class Pod:
    machine: Machine
    process: subprocess.Popen[bytes]


@dataclass
class Pods:
    """The pods of a job; use it as a context manager.

    Attributes:
        state: directory for their logs and other files.
        count: number of pods.
        command: command of each pod.
        read_only: directory that no pod may write to.
        processes: ranks of each pod.
        counted_only: every failed pod is started again, as without a pod failure policy.
    """

    state: Path
    count: int
    command: Sequence[str]
    read_only: Path
    processes: int = 1
    counted_only: bool = False
    failures: Counter[int] = field(default_factory=Counter)
    ended: dict[int, list[int]] = field(default_factory=dict)
    failed: bool = False
    _running: dict[int, Pod] = field(default_factory=dict)
    _due: dict[int, float] = field(default_factory=dict)
    _started: int = 0

    def __enter__(self) -> Pods:
        self.job = jobs_of(document(FOLDER, "TrainingRuntime"))[0]
        self.name = document(FOLDER, "TrainJob")["metadata"]["name"]
        self.state.mkdir()
        self._network = Machine("cluster", hosts="127.0.0.1 localhost\n", state=self.state)
        for line in ("link add bridge type bridge", "address add 10.88.0.254/24 dev bridge", "link set bridge up"):
            self._network.ip(line)
        self._addresses: dict[int, str] = {}
        for index in range(self.count):
            self._start(index)
        return self

    def __exit__(self, *_: object) -> None:
        self._network.stop()
        for pod in self._running.values():
            pod.machine.stop()
            pod.process.wait()

    def kill(self, index: int) -> None:
        """The end of a pod's container, as by the kernel's out-of-memory killer."""
        self._running[index].machine.stop()

    def evict(self, index: int) -> None:
        """SIGTERM to the container's command, as kubelet sends it before the grace period."""
        pid = self._running[index].process.pid
        while Path(f"/proc/{pid}/comm").read_text() == "nsenter\n":  # one for the network, and one for the pod in it
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        os.kill(pid, signal.SIGTERM)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Starts pods again as the Job controller does, until the condition holds or the job has failed."""
        deadline = time.monotonic() + 150
        while not condition() and not self.failed:
            assert time.monotonic() < deadline, self.logs()
            self._look()
            time.sleep(0.05)

    @property
    def succeeded(self) -> bool:
        return all(self.ended.get(index, [1])[-1] == 0 for index in range(self.count))

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2500:]}" for path in sorted(self.state.glob("*.log")))

    def _look(self) -> None:
        for index, pod in list(self._running.items()):
            code = pod.process.poll()
            if code is not None:
                pod.machine.stop()
                del self._running[index]
                code = 128 - code if code < 0 else code
                self.ended.setdefault(index, []).append(code)
                self._decide(index, code)
        for index in [index for index, due in self._due.items() if time.monotonic() >= due]:
            del self._due[index]
            self._start(index)

    def _decide(self, index: int, code: int) -> None:
        if code == 0:
            return
        spec = self.job["spec"]
        action = "Count" if self.counted_only else action_of(spec, code)
        self.failures[index] += action == "Count"
        if action == "FailJob" or self.failures[index] > spec["backoffLimitPerIndex"]:
            self.failed = True
        else:
            self._due[index] = time.monotonic() + _BACK_OFF_S

    def _start(self, index: int) -> None:
        self._started += 1
        address = f"10.88.0.{self._started}"
        self._addresses[index] = address
        name = f"{self.name}-node-0-{index}"
        machine = Machine(name, hosts="", state=self.state, inside=self._network)
        link = f"pod{self._started}"
        self._network.ip(f"link add {link} type veth peer name eth0 netns {machine.pid}")
        self._network.ip(f"link set {link} master bridge up")
        machine.ip(f"address add {address}/24 dev eth0")
        machine.ip("link set eth0 up")
        machine.run("mount", "--bind", str(self.read_only), str(self.read_only))
        machine.run("mount", "-o", "remount,ro,bind", str(self.read_only))
        self._tell_names()
        env = os.environ | self._variables(index)
        with (self.state / f"{index}.log").open("ab") as log:
            process = subprocess.Popen(
                machine.command(*self.command, cwd=ROOT), env=env, stdout=log, stderr=log, start_new_session=True
            )
        self._running[index] = Pod(machine, process)

    def _variables(self, index: int) -> dict[str, str]:
        return {
            "PET_NNODES": str(self.count),
            "PET_NPROC_PER_NODE": str(self.processes),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{self.name}-node-0-0.{self.name}",
            "PET_MASTER_PORT": _PORT,
            "JOB_COMPLETION_INDEX": str(index),
        }

    def _tell_names(self) -> None:
        """The addresses of all pods; a pod's own name is its address, as kubelet writes it."""
        lines = ["127.0.0.1 localhost"]
        for index, address in self._addresses.items():
            host = f"{self.name}-node-0-{index}"
            lines.append(f"{address} {host}.{self.name} {host}")
        for index in self._addresses:  # in place: the files are mounted
            (self.state / f"hosts.{self.name}-node-0-{index}").write_text("\n".join([*lines, ""]))


def action_of(spec: dict[str, Any], code: int) -> str:
    """What a pod failure policy says about an exit code."""
    for rule in spec["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"
