"""Runs the checks of `headrace doctor` through the agents of all nodes, one check after another."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foundation.errors import TrainingError
from foundation.listening import bound_socket
from headrace.doctor.agent import TOKEN
from headrace.doctor.check import Check, Context, Finding
from headrace.doctor.cluster import DoctorNodes
from headrace.doctor.rank import BROKEN
from pipeline.runtime.launch.group import free_port

_START_S = 60.0
"""Seconds that the agents of all nodes have to connect."""
_GRACE_S = 15.0
"""Seconds beyond a check's limit for an agent to kill it and to report that."""
_END_S = 10.0
"""Seconds for the agents to kill a check and to end, when doctor ends."""
_HANGS = "a training would hang in the same way, or its launcher would end it"


@dataclass(frozen=True)
class DoctorAgents:
    """The connected agents of all nodes.

    Attributes:
        connections: node -> the connection to its agent.
        messages: node and message of an agent, None at the end of its connection.
        lost: nodes whose agents do not answer.
    """

    connections: dict[str, socket.socket] = field(default_factory=dict)
    messages: queue.SimpleQueue[tuple[str, dict[str, Any] | None]] = field(default_factory=queue.SimpleQueue)
    lost: list[str] = field(default_factory=list)

    def run(self, check: Check, context: Context) -> Iterator[Finding]:
        """Makes a check on its nodes; yields findings as they come, and how each process of it ended if not well."""
        if self.lost:  # ranks would only wait for its ranks
            yield Finding(None, f"skipped, because {', '.join(self.lost)} does not answer")
            return
        left, port, failed = [*context.nodes][: 1 if check.place == "launcher" else None], free_port(), False
        for node in left:
            job = {"check": asdict(check), "context": asdict(replace(context, node=node)), "port": port}
            with suppress(OSError):  # a lost node is reported below
                self.connections[node].sendall(json.dumps(job, default=str).encode() + b"\n")
        deadline = time.monotonic() + context.limit_s + _GRACE_S
        while left:
            try:
                node, message = self.messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                node, message = left[0], None
            if message is not None and "finding" in message:
                finding = Finding(**message["finding"])
                failed |= finding.passed is False
                yield replace(finding, where=finding.where or node) if check.place == "node" else finding
                continue
            left = [name for name in left if name != node]
            if message is None:
                self.lost.append(node)
                yield Finding(False, f"{node} does not answer any more", _HANGS, f"see whether {node} is up", {}, node)
            elif message["ended"] and not failed:
                text = f"{check.name}: its process ended with {_reason(message['ended'])}; {message['why']}"
                yield Finding(False, text, BROKEN, "read its log", where=node)
            elif message["ended"] is None:
                text = f"{check.name}: it hangs: it did not end within {context.limit_s:g} s and was killed"
                yield Finding(False, f"{text}; {message['why']}", _HANGS, "read the end of its log", where=node)

    def accept(self, connection: socket.socket, token: str, nodes: Iterable[str]) -> None:
        """Reads the messages of an agent in a thread, if it knows the token."""
        connection.settimeout(5.0)
        lines = connection.makefile("rb")
        with suppress(OSError, ValueError, KeyError):
            first = json.loads(lines.readline(1000))
            if secrets.compare_digest(first["token"], token) and first["node"] in nodes:
                connection.settimeout(None)
                self.connections[first["node"]] = connection
                threading.Thread(target=self._read, args=(first["node"], lines), daemon=True).start()
                return
        connection.close()

    def _read(self, node: str, lines: Iterable[bytes]) -> None:
        with suppress(OSError, ValueError):
            for line in lines:
                self.messages.put((node, json.loads(line)))
        self.messages.put((node, None))


@contextmanager
def started_agents(nodes: DoctorNodes, *, start_s: float = _START_S) -> Iterator[DoctorAgents]:
    """Starts the agents; at the end of the block they kill their checks and end.

    Raises:
        TrainingError: some agents have not connected within `start_s` seconds.
    """
    agents, token = DoctorAgents(), secrets.token_hex(16)
    local = nodes.own == "127.0.0.1"
    with socket.create_server((nodes.own, 0)) if local else bound_socket(nodes.own, 64) as listener:
        process = nodes.start_agents(listener.getsockname()[1], {TOKEN: token})
        try:
            deadline = time.monotonic() + start_s
            listener.settimeout(0.2)
            while missing := [name for name in nodes.addresses if name not in agents.connections]:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise _missing(missing, nodes.own, process.returncode, start_s)
                with suppress(TimeoutError):
                    agents.accept(listener.accept()[0], token, nodes.addresses)
            yield agents
        finally:
            for connection in agents.connections.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _missing(missing: list[str], own: str, code: int | None, start_s: float) -> TrainingError:
    why = f"within {start_s:g} s" if code is None else f"its starter ended with code {code}"
    return TrainingError(
        f"{', '.join(missing)}: no agent of doctor has connected to {own} ({why})\n  try: look at the messages above;"
        " the nodes have to reach this one by TCP, and need the same Python environment and code at the same paths"
    )


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
