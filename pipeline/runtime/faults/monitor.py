"""Heartbeat thread of each rank: sends heartbeats to the server, and ends the process when a rank is lost."""

from __future__ import annotations

import faulthandler
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

from foundation.errors import EXIT_FOLLOWED, EXIT_LOST
from foundation.processes import machine, state_of
from pipeline.runtime.faults.diagnosis import SETTLE_S, thread_stack
from pipeline.runtime.faults.end_processes import exit_now, kill_ranks
from pipeline.runtime.faults.heartbeat_messages import DIAGNOSIS, Message, MessageDecoder, encode
from pipeline.runtime.launch.local import OWN_ERROR_S

_FINISHED = encode({"finished": True})


@dataclass(frozen=True)
class RankPosition:
    """Step and phase of the main thread; the fields are those of `RankStatus`."""

    phase: str = "start-up"
    step: int = 0
    transitions: int = 0
    ticks: int = 0

    def moved_to(self, phase: str, step: int | None) -> RankPosition:
        """Returns the position after a report: a transition, or one more tick if step and phase are unchanged."""
        step = self.step if step is None else step
        if (phase, step) == (self.phase, self.step):
            return RankPosition(phase, step, self.transitions, self.ticks + 1)
        return RankPosition(phase, step, self.transitions + 1, self.ticks)


@dataclass(frozen=True)
class ServerAddress:
    """Address of the heartbeat server.

    Attributes:
        port: TCP port.
        token: secret that both ends of a connection present.
        hosts: names and IP addresses of the server's host.
        interval_s: seconds between heartbeats.
    """

    port: int
    token: str
    hosts: tuple[str, ...]
    interval_s: float

    def to_json(self) -> dict[str, Any]:
        """Converts the address to a JSON object."""
        return {"port": self.port, "token": self.token, "hosts": self.hosts, "interval_s": self.interval_s}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Reads the address from its JSON object."""
        return cls(fields["port"], fields["token"], tuple(fields["hosts"]), fields["interval_s"])


def registration(rank: int) -> Message:
    """Builds the first message of a rank: the identity of this process."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": machine(),
        "start_ticks": state_of(os.getpid())[1],
        "main_thread": threading.main_thread().ident,
    }


class PendingCollective:
    """Asks for the collective in which a rank waits, once the rank has made no progress for a while.

    Args:
        ask: returns the collective, or an empty text; its errors are ignored.
        idle_s: seconds without progress before the first call of `ask`, and between two calls.
    """

    def __init__(self, ask: Callable[[], str], *, idle_s: float) -> None:
        self._ask, self._idle_s = ask, idle_s
        self._position, self._next = RankPosition(), 0.0
        self._told = ""

    def changed(self, position: RankPosition) -> str | None:
        """Returns the collective if it has changed since the last call; None otherwise."""
        now = time.monotonic()
        found = self._told
        if position != self._position:
            self._position, self._next, found = position, now + self._idle_s, ""
        elif now >= self._next:
            self._next = now + self._idle_s
            with suppress(Exception):  # the recorder's format differs in another version of torch
                found = self._ask()
        changed, self._told = found != self._told, found
        return found if changed else None


class Monitor(threading.Thread):
    """Sends the position of the main thread, once per heartbeat interval.

    When the interpreter lock (GIL) is held for long, so that no Python thread runs, `faulthandler` writes the stack
    into the connection instead: its thread needs no lock. So a rank in a long C call is not taken for dead.

    Args:
        rank: this process's global rank.
        position: returns the position of the main thread.
        connect: connects to the heartbeat server, or returns None.
        on_server_lost: called when the server is gone or silent, with the seconds of silence (0 if it disconnected).
        interval_s: seconds between heartbeats.
        timeout_s: heartbeat timeout: seconds of silence after which the server counts as lost.
        collective: returns the collective in which this rank waits; None to report no collectives.
        on_hang: called before the process is ended because a rank hangs or is silent.

    Attributes:
        connected: set when this rank is registered, or the server is known to be unreachable.
    """

    def __init__(
        self,
        rank: int,
        *,
        position: Callable[[], RankPosition],
        connect: Callable[[], tuple[socket.socket, MessageDecoder] | None],
        on_server_lost: Callable[[float], None],
        interval_s: float,
        timeout_s: float,
        collective: PendingCollective | None = None,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._collective, self._on_hang = collective, on_hang
        self._rank, self._position, self._connect, self._on_server_lost = rank, position, connect, on_server_lost
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._lock, self.connected = threading.Lock(), threading.Event()
        self._socket: socket.socket | None = None
        self._sent_stack: tuple[str, ...] = ()
        self._own_error: Literal["", "cause", "secondary"] = ""
        self._exit_code, self._trace = 1, ""
        self._diagnosed, self._closing, self._server_lost = threading.Event(), False, False

    def run(self) -> None:
        """Runs until `close`, a diagnosis, or the loss of the server."""
        found = self._connect()
        if found is None or not self._adopt(found[0]):
            self.connected.set()
            return
        connection, decoder = found
        self.connected.set()
        try:
            silence_s = self._exchange_heartbeats(connection, decoder)
        finally:
            faulthandler.cancel_dump_traceback_later()  # before the file descriptor can be reused
            with self._lock:
                self._socket = None
                connection.close()
        if silence_s is not None and not self._closing:
            self._server_lost = True
            self._on_server_lost(silence_s)

    def _adopt(self, connection: socket.socket) -> bool:
        """Starts to use a connection; False, after signing off, when this rank is closing already."""
        with self._lock:
            if not self._closing:
                self._socket = connection
                _close_in_children(connection)
                return True
        with suppress(OSError), connection:
            connection.sendall(_FINISHED)
        return False

    def report_error(self, text: str, *, secondary: bool, exit_code: int, trace: str = "") -> None:
        """Reports an error of this rank to the server. Called by the main thread.

        Args:
            text: first line of the error.
            secondary: whether the error looks like a consequence of another rank's failure.
            exit_code: exit code with which this process is about to end.
            trace: traceback of the error, printed where the diagnosis ends this process and no other rank is the cause.
        """
        self._trace = trace  # before `_own_error`, which the monitor's thread checks
        self._own_error, self._exit_code = "secondary" if secondary else "cause", exit_code
        self.connected.wait(SETTLE_S)
        self._send({"error": text, "secondary": secondary, **self._heartbeat()})

    def await_diagnosis(self, seconds: float) -> None:
        """Gives the server time to diagnose; then the monitor ends the process, or this returns if no rank is at fault.

        A lost server sends no diagnosis, but rank 0 may die a moment after the server: the loss is checked once more.
        """
        deadline = time.monotonic() + seconds
        while self.is_alive() and not self._diagnosed.is_set() and time.monotonic() < deadline:
            self.join(0.05)
        if self._server_lost and self._rank:
            self._on_server_lost(0.0)

    def close(self) -> None:
        """Signs off: the disconnect then does not count as a death. Once `_closing` is set the thread cleans up."""
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    if not self._own_error:
                        self._socket.sendall(_FINISHED)
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._closing = True
        self.join(2.0)

    def _exchange_heartbeats(self, connection: socket.socket, decoder: MessageDecoder) -> float | None:
        """Exchanges heartbeats; returns the seconds of the server's silence, None after a diagnosis or `close`."""
        connection.settimeout(self._timeout_s)
        last_received = last_loop = time.monotonic()
        next_heartbeat = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing:
                now = time.monotonic()
                if now - last_loop > 5 * self._interval_s:  # this process was stopped (SIGSTOP)
                    last_received += now - last_loop
                last_loop = now
                if now >= next_heartbeat:
                    faulthandler.dump_traceback_later(self._timeout_s / 2, repeat=True, file=connection.fileno())
                    next_heartbeat = now + self._interval_s
                    self._send(self._heartbeat())
                if selector.select(max(0.0, next_heartbeat - now)):
                    last_received = time.monotonic()
                    if not self._receive(connection, decoder):
                        return None if self._diagnosed.is_set() else 0.0
                elif now - last_received > self._timeout_s:
                    return now - last_received
        return None

    def _receive(self, connection: socket.socket, decoder: MessageDecoder) -> bool:
        """Handles received messages; False when the server has disconnected."""
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        for message in decoder.feed(data):
            if isinstance(message, dict) and "diagnosis" in message:
                self._end_process(**message["diagnosis"])
        if not data and decoder.incomplete.startswith(DIAGNOSIS):  # the server was killed while it sent
            exit_now(EXIT_LOST)
        return bool(data)

    def _heartbeat(self) -> Message:
        """Builds a heartbeat: the position and, if it has changed, the stack."""
        position = self._position()
        message: Message = {"phase": position.phase, "step": position.step}
        message |= {"transitions": position.transitions, "ticks": position.ticks}
        stack = thread_stack(threading.main_thread().ident or 0)
        if stack != self._sent_stack:
            self._sent_stack = stack
            message["stack"] = stack
        if self._collective and (changed := self._collective.changed(position)) is not None:
            message["collective"] = changed
        return message

    def _send(self, message: Message) -> None:
        with self._lock, suppress(OSError):  # a disconnect is noticed on receiving
            if self._socket is not None:
                self._socket.sendall(encode(message))

    def _end_process(self, kind: str, ranks: Sequence[int], kill: Sequence[Sequence[object]]) -> None:
        """Exits after a diagnosis; a rank with an error of its own first gets `OWN_ERROR_S` to print it."""
        kill_ranks(kill)
        if kind in ("stuck", "silent"):
            self._on_hang()
        if kind == "failed" and self._rank not in ranks:
            self._wait_for_own_error(SETTLE_S)
        if self._own_error == "cause" or (kind == "failed" and self._rank in ranks):
            self._diagnosed.set()
            time.sleep(OWN_ERROR_S)
            exit_now(self._exit_code)
        if kind == "lost" and self._rank in ranks and self._trace:
            with suppress(OSError, ValueError):
                sys.stderr.write(self._trace)
        exit_now(EXIT_FOLLOWED if kind == "failed" else EXIT_LOST)

    def _wait_for_own_error(self, seconds: float) -> None:
        """Waits for this rank's own error: if all ranks raise the same error, each prints it at a different time."""
        deadline = time.monotonic() + seconds
        while not self._own_error and time.monotonic() < deadline:
            time.sleep(0.02)


def _close_in_children(connection: socket.socket) -> None:
    """Closes the connection in forked children, or they would keep it open after this process has died."""
    reference = weakref.ref(connection)

    def close() -> None:
        if alive := reference():
            alive.close()

    os.register_at_fork(after_in_child=close)
