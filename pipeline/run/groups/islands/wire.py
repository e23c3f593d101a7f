"""Messages between islands and the holder of asynchronous mode: JSON and bytes over TCP, authenticated one by one.

Both sides prove that they have the shared secret (HMAC-SHA256 over two random challenges), and every message carries
authentication codes under the connection's key: one over its direction, number and JSON, one over its bytes. Nothing is
encrypted. Without a secret the key comes from an empty secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

import torch
from torch import Tensor

from pipeline.run.groups.islands.peers import ExchangeError

Header = dict[str, Any]
"""The JSON part of a message, beside its tensor."""

_HEAD = struct.Struct("!IQ")
_NONCE_BYTES, _CODE_BYTES, _MOST_JSON_BYTES, _MOST_BYTES = 32, 32, 1 << 20, 1 << 40


class WrongSecretError(ExchangeError):
    """The other side has a different secret."""


class Channel:
    """One authenticated connection. Every call raises ExchangeError if the other side does not answer in time.

    Args:
        connection: a connected socket, closed by `close`.
        secret: secret shared by both sides; empty without a secret.
        server: whether this side has accepted the connection.

    Raises:
        WrongSecretError: the other side has another secret.
    """

    def __init__(self, connection: socket.socket, *, secret: bytes, server: bool) -> None:
        self._socket, self._server = connection, server
        if connection.family != socket.AF_UNIX:  # a request is several small writes whose answer is awaited
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent = self._received = 0
        own = os.urandom(_NONCE_BYTES)
        self._write(own)
        other = bytes(self._read(_NONCE_BYTES))
        nonces = own + other if server else other + own
        self._key = hmac.new(secret, b"key" + nonces, hashlib.sha256).digest()
        sides = (b"server", b"client") if server else (b"client", b"server")
        mine, theirs = (hmac.new(secret, side + nonces, hashlib.sha256).digest() for side in sides)
        if not server:
            self._write(mine)
        if not hmac.compare_digest(bytes(self._read(_CODE_BYTES)), theirs):
            if server:  # an invalid code tells the client the reason
                self._write(bytes(_CODE_BYTES))
            raise WrongSecretError("the other side has another islands.secret_file")
        if server:
            self._write(mine)

    def send(self, header: Header, payload: Tensor | None = None) -> None:
        """Sends JSON and bytes, uint8 [n]."""
        text = json.dumps(header).encode()
        body = memoryview(b"") if payload is None else payload.numpy().data
        head = _HEAD.pack(len(text), len(body)) + text
        number, self._sent = self._sent, self._sent + 1
        self._write(head + self._code(self._server, number, "head", head))
        self._write(body)
        self._write(self._code(self._server, number, "body", body))

    def receive(self) -> tuple[Header, Tensor]:
        """Receives JSON and bytes, uint8 [n].

        Raises:
            WrongSecretError: the message is not from the other side.
        """
        head = bytes(self._read(_HEAD.size))
        length, size = _HEAD.unpack(head)
        if length > _MOST_JSON_BYTES or size > _MOST_BYTES:
            raise ExchangeError(f"a message announces {length} and {size} bytes, more than any has")
        text = bytes(self._read(length))
        self._verify("head", head + text)  # before the announced number of bytes is trusted
        body = self._read(size)
        self._verify("body", body)
        self._received += 1
        made = torch.frombuffer(body, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        return json.loads(text), made

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _verify(self, part: str, values: Any) -> None:
        code = self._code(not self._server, self._received, part, values)
        if not hmac.compare_digest(bytes(self._read(_CODE_BYTES)), code):
            raise WrongSecretError("a message does not verify with islands.secret_file")

    def _code(self, server: bool, number: int, part: str, values: Any) -> bytes:
        code = hmac.new(self._key, f"{server} {number} {part} ".encode(), hashlib.sha256)
        code.update(values)
        return code.digest()

    def _write(self, values: Any) -> None:
        try:
            self._socket.sendall(values)
        except OSError as error:
            raise ExchangeError(f"the connection failed: {error}") from None

    def _read(self, count: int) -> bytearray:
        values = bytearray(count)
        view, done = memoryview(values), 0
        while done < count:
            try:
                got = self._socket.recv_into(view[done:])
            except OSError as error:
                raise ExchangeError(f"the connection failed: {error}") from None
            if not got:
                raise ExchangeError("the connection was closed")
            done += got
        return values


class HolderClient:
    """A client of the holder that connects when necessary.

    Args:
        address: HOST:PORT of the holder.
        secret: secret shared by all islands; empty without a secret.
        timeout_s: seconds without progress after which a call counts as failed.
    """

    def __init__(self, address: str, *, secret: bytes, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._secret, self._timeout_s = (host.strip("[]"), int(port)), secret, timeout_s
        self._channel: Channel | None = None

    def call(self, header: Header, payload: Tensor | None = None) -> tuple[Header, Tensor]:
        """Sends a request; returns the answer.

        Raises:
            ExchangeError: there is no answer.
        """
        try:
            channel = self._connected()
            channel.send(header, payload)
            return channel.receive()
        except ExchangeError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection; the next call opens a new one."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _connected(self) -> Channel:
        if self._channel is None:
            try:
                connection = socket.create_connection(self._address, timeout=self._timeout_s)
            except OSError as error:
                raise ExchangeError(f"the lighthouse cannot be reached: {error}") from None
            connection.settimeout(self._timeout_s)
            try:
                self._channel = Channel(connection, secret=self._secret, server=False)
            except ExchangeError:
                connection.close()
                raise
        return self._channel
