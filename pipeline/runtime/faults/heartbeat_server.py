"""Heartbeat server: a small process beside rank 0 that collects all ranks' heartbeats and diagnoses dead or hung ranks.

It is a process of its own, not a thread of rank 0. So it sees rank 0 die or stop like any other rank, and a call in
rank 0 that holds the interpreter lock does not delay it. It needs no torch, and exits when the last rank has
disconnected.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.cli import ERROR_FILE
from foundation.processes import STOPPED, TRACED, machine, raise_file_limit, state_of
from pipeline.runtime.faults.diagnosis import SETTLE_S, Diagnosis, RankStatus, diagnose, parse_faulthandler_dump
from pipeline.runtime.faults.end_processes import Process, kill_ranks, ranks_to_kill
from pipeline.runtime.faults.heartbeat_messages import Message, MessageDecoder, encode, greeting
from pipeline.runtime.faults.report import append_fault_once, describe_fault, fault_row, print_report, with_timeout

REGISTRATION_S = 120.0
"""Seconds until ranks without any heartbeat are reported, and until a server that no rank has reached exits."""
_EXIT_S = 5.0
"""Seconds for ranks to exit after a diagnosis; ranks left on this machine are then killed."""
_SEND_S = 5.0
"""Seconds for sending a diagnosis; a stopped rank does not receive it."""
_STRANGER_S = 30.0
"""Seconds for a connection to present the token."""
_LOST = {"died", "silent", "stuck", "lost"}


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of the heartbeat server, from rank 0.

    Attributes:
        token: token that a connection has to present to count as a rank of this start of this run.
        world_size: number of ranks.
        run_dir: the run's directory.
        silent_s: heartbeat timeout, in seconds.
        stuck_s: hang timeout, in seconds without progress.
        interval_s: seconds between heartbeats.
        master: address:port of the rendezvous; empty where there is none.
    """

    token: str
    world_size: int
    run_dir: str
    silent_s: float
    stuck_s: float
    interval_s: float
    master: str = ""


@dataclass
class _Connection:
    """State of a connection; `status` is None until the rank has registered.

    Attributes:
        since: time when the connection was accepted, by `time.monotonic`.
        first: bytes received so far, until the token is complete; None afterwards.
    """

    since: float = 0.0
    first: bytes | None = b""
    decoder: MessageDecoder = field(default_factory=MessageDecoder)
    status: RankStatus | None = None
    dump: list[str] = field(default_factory=list)


class HeartbeatServer:
    """Receives the heartbeats of all ranks until they have disconnected.

    Args:
        listener: accepts their connections.
        config: configuration from rank 0.
    """

    def __init__(self, listener: socket.socket, config: ServerConfig) -> None:
        self._config, self._connections = config, dict[socket.socket, _Connection]()
        self._disconnected: list[RankStatus] = []
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._diagnose_now = False

    def run(self) -> None:
        """Runs until all ranks have disconnected; ends also if none has ever registered."""
        start = last_check = next_heartbeat = time.monotonic()
        warned = self._config.world_size == 1
        while self._has_ranks or not (self._disconnected or last_check - start > REGISTRATION_S):
            self._receive(max(0.0, next_heartbeat - time.monotonic()))
            now = time.monotonic()
            if now - last_check > 5 * self._config.interval_s:  # this server process was stopped, not the ranks
                self._reset_timers(now)
            last_check = now
            if not (self._diagnose_now or now >= next_heartbeat):
                continue
            if diagnosis := self._diagnose(now):
                self._end_run(diagnosis)
                return
            if now >= next_heartbeat:
                next_heartbeat = now + self._config.interval_s
                self._disconnect_strangers(now)
                self._broadcast(encode({"heartbeat": 1}))
            if not warned and now - start > REGISTRATION_S:
                warned = self._warn_of_missing_ranks()

    @property
    def _has_ranks(self) -> bool:
        """Whether a registered rank is connected; other connections do not keep this process alive."""
        return any(connection.status for connection in self._connections.values())

    @property
    def statuses(self) -> dict[int, RankStatus]:
        """Rank -> its status."""
        connected = (connection.status for connection in self._connections.values() if connection.status)
        return {status.rank: status for status in (*self._disconnected, *connected)}

    def _diagnose(self, now: float) -> Diagnosis | None:
        self._diagnose_now = False
        config, statuses = self._config, list(self.statuses.values())
        limits = {"silent_s": config.silent_s, "stuck_s": config.stuck_s, "interval_s": config.interval_s}
        diagnosis = diagnose(statuses, now, **limits)
        if diagnosis and diagnosis.kind in ("silent", "stuck") and is_paused([s for s in statuses if s.monitored]):
            self._reset_timers(now)
            return None
        return diagnosis

    def _receive(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)

    def _accept(self) -> None:
        with suppress(OSError):  # the connection is closed already, or no file descriptor is left
            client, _ = self._listener.accept()
            client.setblocking(False)
            self._selector.register(client, selectors.EVENT_READ)
            self._connections[client] = _Connection(since=time.monotonic())

    def _read(self, client: socket.socket) -> None:
        connection = self._connections[client]
        try:
            data = client.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset: the kernel closes it this way if its process had unread data
            data = b""
        now = time.monotonic()
        if connection.first is not None and data:
            expected = greeting(self._config.token)
            first = connection.first = connection.first + data
            if len(first) < len(expected) and b"\n" not in first:
                return
            if not hmac.compare_digest(first[: len(expected)], expected):
                self._disconnect(client, now)
                return
            connection.first, data = None, first[len(expected) :]
            if not data:
                return
        for message in connection.decoder.feed(data):
            if not self._handle(client, connection, message, now):
                data = b""
        if not data:
            self._disconnect(client, now)

    def _handle(self, client: socket.socket, connection: _Connection, message: Message | str, now: float) -> bool:
        """Handles one message; False when the client is not a rank of this run and is to be disconnected."""
        if connection.status is None:
            if isinstance(message, str):
                return False
            connection.status = RankStatus(**message, last_heartbeat=now, last_progress=now)
            with suppress(OSError):  # the connection is closed: noticed on receiving
                client.send(encode({"registered": self._config.token}))
        elif isinstance(message, str):
            status = connection.status
            connection.dump = [message] if message.startswith("Timeout") else [*connection.dump, message]
            stack = parse_faulthandler_dump(connection.dump, thread=status.main_thread) or status.stack
            connection.status = replace(status, last_heartbeat=now, stack=stack, gil_held=True)
        else:
            connection.status = _updated(connection.status, message, now)
            self._diagnose_now |= "error" in message
        return True

    def _disconnect(self, client: socket.socket, now: float) -> None:
        connection = self._connections.pop(client)
        self._selector.unregister(client)
        client.close()
        if (status := connection.status) is not None:
            self._disconnected.append(replace(status, disconnected=True, error_time=status.error_time or now))
            self._diagnose_now = True

    def _disconnect_strangers(self, now: float) -> None:
        """Closes connections that have not presented the token in time, since they take up file descriptors."""
        for client, connection in list(self._connections.items()):
            if connection.first is not None and now - connection.since > _STRANGER_S:
                self._disconnect(client, now)

    def _reset_timers(self, now: float) -> None:
        """Restarts the heartbeat and hang timeouts of all ranks."""
        for connection in self._connections.values():
            if status := connection.status:
                connection.status = replace(status, last_heartbeat=now, last_progress=now)

    def _broadcast(self, message: bytes) -> None:
        for client, connection in self._connections.items():
            with suppress(OSError):  # the rank is stopped or gone: noticed at the next diagnosis
                if connection.status is not None:
                    client.send(message)

    def _send_diagnosis(self, diagnosis: Diagnosis, kill: Sequence[Process]) -> None:
        """Sends the diagnosis to every rank, with the processes to kill on the rank's own machine.

        With thousands of ranks at fault the message is larger than a socket takes at once.
        """
        what = {"kind": diagnosis.kind, "ranks": diagnosis.ranks}
        ranks = {client: each.status.machine for client, each in self._connections.items() if each.status is not None}
        messages = {
            place: encode({"diagnosis": {**what, "kill": [process for process in kill if process[0] == place]}})
            for place in set(ranks.values())
        }
        unsent = {client: memoryview(messages[place]) for client, place in ranks.items()}
        deadline = time.monotonic() + _SEND_S
        while unsent and time.monotonic() < deadline:
            for client, message in list(unsent.items()):
                try:
                    unsent[client] = message[client.send(message) :]
                except BlockingIOError:
                    continue
                except OSError:  # gone
                    unsent[client] = message[:0]
                if not unsent[client]:
                    del unsent[client]
            with selectors.DefaultSelector() as writable:
                for client in unsent:
                    writable.register(client, selectors.EVENT_WRITE)
                writable.select(0.1 if unsent else 0)

    def _warn_of_missing_ranks(self) -> bool:
        missing = [rank for rank in range(self._config.world_size) if rank not in self.statuses]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            port = self._listener.getsockname()[1]
            text = (
                f"warning: the watchdog has no heartbeat from ranks {shown}: can they reach port {port} of this host?"
            )
            print(text, file=sys.stderr, flush=True)
        return True

    def _end_run(self, diagnosis: Diagnosis) -> None:
        """Reports the diagnosis on stderr, to the ranks and in the run directory; waits until the ranks have exited."""
        statuses, world_size = self.statuses, self._config.world_size
        report = describe_fault(diagnosis, statuses, world_size=world_size)
        if diagnosis.kind in _LOST:
            with_timeout(2.0, lambda: print_report(report), default=None)
        kill = ranks_to_kill(diagnosis, statuses)
        self._send_diagnosis(diagnosis, kill)
        kill_ranks(kill)
        row = fault_row(diagnosis, statuses, world_size=world_size)
        append_fault_once(Path(self._config.run_dir), row, token=self._config.token, master=self._config.master)
        remaining = self._wait_for_exits()
        if diagnosis.kind in _LOST:
            kill_ranks([(s.machine, s.pid, s.start_ticks) for s in remaining])
        elif ERROR_FILE not in os.environ and not all(_has_own_error(status) for status in self.statuses.values()):
            # otherwise each rank prints its error itself; a launcher that collects error files prints the failed rank's
            # error
            with_timeout(2.0, lambda: print_report(report), default=None)

    def _wait_for_exits(self) -> list[RankStatus]:
        """Waits until the ranks have disconnected; returns the ranks that did not in time."""
        deadline = time.monotonic() + _EXIT_S + SETTLE_S
        while self._has_ranks and time.monotonic() < deadline:
            self._receive(0.1)
        return [connection.status for connection in self._connections.values() if connection.status]


def is_paused(monitored: Sequence[RankStatus]) -> bool:
    """Tells whether the run is paused on purpose: a rank by a debugger, or all ranks by a signal (SIGSTOP).

    Only ranks on this machine can be checked.
    """

    def process_state(status: RankStatus) -> str:
        state, start_ticks = state_of(status.pid)
        return state if (status.machine, status.start_ticks) == (machine(), start_ticks) else ""

    states = [process_state(status) for status in monitored]
    return TRACED in states or set(states) == {STOPPED}


def _has_own_error(status: RankStatus) -> bool:
    """Tells whether a rank has failed with an error that is not a consequence of another rank's failure."""
    return status.error is not None and not status.secondary


def _updated(status: RankStatus, message: Message, now: float) -> RankStatus:
    """Updates the status by a heartbeat; fields that the message lacks keep their values."""
    changed: dict[str, Any] = {
        key: message[key] for key in ("step", "phase", "finished", "error", "secondary", "collective") if key in message
    }
    transitions, ticks = message.get("transitions", status.transitions), message.get("ticks", status.ticks)
    stack = tuple(message["stack"]) if "stack" in message else status.stack
    progress = (transitions, ticks) != (status.transitions, status.ticks)
    changed |= {"transitions": transitions, "ticks": ticks, "stack": stack, "gil_held": False}
    changed |= {"last_heartbeat": now, "last_progress": now if progress else status.last_progress}
    if status.error is None and "error" in message:
        changed["error_time"] = now
    return replace(status, **changed)


def main() -> None:
    """Runs the server: its configuration and the listening socket's file descriptor come as JSON on stdin."""
    config = json.load(sys.stdin)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)  # these signals are for the ranks; the server exits after the last rank
    raise_file_limit()
    listener = socket.socket(fileno=config.pop("listener"))
    listener.setblocking(False)
    HeartbeatServer(listener, ServerConfig(**config)).run()
    os._exit(0)  # without joining a thread that is blocked on a dead file system


if __name__ == "__main__":
    main()
