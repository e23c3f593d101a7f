"""Heartbeat protocol between ranks and heartbeat server: one JSON object per line; other lines are kept as text.

A rank's first line is the server's token; the server decodes nothing more before it has compared the token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
"""A message between a rank and the heartbeat server."""

MAX_LINE_BYTES = 1 << 20
"""Largest length of a line; longer lines are foreign to the protocol and are dropped."""


DIAGNOSIS = b'{"diagnosis":'
"""Beginning of the line of a diagnosis."""


def encode(message: Message) -> bytes:
    """Encodes a message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def greeting(token: str) -> bytes:
    """Returns the first line that a rank sends."""
    return token.encode() + b"\n"


class MessageDecoder:
    """Splits the bytes of a connection into messages (dict) and other lines (str)."""

    def __init__(self) -> None:
        self._incomplete = b""

    @property
    def incomplete(self) -> bytes:
        """The beginning of a line whose end has not arrived."""
        return self._incomplete

    def feed(self, data: bytes) -> Iterator[Message | str]:
        """Takes received bytes; yields the lines that are complete."""
        *complete, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > MAX_LINE_BYTES:
            self._incomplete = b""
        for line in complete:
            yield _decode(line)


def _decode(line: bytes) -> Message | str:
    text = line.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
