"""Heartbeat protocol between ranks and heartbeat server: one JSON object per line; other lines are kept as text."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

MAX_LINE_BYTES = 1 << 20
"""Longest line; a longer one is not of this protocol and is dropped."""


DIAGNOSIS = b'{"diagnosis":'
"""How the line of a diagnosis begins."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageDecoder:
    """Splits the bytes of a connection into messages (dict) and other lines (str)."""

    def __init__(self) -> None:
        self._incomplete = b""

    @property
    def incomplete(self) -> bytes:
        """The beginning of a line whose end has not arrived."""
        return self._incomplete

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | str]:
        """Takes received bytes; yields the lines that are complete."""
        *complete, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > MAX_LINE_BYTES:
            self._incomplete = b""
        for line in complete:
            yield _decode(line)


def _decode(line: bytes) -> dict[str, Any] | str:
    text = line.decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def listening_socket(address: str, backlog: int) -> socket.socket:
    """A listening socket on a free port: of all interfaces, or of the loopback if `address` is a loopback address.

    IPv6 and IPv4 both where the host has both.
    """
    if address in ("localhost", "::1") or address.startswith("127."):
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError:  # compiled in, but disabled
            pass
    return socket.create_server(("", 0), backlog=backlog)
