"""Where the ranks' signs of life come together: a small process beside rank 0, which judges and tells all.

A process and not a thread of rank 0: so it sees rank 0 die or stop as it sees any other, and no call of rank 0 that
keeps the interpreter's lock can hold it up. It needs no torch, and ends when the last rank has gone.
"""

from __future__ import annotations

import json
import os
import resource
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

from headrace.base.cli import ERROR_FILE
from headrace.base.processes import STOPPED, TRACED, machine, state_of
from pipeline.faults.diagnosis import SETTLE_S, Diagnosis, RankStatus, diagnose
from pipeline.faults.heartbeat_messages import Lines, line
from pipeline.faults.process_exit import kill_ranks, ranks_to_kill
from pipeline.faults.report import claim, describe_fault, publish, within
from pipeline.faults.report import row as row_of
from pipeline.faults.stack_dumps import parsed

ARRIVAL_S = 120.0
"""Seconds until ranks that have never been heard are told, and until a hub to which nobody came ends."""
_DRAIN_S = 5.0
"""Seconds in which ranks end after a verdict; what is left on this machine is killed then."""
_LOST = {"died", "silent", "stuck", "lost"}


@dataclass(frozen=True)
class Orders:
    """What rank 0 tells its hub.

    Attributes:
        token: proves that a connection is of this start of this run.
        world_size: number of ranks.
        run_dir: the run's directory.
        silent_s: seconds without a sign of life.
        stuck_s: seconds without progress.
        beat_s: seconds between signs of life.
    """

    token: str
    world_size: int
    run_dir: str
    silent_s: float
    stuck_s: float
    beat_s: float


@dataclass
class _Peer:
    """A connection; `record` is None until it has said who it is."""

    lines: Lines = field(default_factory=Lines)
    record: RankStatus | None = None
    dump: list[str] = field(default_factory=list)


class HeartbeatServer:
    """Listens to all ranks until they have gone.

    Args:
        listener: accepts their connections.
        orders: from rank 0.
    """

    def __init__(self, listener: socket.socket, orders: Orders) -> None:
        self._orders, self._peers = orders, dict[socket.socket, _Peer]()
        self._parted: list[RankStatus] = []
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._alarmed = False

    def run(self) -> None:
        """Returns when all ranks have gone, or nobody ever came."""
        begun = looked = beat_at = time.monotonic()
        warned = self._orders.world_size == 1
        while self._watches or not (self._parted or looked - begun > ARRIVAL_S):
            self._receive(max(0.0, beat_at - time.monotonic()))
            now = time.monotonic()
            if now - looked > 5 * self._orders.beat_s:  # this process was stopped itself: the ranks are not to blame
                self._forgive(now)
            looked = now
            if not (self._alarmed or now >= beat_at):
                continue
            if verdict := self._judge(now):
                self._conclude(verdict)
                return
            if now >= beat_at:
                beat_at = now + self._orders.beat_s
                self._send(line({"beat": 1}))
            if not warned and now - begun > ARRIVAL_S:
                warned = self._warn()

    @property
    def _watches(self) -> bool:
        """Whether a rank is there; connections of others do not keep this process."""
        return any(peer.record for peer in self._peers.values())

    @property
    def records(self) -> dict[int, RankStatus]:
        """Rank -> what is known of it."""
        known = [*self._parted, *(peer.record for peer in self._peers.values() if peer.record)]
        return {record.rank: record for record in known}

    def _judge(self, now: float) -> Diagnosis | None:
        self._alarmed = False
        orders, records = self._orders, list(self.records.values())
        limits = {"silent_s": orders.silent_s, "stuck_s": orders.stuck_s, "beat_s": orders.beat_s}
        verdict = diagnose(records, now, **limits)
        if verdict and verdict.kind in ("silent", "stuck") and held([r for r in records if r.present]):
            self._forgive(now)
            return None
        return verdict

    def _receive(self, patience_s: float) -> None:
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone already, or there are no more file descriptors
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._peers[connection] = _Peer()

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset: the kernel closed it for a process that had not read all
            data = b""
        now = time.monotonic()
        for message in peer.lines.feed(data):
            if not self._take(connection, peer, message, now):
                data = b""
        if not data:
            self._part(connection, now)

    def _take(self, connection: socket.socket, peer: _Peer, message: dict[str, Any] | str, now: float) -> bool:
        """Takes in one message; False when the other end is none of ours."""
        if peer.record is None:
            if isinstance(message, str) or message.pop("token", None) != self._orders.token:
                return False
            peer.record = RankStatus(**message, heard=now, moved=now)
            with suppress(OSError):  # gone again already: that is seen when receiving
                connection.send(line({"welcome": self._orders.token}))
        elif isinstance(message, str):
            peer.dump = [message] if message.startswith("Timeout") else [*peer.dump, message]
            stack = parsed(peer.dump, thread=peer.record.main) or peer.record.stack
            peer.record = replace(peer.record, heard=now, stack=stack, starved=True)
        else:
            peer.record = _updated(peer.record, message, now)
            self._alarmed |= "failed" in message
        return True

    def _part(self, connection: socket.socket, now: float) -> None:
        peer = self._peers.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if peer.record is not None:
            self._parted.append(replace(peer.record, gone=True, failed_at=peer.record.failed_at or now))
            self._alarmed = True

    def _forgive(self, now: float) -> None:
        """Nobody's silence counts that was before this."""
        for peer in self._peers.values():
            if record := peer.record:
                peer.record = replace(record, heard=now, moved=now)

    def _send(self, message: bytes) -> None:
        for connection, peer in self._peers.items():
            with suppress(OSError):  # stopped, or gone: the next look will tell
                if peer.record is not None:
                    connection.send(message)

    def _warn(self) -> bool:
        missing = [rank for rank in range(self._orders.world_size) if rank not in self.records]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            port = self._listener.getsockname()[1]
            text = f"warning: the watchdog hears nothing of ranks {shown}: can they reach port {port} of this host?"
            print(text, file=sys.stderr, flush=True)
        return True

    def _conclude(self, verdict: Diagnosis) -> None:
        """Tells the verdict: to people, to the ranks, to the run's directory; then waits until the ranks have gone."""
        records, size = self.records, self._orders.world_size
        report = describe_fault(verdict, records, world_size=size)
        if verdict.kind in _LOST:
            within(2.0, lambda: publish(report), otherwise=None)
        doomed = ranks_to_kill(verdict, records)
        self._send(line({"verdict": {"kind": verdict.kind, "ranks": verdict.ranks, "doomed": doomed}}))
        kill_ranks(doomed)
        claim(Path(self._orders.run_dir), row_of(verdict, records, world_size=size), token=self._orders.token)
        left = self._drain()
        if verdict.kind in _LOST:
            kill_ranks([(r.machine, r.pid, r.born) for r in left])
        elif ERROR_FILE not in os.environ and not all(_erred(record) for record in self.records.values()):
            # else each has said it itself; and who collects errors in files shows the one of the rank itself
            within(2.0, lambda: publish(report), otherwise=None)

    def _drain(self) -> list[RankStatus]:
        deadline = time.monotonic() + _DRAIN_S + SETTLE_S
        while self._watches and time.monotonic() < deadline:
            self._receive(0.1)
        return [peer.record for peer in self._peers.values() if peer.record]


def held(present: Sequence[RankStatus]) -> bool:
    """Whether a person or a batch system holds the run: a debugger one of its ranks, or a signal all of them.

    Told only of ranks on this machine.
    """
    states = [state_of(r.pid)[0] if (r.machine, r.born) == (machine(), state_of(r.pid)[1]) else "" for r in present]
    return TRACED in states or set(states) == {STOPPED}


def _erred(record: RankStatus) -> bool:
    """Whether a rank has failed with an error of its own."""
    return record.failed is not None and not record.consequence


def _updated(record: RankStatus, message: dict[str, Any], now: float) -> RankStatus:
    """A record after a sign of life: what the message does not tell stays as it was."""
    changed: dict[str, Any] = {
        key: message[key] for key in ("step", "phase", "left", "failed", "consequence") if key in message
    }
    places, ticks = message.get("places", record.places), message.get("ticks", record.ticks)
    stack = tuple(message["stack"]) if "stack" in message else record.stack
    moved = now if (places, ticks) != (record.places, record.ticks) else record.moved
    changed |= {"places": places, "ticks": ticks, "stack": stack, "moved": moved, "heard": now, "starved": False}
    if record.failed is None and "failed" in message:
        changed["failed_at"] = now
    return replace(record, **changed)


def main() -> None:
    """Runs the hub: orders and the listening socket's file descriptor come as JSON on stdin."""
    told_to = json.load(sys.stdin)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(each, signal.SIG_IGN)  # they are meant for the ranks; it ends with the last of them
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.socket(fileno=told_to.pop("listener"))
    listener.setblocking(False)
    HeartbeatServer(listener, Orders(**told_to)).run()
    os._exit(0)  # without waiting for a thread whose file system does not answer


if __name__ == "__main__":
    main()
