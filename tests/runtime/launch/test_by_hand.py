"""The commands of docs/tutorials/by-hand.md on two hosts, which are namespaces: losses are those of one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT, launch, losses, tiny_config, write_config
from tests.virtual_cluster.cluster import missing_requirements
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


PAGE = (ROOT / "docs/tutorials/by-hand.md").read_text()
STEPS = 6
ABSENT = [name for name in ("/usr/sbin/sshd", "ssh", "pdsh", "mpirun") if shutil.which(name) is None]
CANNOT = missing_requirements() or (f"needs {', '.join(ABSENT)}" if ABSENT else "")
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(CANNOT), reason=CANNOT)]


def commands_of(launcher: str) -> str:
    """The block of the tutorial whose last command is this launcher's."""
    blocks = re.findall(r"^<!-- not run: needs two hosts[^>]*-->\n```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if block.splitlines()[-1].startswith(f"{launcher} "))
    return str(found)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts") / "state") as made:
        yield made


@pytest.fixture(scope="module")
def expected(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    work = tmp_path_factory.mktemp("alone")
    launch("train.py", make_config(tokens, work))
    return losses(work / "run")


def make_config(tokens: Path, work: Path) -> Path:
    run = {"dir": str(work / "run"), "steps": STEPS, "seed": 7}
    schedule = {"type": "WSD", "params": {"warmup_num_steps": 2, "decay_num_steps": 2}}
    return write_config(work / "train.json", tiny_config(tokens, work / "run", run=run, scheduler=schedule))


@pytest.mark.parametrize(
    ("launcher", "everywhere", "said"),
    [
        ("torchrun", True, "torchrun: 2 processes"),
        ("deepspeed", False, "deepspeed: 2 processes"),
        pytest.param("mpirun", False, "mpirun (Open MPI): 2 processes", marks=pytest.mark.sweep),
    ],
)
def test_the_printed_commands_train_over_two_hosts(
    hosts: Hosts, tokens: Path, tmp_path: Path, expected: dict[int, float], launcher: str, everywhere: bool, said: str
) -> None:
    make_config(tokens, tmp_path)
    # the user of the test is root, which Open MPI asks to confirm
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {"GPUS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **root}
    started = [
        hosts.start(name, commands_of(launcher), cwd=tmp_path, env=variables | {"NODE": str(number)})
        for number, name in enumerate(NAMES)
        if everywhere or number == 0
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)[-5000:]
    assert said in "\n".join(outputs)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
