"""Every server of a run goes on serving while other programs send it what is none of its protocol."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pipeline.checkpoint.memory import memory_server
from pipeline.cluster.node_checks.links import LinkServer, measure_link
from pipeline.config.sections.groups import IslandsSection
from pipeline.config.sections.run import WatchdogSection
from pipeline.run.groups.islands.holder import Holder
from pipeline.run.groups.islands.holder_server import HolderServer
from pipeline.run.groups.islands.lighthouse import _code, authenticated
from pipeline.run.groups.islands.wire import Channel, HolderClient
from pipeline.runtime.faults.heartbeat_connection import connect, find_heartbeat_server, start_heartbeat_server
from pipeline.runtime.faults.monitor import registration
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.rendezvous import Rendezvous
from tests.support import wait_until

NESTED = b"[" * 100_000
ODD = [
    NESTED + b"\n",
    b'{"a":' * 100_000 + b"\n",
    b"9" * 5_000 + b"\n",
    b"{}\n[]\nnull\n",
    b"\xff\xfe\x00\n",
    b"\0" * 70_000,
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b'["0", "f", -1, 1e99]\n',
    b'{"rank": 1e999, "token": null, "main_thread": NaN}\n',
    b"\n" * 1000,
    b"",
]
SERVERS = ("heartbeats", "memory copies", "links", "holder", "holder without a secret")


def hostile(count: int) -> Iterator[bytes]:
    """Messages that are odd by hand, and such with bytes changed."""
    chosen = random.Random(7)
    yield from ODD
    for _ in range(count - len(ODD)):
        message = bytearray(chosen.choice(ODD)[:2000] or chosen.randbytes(50))
        for _ in range(chosen.randrange(8)):
            message[chosen.randrange(len(message))] = chosen.randrange(256)
        yield bytes(message)


@contextmanager
def serving(name: str, work: Path) -> Iterator[tuple[int, Callable[[], None]]]:
    """A server's port, and what proves that it still serves."""
    if name == "heartbeats":
        config = WatchdogSection(heartbeat_timeout=3600.0)  # a lost rank is killed, and this process is the rank
        address = start_heartbeat_server(detect({}), None, config=config, run_dir=work)
        rank = connect(address, registration(0), local=True)
        assert rank is not None

        def check_fault() -> None:
            rank[0].close()  # without signing off
            wait_until(lambda: read_faults(work), within_s=30)
            assert [row["fault"] for row in read_faults(work)] == ["died"]

        yield address.port, check_fault
    elif name == "memory copies":
        (work / "f").write_bytes(b"0123456789")
        with memory_server.served({"f": work / "f"}, master="127.0.0.1") as served:
            yield served.port, lambda: print(memory_server.Client(served).read("f", 2, 3))
    elif name == "links":
        port = LinkServer("1", 1000, threading.Lock()).start()

        def check_link() -> None:
            link = measure_link("b", ("127.0.0.1", port), attempt="1", payload=1000, free=threading.Lock())
            assert link.error == ""

        yield port, check_link
    else:
        secret = b"" if "without" in name else b"0123456789abcdef"
        server = HolderServer(Holder(IslandsSection()), "127.0.0.1:0", secret=secret, timeout_s=5)
        client = HolderClient(f"127.0.0.1:{server.port}", secret=secret, timeout_s=5)
        yield server.port, lambda: print(client.call({"do": "beat", "name": "a", "session": "1"}))
        server.shutdown()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.sweep)])
def test_a_server_survives_what_other_programs_send(
    name: str, count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(name, tmp_path) as (port, check):
        kept = []  # some are left open: each holds what a server keeps of a connection
        for message in hostile(count):
            with suppress(OSError):  # closed by the server
                other = socket.create_connection(("127.0.0.1", port), timeout=5)
                kept = [*kept[-20:], other]
                if "without" in name:  # everybody comes through the handshake
                    channel = Channel(other, secret=b"", server=False)
                    text = message[:1000] if message.count(b"[") < 1000 else NESTED
                    head = memoryview(len(text).to_bytes(4, "big") + bytes(8) + text)
                    channel._write(bytes(head) + channel._code(False, 0, "head", head))
                    channel._write(channel._code(False, 0, "body", b""))
                else:
                    other.sendall(message)
        check()
    assert "Traceback" not in capfd.readouterr().err


def test_a_report_at_the_lighthouse_that_is_nested_too_deeply_is_left_out() -> None:
    data, store = NESTED.decode(), "127.0.0.1:1"
    report = {"report": data, "code": _code(b"", "a:1", store, data)}
    found = authenticated(
        1, 1, [SimpleNamespace(replica_id="a:1", store_address=store, data=report)], secret=b"", parse=json.loads
    )
    assert (found.members, found.refused) == ((), ("a:1",))


@pytest.mark.parametrize("value", [NESTED, b"{}", b"\xff", b"[1]", b"null"])
def test_an_address_in_the_store_that_rank_0_has_not_written_is_none(value: bytes) -> None:
    store = dist.PrefixStore("run", dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False))
    store.set("watchdog", value)
    store.set("passed/ranks", b"0 \xff 2 x 99999999999999999999999 ")
    store.set("host/1", b"\xff")
    rendezvous = Rendezvous(0, 3, store, 10.0)
    assert find_heartbeat_server(rendezvous) is None
    assert rendezvous.ranks_without("passed", rendezvous.ranks) == [1]
    assert rendezvous.describe([1]).startswith("rank 1 on ")
