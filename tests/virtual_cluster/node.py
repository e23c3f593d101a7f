"""A compute node of the virtual cluster."""

from __future__ import annotations

from pathlib import Path

from tests.virtual_cluster.machine import Machine
from tests.virtual_cluster.settings import hosts_of, node_address


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
