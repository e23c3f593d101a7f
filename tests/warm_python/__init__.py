"""A Python whose processes are forked from a server that has imported torch, transformers, deepspeed and this project.

For tests in which shells, launchers and our own commands start many processes: each of them would import for 5 to 10
CPU seconds. `folder()` has programs `python`, `headrace`, `torchrun` and `deepspeed`, to be put first on PATH; what
they run finds the same Python in `sys.executable`. Each of them is two processes: the one that was started passes
signals on to the one that runs (`client`), which is a child of the server in a session of its own. Tests that look for
processes by their command lines or limit their memory by a cgroup start a real Python; SIGSTOP goes to `real_pid`.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal

Imported = Literal["training", "data_prep", "vllm"]
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("python", "python3", "headrace", "torchrun", "deepspeed")


@cache
def folder(imported: Imported = "training") -> Path:
    """The folder with the programs; starts the server of this process when it is first called.

    That of vllm has the Python that `HEADRACE_VLLM_PYTHON` names, and what it runs is of that environment.
    """
    made = Path(tempfile.mkdtemp(prefix="warm-python-"))
    path = made / "socket"
    for program in PROGRAMS:
        name = "python" if program == "python3" else program
        script = made / program
        script.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"from client import main\nmain({str(path)!r}, {name!r})\n"
        )
        script.chmod(0o755)
    own = os.environ["HEADRACE_VLLM_PYTHON"] if imported == "vllm" else sys.executable
    command = [own, "-m", "tests.warm_python.server", str(path), str(made / "python"), imported]
    env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=env)
    atexit.register(server.kill)
    _servers.append(server.pid)
    while not (made / "socket").exists():  # no test's time limit has its imports in it, a minute on busy cores
        assert server.poll() is None, "the fork server has ended"
        time.sleep(0.05)
    return made


def python(imported: Imported = "training") -> str:
    """The Python of `folder`, in the place of `sys.executable`."""
    return str(folder(imported) / "python")


def real_pid(pid: int) -> int:
    """The process that a client stands for, waiting until it runs; any other process itself."""
    process = Path("/proc", str(pid))
    try:
        while b"/warm-python-" in b" ".join((process / "cmdline").read_bytes().split(b"\0")[:3]):
            name = (process / "comm").read_text().strip()
            if name.startswith("warm-"):
                return int(name.removeprefix("warm-") or pid)
            time.sleep(0.01)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return pid


def children(pid: int) -> list[int]:
    """The processes that a process has started: the real ones, not the clients that stand for them."""
    pid = real_pid(pid)
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [real_pid(int(child)) for child in found]


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


_servers: list[int] = []


def cpu_seconds() -> float:
    """CPU seconds of all ended processes of this process's server."""
    ticks = 0
    for server in _servers:
        fields = Path("/proc", str(server), "stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[13]) + int(fields[14])  # cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")
