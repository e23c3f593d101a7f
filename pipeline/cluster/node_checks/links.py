"""Bandwidth, round-trip time and clock offset of the link between two nodes, over TCP.

Every node answers others in a thread while it measures its own links. A busy node says so at once and is asked again
later; a hung node delays no other node. A measurement sends a payload in each direction, for one second at most. The
clock offset is computed as in NTP (RFC 5905, section 8): half the difference between the two directions, in the
quickest of several exchanges.

Protocol, after one line of JSON with the attempt: one byte (G: go, B: busy, W: another attempt), 8 exchanges of the
clock as a double, the payload and its acknowledgement (bytes, seconds), then payload and acknowledgement in the other
direction.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from foundation.listening import bound_socket
from pipeline.cluster.node_checks.records import NodeLink

_CHUNK = 1 << 18
_SEND_S, _TIMEOUT_S, _ANSWER_S, _AGAIN_S = 1.0, 10.0, 3.0, 0.2
_EXCHANGES, _REPEATS = 8, 2
_DOUBLE, _SIZE, _RECEIVED = struct.Struct("!d"), struct.Struct("!I"), struct.Struct("!Qd")


class BusyError(Exception):
    """The other node measures another link just now."""


@dataclass
class LinkServer:
    """Answers other nodes that measure their link to this one.

    Args:
        attempt: name of the checks; other attempts are refused.
        payload: bytes per direction.
        free: lock held while a link of this node is measured.
        address: this node's address, as the other nodes know it.
    """

    attempt: str
    payload: int
    free: threading.Lock
    address: str = ""

    def start(self) -> int:
        """Starts the server; returns its port."""
        listener = bound_socket(self.address, 64)
        threading.Thread(target=self._accept, args=(listener,), name="link server", daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), name="link", daemon=True).start()
            except (OSError, RuntimeError):  # no file descriptor or thread is free for now, or the socket is closed
                time.sleep(_AGAIN_S)

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, RecursionError):  # the other node reports the error
            connection.settimeout(_TIMEOUT_S)
            if _read_line(connection) != self.attempt:
                connection.sendall(b"W")
                return
            if not self.free.acquire(blocking=False):
                connection.sendall(b"B")
                return
            try:
                connection.sendall(b"G")
                self._serve(connection)
            finally:
                self.free.release()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_EXCHANGES):
            _read(connection, 1)
            connection.sendall(_DOUBLE.pack(time.time()))
        for _ in range(_REPEATS):
            connection.sendall(_RECEIVED.pack(*_receive(connection)))
            _send(connection, self.payload)


def measure_link(other: str, address: tuple[str, int], *, attempt: str, payload: int, free: threading.Lock) -> NodeLink:
    """Measures the link to another node.

    Args:
        other: name of the other node.
        address: host and port of its `LinkServer`.
        attempt: name of the checks.
        payload: bytes per direction.
        free: lock held while a link of this node is measured.

    Raises:
        BusyError: one of the two nodes measures another link.
    """
    try:
        with socket.create_connection(address, timeout=_ANSWER_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not free.acquire(blocking=False):
                raise BusyError
            try:
                return _measure(other, connection, attempt=attempt, payload=payload)
            finally:
                free.release()
    except (OSError, ValueError) as error:
        return NodeLink(other, error=f"{other} at {address[0]}: {error}")


def _measure(other: str, connection: socket.socket, *, attempt: str, payload: int) -> NodeLink:
    connection.sendall(json.dumps(attempt).encode() + b"\n")
    answer = _read(connection, 1)
    connection.settimeout(_TIMEOUT_S)
    if answer != b"G":
        if answer == b"B":
            raise BusyError
        raise OSError("it runs the checks of another start")
    offset_s, trip_s = _clock(connection)
    speeds = []
    for _ in range(_REPEATS):
        _send(connection, payload)
        there = _RECEIVED.unpack(_read(connection, _RECEIVED.size))
        back = _receive(connection)
        speeds.append(min(size / seconds for size, seconds in (there, back)) / 1e6)
    return NodeLink(other, round(max(speeds), 3), round(offset_s, 6), round(trip_s * 1e3, 4))


def _clock(connection: socket.socket) -> tuple[float, float]:
    """Measures the other clock's offset and the round-trip time, both in seconds."""
    found = []
    for _ in range(_EXCHANGES):
        wall, began = time.time(), time.monotonic()
        connection.sendall(b"t")
        [theirs] = _DOUBLE.unpack(_read(connection, _DOUBLE.size))
        trip = time.monotonic() - began
        found.append((trip, theirs - (wall + trip / 2)))
    trip, offset = min(found)
    return offset, trip


def _send(connection: socket.socket, payload: int) -> None:
    chunk, sent, began = os.urandom(_CHUNK), 0, time.monotonic()
    while sent < payload and time.monotonic() - began < _SEND_S:
        connection.sendall(_SIZE.pack(_CHUNK))
        connection.sendall(chunk)
        sent += _CHUNK
    connection.sendall(_SIZE.pack(0))


def _receive(connection: socket.socket) -> tuple[int, float]:
    """Receives the payload; returns bytes, and seconds from the first byte to the last."""
    received, began = 0, 0.0
    while True:
        [size] = _SIZE.unpack(_read(connection, _SIZE.size))
        began = began or time.monotonic()
        if not size:
            return received, max(time.monotonic() - began, 1e-9)
        if size > _CHUNK:
            raise ValueError(f"a chunk of {size} bytes")
        _read(connection, size)
        received += size


def _read(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if not count:
            raise OSError("the connection was closed")
        got += count
    return bytes(buffer)


def _read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n") and len(line) < 1000:
        line += _read(connection, 1)
    attempt: str = json.loads(line)
    return attempt


def measure_links(
    pending: list[str],
    *,
    address_of: Callable[[str], tuple[str, int] | None],
    measure: Callable[[str, tuple[str, int]], NodeLink],
    deadline: float,
) -> list[NodeLink]:
    """Measures links in order, and tries failed ones again until a deadline.

    Args:
        pending: names of the other nodes, in order; measured nodes are removed.
        address_of: returns a node's host and port; None while it has not started to answer.
        measure: measures the link to a node (`measure_link`).
        deadline: end of the measurements by `time.monotonic`.

    Returns:
        The links that were measured, and the links whose second attempt failed too.
    """
    links: list[NodeLink] = []
    failed: set[str] = set()
    while pending and time.monotonic() < deadline:
        for other in list(pending):
            address = address_of(other)
            if address is None or time.monotonic() >= deadline:
                continue
            with suppress(BusyError):
                link = measure(other, address)
                if link.error and other not in failed:
                    failed.add(other)
                    continue
                links.append(link)
                pending.remove(other)
        time.sleep(0.02 + 0.05 * os.urandom(1)[0] / 255)  # random: two busy nodes must not meet again
    return links
