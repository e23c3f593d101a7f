"""Messages between ranks and the hub: one JSON object per line. Whatever else comes is handed on as text."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

LONGEST = 1 << 20
"""Bytes of a line; longer ones are no message of ours."""


def line(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Cuts what a connection brings into messages (dict) and other lines (str)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | str]:
        """Takes what has come; yields what is complete."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            self._rest = b""
        for each in whole:
            yield _message(each)


def _message(raw: bytes) -> dict[str, Any] | str:
    text = raw.decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def listen(address: str, backlog: int) -> socket.socket:
    """A listening socket on a port of the system's choice: of all interfaces, or of the loopback if `address` is one.

    IPv6 and IPv4 both where the host has both.
    """
    if address in ("localhost", "::1") or address.startswith("127."):
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError:  # built in, but switched off
            pass
    return socket.create_server(("", 0), backlog=backlog)
