"""`python -m headrace.doctor.agent HOST:PORT [NODE]`: makes the checks of one node for `headrace doctor`.

Doctor starts one agent on each node, which connects to it and gets one check after another. An agent kills a check
with all its children at the check's limit, and when the connection ends: nothing outlives doctor on any node, even
when doctor is killed or its node fails.

Protocol, JSON lines: {"token", "node"} from the agent; then a job ({"check", "context", "port"}) from doctor, and from
the agent any number of {"finding"} and one {"ended": exit code, or None if it was killed at its limit; "why"}.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from foundation.processes import adopt_orphans, end_descendants
from pipeline.runtime.launch.rank_process import start_process

TOKEN = "HEADRACE_DOCTOR_TOKEN"
"""Environment variable with the secret by which doctor knows its agents."""
_OF_SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables by which a training that a check starts would take itself for a task of the agents' own step."""
_POLL_S, _CONNECT_S = 0.05, 30.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Options of TCP: a doctor whose node has failed is noticed after 20 s."""


def main() -> None:
    """Connects to doctor and makes its checks until the connection ends."""
    host, _, port = sys.argv[1].rpartition(":")
    token = os.environ.pop(TOKEN)
    for name in _OF_SRUN:
        os.environ.pop(name, None)
    adopt_orphans()
    with socket.create_connection((host, int(port)), _CONNECT_S) as doctor, suppress(OSError):
        doctor.settimeout(None)
        doctor.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            doctor.setsockopt(socket.IPPROTO_TCP, option, value)
        _send(doctor, token=token, node=sys.argv[2] if len(sys.argv) > 2 else os.environ["SLURMD_NODENAME"])
        with doctor.makefile("rb", buffering=0) as jobs:  # no buffer: `_make` reads the socket itself
            for line in jobs:
                _make(doctor, json.loads(line))


def _make(doctor: socket.socket, job: dict[str, Any]) -> None:
    """Runs a check as a process with a limit; sends its findings as they come, and its end."""
    node, work = job["context"]["node"], Path(job["context"]["work"])
    log = work.parent.parent / "logs" / f"{work.name}.{node}.log"
    if not log.parent.is_dir():
        why = f"{node} does not see {log.parent}: give --out a directory that all nodes share"
        return _send(doctor, ended=1, why=why)
    with tempfile.TemporaryDirectory(prefix="headrace-doctor-") as folder:
        file, found = Path(folder, "job"), Path(folder, "findings")
        file.write_text(json.dumps(job))
        found.touch()
        deadline = time.monotonic() + job["context"]["limit_s"]
        process = start_process([sys.executable, "-m", "headrace.doctor.rank", str(file)], output=log)
        with found.open("rb") as lines:
            # doctor sends nothing while a check runs: a socket that can be read was closed
            while process.poll() is None and time.monotonic() < deadline and not select.select([doctor], [], [], 0)[0]:
                _forward(doctor, lines)
                time.sleep(_POLL_S)
            if (code := process.poll()) is None:
                process.kill()
            left = end_descendants()
            _forward(doctor, lines)
    blocked = f"processes {', '.join(map(str, left))} cannot be killed: a driver or file system blocks them"
    return _send(doctor, ended=code, why=blocked if left else f"its log is {log}")


def _forward(doctor: socket.socket, lines: BinaryIO) -> None:
    """Sends new findings that are complete lines."""
    while (line := lines.readline()).endswith(b"\n"):
        _send(doctor, finding=json.loads(line))
    lines.seek(-len(line), os.SEEK_CUR)


def _send(doctor: socket.socket, **message: object) -> None:
    doctor.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    try:
        main()
    finally:
        end_descendants()
