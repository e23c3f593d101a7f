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
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from foundation.errors import TrainingError
from foundation.listening import bound_socket
from headrace.doctor.agent import TOKEN
from headrace.doctor.check import Check, Context, Finding
from headrace.doctor.cluster import DoctorNodes
from headrace.doctor.rank import BROKEN, DoctorJob

START_S = 60.0
"""Seconds that the agents of all nodes have to connect."""
_GRACE_S = 15.0
"""Seconds beyond a check's limit for an agent to kill it and to report that."""
_END_S = 10.0
"""Seconds for the agents to kill a check and to end, when doctor ends."""
_HANGS = "a training would hang in the same way, or its launcher would end it"


class DoctorAgents:
    """The connected agents of all nodes; a context manager, on whose exit all checks are killed.

    Args:
        nodes: the nodes.
        start_s: seconds that the agents have to connect.
    """

    def __init__(self, nodes: DoctorNodes, *, start_s: float = START_S) -> None:
        self._nodes, self._start_s = nodes, start_s
        self._token = secrets.token_hex(16)
        self._messages: queue.SimpleQueue[tuple[str, dict[str, Any] | None]] = queue.SimpleQueue()
        self._connections: dict[str, socket.socket] = {}
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> DoctorAgents:
        local = self._nodes.own == "127.0.0.1"
        listener = socket.create_server((self._nodes.own, 0)) if local else bound_socket(self._nodes.own, 64)
        self._stack.enter_context(listener)
        try:
            self._processes = self._nodes.start_agents(listener.getsockname()[1], {TOKEN: self._token})
            self._connect(listener)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(self, check: Check, context: Context) -> Iterator[Finding]:
        """Makes a check on its nodes; yields findings as they come, and how each process of it ended if not well."""
        names = list(self._nodes.addresses)[: 1 if check.place == "launcher" else None]
        port = _free_port()
        for name in names:
            # a lost node is reported below
            with suppress(OSError):
                own = Context(**{**vars(context), "node": name})
                self._connections[name].sendall(DoctorJob(check, own, Path(), port).as_json().encode() + b"\n")
        left, failed, deadline = set(names), set[str](), time.monotonic() + context.limit_s + _GRACE_S
        while left:
            try:
                node, message = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                yield from (_silent(check, node, context.limit_s) for node in sorted(left))
                return
            if message is None:
                left.discard(node)
                yield Finding(False, f"the connection to {node} is lost", _HANGS, f"see whether {node} is up", {}, node)
            elif "finding" in message:
                finding = Finding(**message["finding"])
                failed |= {node} if finding.passed is False else set()
                yield finding if finding.where or check.place != "node" else _at(finding, node)
            elif node in left:
                left.discard(node)
                yield from _ended(check, node, message, limit_s=context.limit_s, explained=node in failed)

    def _connect(self, listener: socket.socket) -> None:
        """Waits until all agents have connected.

        Raises:
            TrainingError: some have not.
        """
        deadline = time.monotonic() + self._start_s
        listener.settimeout(0.2)
        while missing := [name for name in self._nodes.addresses if name not in self._connections]:
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if time.monotonic() > deadline or ended:
                why = f"its starter ended with code {ended[0]}" if ended else f"within {self._start_s:g} s"
                raise TrainingError(
                    f"{', '.join(missing)}: no agent of doctor has connected to {self._nodes.own} ({why})\n"
                    "  try: look at the messages above; the nodes have to reach this one by TCP, and need the same"
                    " Python environment and code at the same paths"
                )
            with suppress(TimeoutError):
                self._accept(listener.accept()[0])

    def _accept(self, connection: socket.socket) -> None:
        self._stack.callback(connection.close)
        connection.settimeout(5.0)
        lines = connection.makefile("rb")
        with suppress(OSError, ValueError, KeyError):
            first = json.loads(lines.readline(1000))
            if secrets.compare_digest(first["token"], self._token) and first["node"] in self._nodes.addresses:
                connection.settimeout(None)
                self._connections[first["node"]] = connection
                threading.Thread(target=self._read, args=(first["node"], lines), daemon=True).start()

    def _read(self, node: str, lines: Iterable[bytes]) -> None:
        with suppress(OSError, ValueError):
            for line in lines:
                self._messages.put((node, json.loads(line)))
        self._messages.put((node, None))

    def _close(self) -> None:
        """Closes the connections, at which agents kill their checks and end; kills what does not end."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._stack.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _at(finding: Finding, node: str) -> Finding:
    return Finding(**{**vars(finding), "where": node})


def _silent(check: Check, node: str, limit_s: float) -> Finding:
    text = f"{check.name}: {node} does not answer {limit_s + _GRACE_S:g} s after the check began"
    return Finding(False, text, _HANGS, f"see whether {node} is up, and what blocks it", where=node)


def _ended(check: Check, node: str, message: dict[str, Any], *, limit_s: float, explained: bool) -> Iterator[Finding]:
    """Yields a failure if a check was killed at its limit, or its process failed without a finding that says why."""
    code, why = message["ended"], message["why"]
    if code is None:
        text = f"{check.name}: it hangs: it did not end within {limit_s:g} s and was killed; {why}"
        yield Finding(False, text, _HANGS, "read the end of its log", where=node)
    elif code and not explained:
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        yield Finding(
            False, f"{check.name}: its process ended with {reason}; {why}", BROKEN, "read its log", where=node
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
