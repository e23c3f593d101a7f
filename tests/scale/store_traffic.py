"""Traffic of torch's `TCPStore`: what real ranks send to it is recorded, and simulated ranks send the same.

A real client of torch looks up the name of its peer for each connection, and blocks a thread in each wait. Simulated
ranks are sockets of one process, which speak the protocol of `torch/csrc/distributed/c10d/TCPStore.cpp`.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_OPERATIONS = (
    *("VALIDATE", "SET", "COMPARE_SET", "GET", "ADD", "CHECK", "WAIT", "GETNUMKEYS", "DELETE_KEY", "APPEND"),
    *("MULTI_GET", "MULTI_SET", "CANCEL_WAIT", "PING"),
)
"""`QueryType`, in order."""
_ANSWERS = {"PING": "<I", "ADD": "<q", "GETNUMKEYS": "<q", "GET": "<Q", "COMPARE_SET": "<Q"}
"""Form of an operation's answer, or of its length; one byte for the others."""
_MAGIC = 0x3C85F7CE
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    """A request to the store.

    Attributes:
        operation: name of its `QueryType`.
        key: key of a SET, APPEND, ADD, GET, CHECK or WAIT; requests for several keys have none here.
        value: bytes to set or append.
        number: number to add; for PING the process.
    """

    operation: str
    key: str = ""
    value: bytes = b""
    number: int = 0

    def encoded(self) -> bytes:
        """As a client sends it."""
        key, begin = _sized(self.key.encode()), bytes([_OPERATIONS.index(self.operation)])
        match self.operation:
            case "VALIDATE" | "PING":
                return begin + struct.pack("<I", self.number)
            case "SET" | "APPEND":
                return begin + key + _sized(self.value)
            case "COMPARE_SET":  # of a key that is not there yet
                return begin + key + _sized(b"") + _sized(self.value)
            case "ADD":
                return begin + key + struct.pack("<q", self.number)
            case "CHECK" | "WAIT":
                return begin + _LENGTH.pack(1) + key
            case "GET" | "GETNUMKEYS":
                return begin + (key if self.operation == "GET" else b"")
        raise NotImplementedError(self.operation)

    @property
    def answered(self) -> bool:
        """Whether the store answers it."""
        return self.operation not in ("VALIDATE", "SET", "APPEND")


HELLO = (Request("VALIDATE", number=_MAGIC), Request("PING", number=1))
"""What every connection begins with."""


def _sized(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def decoded(data: bytes) -> list[Request]:
    """The requests that a client has sent."""
    found, at = [], 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return int(value)

    def text() -> bytes:
        nonlocal at
        length = take("<Q")
        at += length
        return data[at - length : at]

    while at < len(data):
        operation = _OPERATIONS[take("<B")]
        if operation in ("VALIDATE", "PING"):
            found.append(Request(operation, number=take("<I")))
        elif operation in ("SET", "APPEND"):
            found.append(Request(operation, text().decode(), text()))
        elif operation == "COMPARE_SET":
            key, expected, value = text().decode(), text(), text()
            assert not expected
            found.append(Request(operation, key, value))
        elif operation == "ADD":
            found.append(Request(operation, text().decode(), number=take("<q")))
        elif operation == "GET":
            found.append(Request(operation, text().decode()))
        elif operation in ("CHECK", "WAIT"):
            assert take("<Q") == 1  # one key
            found.append(Request(operation, text().decode()))
        else:
            raise NotImplementedError(operation)
    return found


class Recorder:
    """Passes on what clients send to a store, and keeps it; begins with `start`, so that a fork before has no threads.

    Attributes:
        port: port for clients.
    """

    def __init__(self, port: int) -> None:
        self._listener, self._store_port = socket.create_server(("127.0.0.1", 0), backlog=256), port
        self.port: int = self._listener.getsockname()[1]
        self._sent: list[bytearray] = []

    def start(self) -> None:
        """Accepts connections from here on."""
        threading.Thread(target=self._accept, daemon=True).start()

    def requests(self) -> list[list[Request]]:
        """Of each connection, so far."""
        return [decoded(bytes(each)) for each in self._sent]

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            store, sent = socket.create_connection(("127.0.0.1", self._store_port)), bytearray()
            self._sent.append(sent)
            for ends in ((client, store, sent), (store, client, bytearray())):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, log: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                log += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # a rank has ended
            return


class StoreClient:
    """A connection of a simulated rank.

    Args:
        port: the store's port on this host.
        source: own address: one has 28,000 ports.
    """

    def __init__(self, port: int, *, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120, source_address=(source, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting: list[str] = []
        self.messages = 0
        self.send(HELLO)
        self.receive()  # as torch's client, before it goes on

    def send(self, requests: Sequence[Request]) -> None:
        """Sends requests without waiting for answers."""
        self._socket.sendall(b"".join(each.encoded() for each in requests))
        self._waiting += [each.operation for each in requests if each.answered]
        self.messages += len(requests)

    def receive(self, *, until: str = "") -> int | bytes:
        """Takes the answers in order, to all requests or to the first of an operation; returns the last."""
        answer: int | bytes = 0
        while self._waiting:
            operation = self._waiting.pop(0)
            form = _ANSWERS.get(operation, "<B")
            (answer,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
            if operation in ("GET", "COMPARE_SET"):
                answer = self._bytes(int(answer))
            self.messages += 1
            if operation == until:
                break
        return answer

    def ask(self, request: Request) -> int | bytes:
        """Sends a request and takes its answer."""
        self.send([request])
        return self.receive()

    def _bytes(self, count: int) -> bytes:
        data = self._socket.recv(count, socket.MSG_WAITALL) if count else b""
        assert len(data) == count, "the store has closed the connection"
        return data
