"""Two hosts as namespaces of this machine: own name, address and processes, an ssh server each, shared files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.virtual_cluster.machine import Machine

NAMES = ("node01", "node02")
_SSHD = """
HostKey {state}/host_key
AuthorizedKeysFile {state}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
# the account may have a shell that reads files for logins; a command gets this
SetEnv OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"""
_SSH = """
Host *
    IdentityFile {state}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


class Hosts:
    """Running hosts that reach each other by name and by ssh; `state` is a new directory for keys and settings."""

    def __init__(self, state: Path) -> None:
        self._state = state
        state.mkdir(mode=0o755)
        for name in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(state / name)], check=True)
        (state / "sshd_config").write_text(_SSHD.format(state=state))
        (state / "ssh_config").write_text(_SSH.format(state=state))
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd separates privileges

    def __enter__(self) -> Hosts:
        self._network = Machine("network", hosts="127.0.0.1 localhost\n", state=self._state)
        for line in ("link add bridge type bridge", "address add 10.99.0.254/24 dev bridge", "link set bridge up"):
            self._network.ip(line)
        addresses = {name: f"10.99.0.{number}" for number, name in enumerate(NAMES, 1)}
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        self._machines = {name: self._boot(name, address, hosts) for name, address in addresses.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self._network.stop()
        for machine in self._machines.values():
            machine.stop()

    def start(self, name: str, commands: str, *, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts shell commands on a host; what they print comes as one text."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = self._machines[name].command("bash", "-euo", "pipefail", "-c", commands, cwd=cwd)
        pipe = subprocess.PIPE
        environ = {**os.environ, "PATH": path, **env}
        return subprocess.Popen(command, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def _boot(self, name: str, address: str, hosts: str) -> Machine:
        machine = Machine(name, hosts=f"127.0.0.1 localhost\n{hosts}", state=self._state, inside=self._network)
        self._network.ip(f"link add {name} type veth peer name eth0 netns {machine.pid}")
        self._network.ip(f"link set {name} master bridge up")
        machine.ip(f"address add {address}/24 dev eth0")
        machine.ip("link set eth0 up")
        # in the namespace of this host: the file of the real one stays as it is
        machine.run("mount", "--bind", str(self._state / "ssh_config"), "/etc/ssh/ssh_config")
        machine.run("/usr/sbin/sshd", "-f", str(self._state / "sshd_config"), "-o", f"PidFile={self._state}/{name}.pid")
        return machine
