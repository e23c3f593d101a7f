"""Serves parts of checkpoint files in this node's memory to the ranks of other nodes, while a run is restarted.

A request is one line: the server's token, a space, and JSON (file name, first byte, number of bytes). The reply is the
byte 1 and the requested bytes; if they cannot be read, the server closes the connection, which serves many requests.
"""

from __future__ import annotations

import hmac
import io
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from foundation.listening import listening_socket

_TIMEOUT_S, _IDLE_S = 30.0, 600.0
"""Seconds without a byte after which a reader uses the run's directory, and a server closes a connection."""
_LINE_BYTES, _BACKLOG = 4096, 1024


@dataclass(frozen=True)
class MemoryServerAddress:
    """Address at which a rank serves its node's files.

    Attributes:
        hosts: names and addresses of the rank's host, in the order in which to try them.
        port: port of the server's socket.
        token: secret that every request has to contain.
    """

    hosts: tuple[str, ...]
    port: int
    token: str


@contextmanager
def served(files: Mapping[str, Path], *, master: str, port: int = 0) -> Iterator[MemoryServerAddress]:
    """Serves files until the block ends.

    Args:
        files: name -> path.
        master: host of rank 0; the route to it shows which network the hosts use.
        port: port of the rendezvous on `master`, whose open connections show the network, too; 0 without one.

    Raises:
        OSError: no port is free.
    """
    token = secrets.token_hex(16)

    class Handler(socketserver.StreamRequestHandler):
        timeout = _IDLE_S
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # the client then reads from the run's directory
                while line := self.rfile.readline(_LINE_BYTES):
                    given, _, request = line.partition(b" ")
                    if not hmac.compare_digest(given, token.encode()):
                        return
                    name, begin, length = json.loads(request)
                    with files[name].open("rb") as file:
                        self.connection.sendall(b"\1")
                        if length and self.connection.sendfile(file, int(begin), int(length)) < length:
                            return  # the file has become shorter

    with _Server(("", 0), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listening_socket(master, _BACKLOG, port=port)
        bound, own_port, *_ = server.socket.getsockname()
        hosts = (() if bound in ("::", "0.0.0.0") else (bound,)) + _own_addresses(master)
        threading.Thread(target=server.serve_forever, args=(0.05,), name="checkpoint-server", daemon=True).start()
        try:
            yield MemoryServerAddress(tuple(dict.fromkeys(hosts)), own_port, token)
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


class Client:
    """Reads parts of files from one server. Not thread-safe."""

    def __init__(self, address: MemoryServerAddress) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._stream: IO[bytes] | None = None

    def read(self, name: str, begin: int, length: int) -> io.BytesIO:
        """Reads bytes of a file.

        Raises:
            OSError: the server does not answer, or cannot read the file.
        """
        if self._connection is None:
            self._connection = self._connected()
            self._stream = cast("IO[bytes]", self._connection.makefile("rb"))
        assert self._stream is not None
        self._connection.sendall(f"{self._address.token} {json.dumps([name, begin, length])}\n".encode())
        if self._stream.read(1) != b"\1":
            raise ConnectionError(f"{self._address.hosts[0]} does not serve {name}")
        data = self._stream.read(length)
        if len(data) != length:
            raise ConnectionError(f"{self._address.hosts[0]} has sent {len(data)} of {length} bytes of {name}")
        return io.BytesIO(data)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> socket.socket:
        failed: OSError | None = None
        for host in self._address.hosts:
            try:
                return socket.create_connection((host, self._address.port), timeout=_TIMEOUT_S)
            except OSError as error:
                failed = error
        raise failed or ConnectionError("the server has no address")


def _own_addresses(master: str) -> tuple[str, ...]:
    """Addresses and names of this host, in the order in which other hosts should try them."""
    name, found = socket.gethostname(), [master]
    with suppress(OSError):
        family, _, _, _, there = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing: makes the kernel choose this host's address on the route there
            own = str(probe.getsockname()[0])
        if own != "::1" and not own.startswith("127."):
            found = [own]
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return tuple(dict.fromkeys([*found, name]))
