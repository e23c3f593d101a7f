"""The thread in each rank that sends signs of life to the hub, and obeys its verdict."""

from __future__ import annotations

import faulthandler
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from headrace.base.errors import EXIT_FOLLOWED, EXIT_LOST
from headrace.base.processes import machine, state_of
from pipeline.faults.diagnosis import SETTLE_S
from pipeline.faults.heartbeat_messages import Lines, line
from pipeline.faults.process_exit import kill_ranks, leave_now
from pipeline.faults.stack_dumps import stack_of
from pipeline.launch.local import INSIST_S

_GOODBYE = line({"left": True})


@dataclass(frozen=True)
class RankPosition:
    """Where a main thread is. See `Record` for the fields."""

    phase: str = "start-up"
    step: int = 0
    places: int = 0
    ticks: int = 0

    def next(self, phase: str, step: int | None) -> RankPosition:
        """Where it is after saying so: at a new place, or a bit further in the same one."""
        step = self.step if step is None else step
        if (phase, step) == (self.phase, self.step):
            return RankPosition(phase, step, self.places, self.ticks + 1)
        return RankPosition(phase, step, self.places + 1, self.ticks)


@dataclass(frozen=True)
class Address:
    """Where the hub listens.

    Attributes:
        port: TCP.
        token: what both ends prove themselves with.
        hosts: names and numbers of its host.
        beat_s: seconds between signs of life.
    """

    port: int
    token: str
    hosts: tuple[str, ...]
    beat_s: float

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {"port": self.port, "token": self.token, "hosts": self.hosts, "beat_s": self.beat_s}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """From JSON."""
        return cls(told["port"], told["token"], tuple(told["hosts"]), told["beat_s"])


def hello(rank: int) -> dict[str, Any]:
    """Who this process is."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": machine(),
        "born": state_of(os.getpid())[1],
        "main": threading.main_thread().ident,
    }


class Monitor(threading.Thread):
    """Sends where the main thread is, once per beat.

    When the interpreter's lock is held for long, so that no thread runs, `faulthandler` writes the stack into the
    connection instead: its own thread needs no lock. So a rank that is in a long call is not taken for a dead one.

    Args:
        rank: of this process.
        place: tells where the main thread is.
        find: connects to the hub, or returns None.
        lost: called when the hub is gone or silent, with the seconds of silence; 0 when its connection closed.
        beat_s: seconds between signs of life.
        silent_s: seconds of silence after which the other end counts as lost.

    Attributes:
        connected: set when the hub knows this rank, or is known not to be there.
    """

    def __init__(
        self,
        rank: int,
        *,
        place: Callable[[], RankPosition],
        find: Callable[[], tuple[socket.socket, Lines] | None],
        lost: Callable[[float], None],
        beat_s: float,
        silent_s: float,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._rank, self._place, self._find, self._lost = rank, place, find, lost
        self._beat_s, self._silent_s = beat_s, silent_s
        self._lock, self.connected = threading.Lock(), threading.Event()
        self._socket: socket.socket | None = None
        self._told: tuple[str, ...] = ()
        self._own: Literal["", "cause", "consequence"] = ""
        self._code = 1
        self._judged, self._closing, self._orphaned = threading.Event(), False, False

    def run(self) -> None:
        """Until `close`, a verdict, or the end of the hub."""
        found = self._find()
        if found is None or not self._keep(found[0]):
            self.connected.set()
            return
        connection, lines = found
        self.connected.set()
        try:
            silence = self._watch(connection, lines)
        finally:
            faulthandler.cancel_dump_traceback_later()  # before the descriptor can be another file's
            with self._lock:
                self._socket = None
                connection.close()
        if silence is not None and not self._closing:
            self._orphaned = True
            self._lost(silence)

    def _keep(self, connection: socket.socket) -> bool:
        """Takes a connection into use; False, and it is closed with a goodbye, when this rank is leaving already."""
        with self._lock:
            if not self._closing:
                self._socket = connection
                _close_in_children(connection)
                return True
        with suppress(OSError), connection:
            connection.sendall(_GOODBYE)
        return False

    def fail(self, text: str, *, consequence: bool, code: int) -> None:
        """Tells of an error of this rank. Called by the main thread.

        Args:
            text: its first line.
            consequence: it looks like one that follows from another rank's end.
            code: what this process is about to leave with.
        """
        self._own, self._code = "consequence" if consequence else "cause", code
        self.connected.wait(SETTLE_S)
        self._send({"failed": text, "consequence": consequence, **self._where()})

    def await_verdict(self, seconds: float) -> None:
        """Gives the hub time to judge: this thread then ends the process, or returns when nobody else is to blame.

        A hub that has gone cannot judge, but rank 0 may have gone a moment after it: that is looked at once more.
        """
        deadline = time.monotonic() + seconds
        while self.is_alive() and not self._judged.is_set() and time.monotonic() < deadline:
            self.join(0.05)
        if self._orphaned and self._rank:
            self._lost(0.0)

    def close(self) -> None:
        """Says goodbye: what is closed after this is no death. Once `_closing` is set the thread closes all."""
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    if not self._own:
                        self._socket.sendall(_GOODBYE)
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._closing = True
        self.join(2.0)

    def _watch(self, connection: socket.socket, lines: Lines) -> float | None:
        """Sends and receives. Returns None after a verdict, else for how long the hub has been silent."""
        connection.settimeout(self._silent_s)
        heard = looked = time.monotonic()
        beat_at = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing:
                now = time.monotonic()
                if now - looked > 5 * self._beat_s:  # this process was stopped itself
                    heard += now - looked
                looked = now
                if now >= beat_at:
                    faulthandler.dump_traceback_later(self._silent_s / 2, repeat=True, file=connection.fileno())
                    beat_at = now + self._beat_s
                    self._send(self._where())
                if selector.select(max(0.0, beat_at - now)):
                    heard = time.monotonic()
                    if not self._receive(connection, lines):
                        return None if self._judged.is_set() else 0.0
                elif now - heard > self._silent_s:
                    return now - heard
        return None

    def _receive(self, connection: socket.socket, lines: Lines) -> bool:
        """Reads what has come; False when that was the last."""
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        for message in lines.feed(data):
            if isinstance(message, dict) and "verdict" in message:
                self._obey(**message["verdict"])
        return bool(data)

    def _where(self) -> dict[str, Any]:
        place = self._place()
        told = {"phase": place.phase, "step": place.step, "places": place.places, "ticks": place.ticks}
        stack = stack_of(threading.main_thread().ident or 0)
        if stack != self._told:
            self._told = stack
            told["stack"] = stack
        return told

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # its end is seen when receiving
            if self._socket is not None:
                self._socket.sendall(line(message))

    def _obey(self, kind: str, ranks: Sequence[int], doomed: Sequence[Sequence[object]]) -> None:
        """Ends this process, unless it is ending with an error of its own that is worth telling."""
        kill_ranks(doomed)
        if kind == "failed" and self._rank not in ranks:
            self._wait_for_own_error(SETTLE_S)
        if self._own == "cause" or (kind == "failed" and self._rank in ranks):
            self._judged.set()
            time.sleep(INSIST_S)
            leave_now(self._code)
        leave_now(EXIT_FOLLOWED if kind == "failed" else EXIT_LOST)

    def _wait_for_own_error(self, seconds: float) -> None:
        """Where all ranks refuse together, each tells so itself, a moment earlier or later."""
        deadline = time.monotonic() + seconds
        while not self._own and time.monotonic() < deadline:
            time.sleep(0.02)


def _close_in_children(connection: socket.socket) -> None:
    """A forked child would keep the connection open after this process has died."""
    known = weakref.ref(connection)

    def close() -> None:
        if held := known():
            held.close()

    os.register_at_fork(after_in_child=close)
