"""A virtual host made of Linux namespaces: own host name, network and processes, shared files.

The first process of a machine (its *init*) waits for the end of its standard input, which its creator keeps open. When
init ends, the kernel kills every process of the machine and removes its network. So nothing has to be cleaned up: not
after `stop`, and not when the creator itself is killed, since that closes the pipe.

A machine started `inside` another one is in that one's network and process tree, and ends with it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

_NAMESPACES = ("--uts", "--net", "--ipc", "--mount", "--pid")

# $1 is the host name, $2 the file that /etc/hosts shows. The process id is read while /proc is still the creator's: it
# is the id that the creator's tools know. /dev/shm would otherwise be shared, and libraries use fixed names there.
_INIT = """
set -e
read -r pid _ < /proc/self/stat
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
hostname "$1"
ip link set lo up
echo "$pid"
read -r _ || true
"""


class Machine:
    """A running machine, started `inside` another or the real one; RuntimeError with the reason where it cannot be."""

    def __init__(self, name: str, *, hosts: str, state: Path, inside: Machine | None = None) -> None:
        self.name = name
        self._outer: list[str] = inside._enter if inside else []
        hosts_file = state / f"hosts.{name}"
        hosts_file.write_text(hosts)
        self._process = subprocess.Popen(
            [*self._outer, "unshare", *_NAMESPACES, "--fork", "bash", "-c", _INIT, "init", name, str(hosts_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must reach the tests only, which stop the machine
        )
        self.pid = self._process.stdout.readline().strip()
        if not self.pid:
            raise RuntimeError(f"machine {name} did not start: {self._process.communicate()[1].strip()}")
        self._enter: list[str] = [*self._outer, "nsenter", f"--target={self.pid}", "--all"]

    def command(self, *command: str, cwd: Path = Path("/")) -> list[str]:
        """The command line for the real machine that runs `command` in this one, in directory `cwd`."""
        return [*self._enter, "env", f"--chdir={cwd}", *command]

    def run(
        self, *command: str, cwd: Path = Path("/"), env: Mapping[str, str] | None = None, timeout_s: float = 30
    ) -> str:
        """Runs a command in the machine and returns its standard output."""
        done = subprocess.run(
            self.command(*command, cwd=cwd), env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            output = (done.stderr + done.stdout).strip()
            raise RuntimeError(f"on {self.name}: {' '.join(command)}: exit code {done.returncode}: {output}")
        return done.stdout

    def ip(self, arguments: str) -> None:
        self.run("ip", *arguments.split())

    def stop(self) -> None:
        """Ends the machine with all its processes at once, as in a power failure. May be called twice."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
