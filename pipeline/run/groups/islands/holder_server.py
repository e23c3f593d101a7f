"""Serves a `Holder` over TCP: a thread per connection."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import torch
from torch import Tensor

from foundation.errors import ConfigError
from pipeline.run.groups.islands.holder import Holder, OuterShard
from pipeline.run.groups.islands.peers import ExchangeError
from pipeline.run.groups.islands.quantize import BLOCK, dequantize
from pipeline.run.groups.islands.wire import Channel, Header

_HANDSHAKE_S, _AGAIN_S = 10.0, 0.2
_MOST_STRANGERS = 256
"""Largest number of connections at a time that have not yet proved that they have the secret."""


class HolderServer:
    """A TCP server of a `Holder` that listens until `shutdown`.

    Args:
        holder: the holder of the outer state.
        address: HOST:PORT to listen on.
        secret: secret shared by all islands; empty without a secret.
        timeout_s: seconds without progress after which a message has failed.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, holder: Holder, address: str, *, secret: bytes, timeout_s: float) -> None:
        self._holder, self._secret, self._timeout_s = holder, secret, timeout_s
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            remedy = "another port in islands.lighthouse"
            raise ConfigError("islands.lighthouse", address, why=str(error), remedy=remedy) from None
        self.port = int(self._listener.getsockname()[1])
        self._connections: set[socket.socket] = set()
        self._strangers, self._closed = threading.BoundedSemaphore(_MOST_STRANGERS), threading.Event()
        threading.Thread(target=self._accept, name="holder", daemon=True).start()

    def shutdown(self) -> None:
        """Closes all connections."""
        self._closed.set()
        for each in (self._listener, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down, out of file descriptors for now, or the client has gone
                self._strangers.release()
                time.sleep(_AGAIN_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no thread is free for now
                self._strangers.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            channel = self._channel(connection)
            while connection.recv(1, socket.MSG_PEEK):
                connection.settimeout(self._timeout_s)
                channel.send(*self._answer(*channel.receive()))
                connection.settimeout(None)  # an island is silent while it trains
        except (ExchangeError, OSError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError):
            return  # a dead island, or another program: without a secret any message is accepted
        finally:
            self._connections.discard(connection)
            connection.close()

    def _channel(self, connection: socket.socket) -> Channel:
        try:
            connection.settimeout(_HANDSHAKE_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel = Channel(connection, secret=self._secret, server=True)
            connection.settimeout(None)
            return channel
        finally:
            self._strangers.release()

    def _answer(self, header: Header, payload: Tensor) -> tuple[Header, Tensor | None]:
        what, name, session = header["do"], str(header["name"]), str(header["session"])
        holder = self._holder
        if what == "join":
            keys = ("layout", "ranks", "total", "ledger")
            return holder.join(name, session, **{key: header[key] for key in keys}), None
        if what == "upload":
            return holder.upload(name, session, int(header["rank"]), unpack_shard(payload)), None
        if what == "push":
            gradient = unpack_gradient(payload, count=int(header["count"]), compressed=bool(header["int8"]))
            return holder.push(name, session, int(header["rank"]), gradient), None
        if what == "commit":
            return holder.commit(name, session, int(header["first"])), None
        if what == "pull":
            shard = holder.pull(name, session, int(header["rank"]))
            return ({"state": "rejoin"}, None) if shard is None else ({"state": "taken"}, pack_shard(shard))
        if what == "leave":
            holder.leave(name, session)
        else:
            holder.beat(name, session)
        return {"state": "taken"}, None


def pack_shard(shard: OuterShard) -> Tensor:
    """Packs weights and momentum into bytes, uint8 [8 N]."""
    return torch.cat(list(shard)).view(torch.uint8)


def unpack_shard(payload: Tensor) -> OuterShard:
    """Inverts `pack_shard`; returns an empty shard for no bytes."""
    return (
        OuterShard(*payload.view(torch.float32).chunk(2))
        if payload.numel()
        else OuterShard(torch.empty(0), torch.empty(0))
    )


def unpack_gradient(payload: Tensor, *, count: int, compressed: bool) -> Tensor:
    """Reads a pseudo-gradient, fp32 [count], from bytes: fp32, or int8 blocks with scales."""
    if not compressed:
        return payload.view(torch.float32)
    return dequantize(payload.view(-1, BLOCK + 4))[:count]
