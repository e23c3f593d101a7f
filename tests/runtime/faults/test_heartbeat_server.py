"""The heartbeat server as a process: connections of other programs, ranks that sign off and ranks that do not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import EXIT_LOST
from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.diagnosis import Diagnosis, RankStatus
from pipeline.runtime.faults.heartbeat_connection import connect, start_heartbeat_server
from pipeline.runtime.faults.heartbeat_messages import MessageDecoder, encode, greeting
from pipeline.runtime.faults.heartbeat_server import HeartbeatServer, ServerConfig, _Connection
from pipeline.runtime.faults.monitor import Monitor, RankPosition, ServerAddress, registration
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.launch import detect
from tests.conftest import ROOT


@pytest.fixture
def address(tmp_path: Path) -> ServerAddress:
    return start_heartbeat_server(detect({}), None, config=WatchdogSection(heartbeat_timeout=30.0), run_dir=tmp_path)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection within a minute; data before that is ignored."""
    connection.settimeout(60.0)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset
        pass
    return True


def has_exited(address: ServerAddress) -> bool:
    """Whether the server stops listening within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", address.port), timeout=1).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_connection_without_the_token_does_not_disturb_the_run(address: ServerAddress, tmp_path: Path) -> None:
    found = connect(address, registration(0), local=True)
    wrong = (encode(registration(0)), greeting("0" * 16) + encode(registration(0)), encode({"error": "no"}))
    for data in (b"GET / HTTP/1.0\r\n\r\n", *wrong, b"[" * 100_000 + b"\n"):
        other = socket.create_connection(("127.0.0.1", address.port))
        other.sendall(data)
        assert is_closed(other)
    found[0].sendall(encode({"finished": True}))
    found[0].close()
    assert has_exited(address)
    assert read_faults(tmp_path) == []


def test_an_open_connection_of_another_program_does_not_keep_the_server_running(address: ServerAddress) -> None:
    with socket.create_connection(("127.0.0.1", address.port)) as other:
        found = connect(address, registration(0), local=True)
        found[0].sendall(encode({"finished": True}))
        found[0].close()
        assert is_closed(other)


@pytest.mark.parametrize("seconds", [0.3, 2.5], ids=["while it exits", "after that"])
def test_a_rank_that_exits_unconnected_is_not_dead(address: ServerAddress, tmp_path: Path, seconds: float) -> None:
    def connect_late() -> tuple[socket.socket, MessageDecoder] | None:
        found = connect(address, registration(0), local=True)
        time.sleep(seconds)
        return found

    monitor = Monitor(
        0,
        position=RankPosition,
        connect=connect_late,
        on_server_lost=lambda _seconds: None,
        interval_s=1.0,
        timeout_s=30.0,
    )
    monitor.start()
    monitor.close()
    assert has_exited(address)
    assert read_faults(tmp_path) == []


def test_a_rank_that_disconnects_without_signing_off_has_died(address: ServerAddress, tmp_path: Path) -> None:
    found = connect(address, registration(0), local=True)
    found[0].close()
    assert has_exited(address)
    assert [row["fault"] for row in read_faults(tmp_path)] == ["died"]


def test_a_diagnosis_larger_than_a_sockets_buffer_reaches_every_rank_with_the_processes_of_its_own_host() -> None:
    config = ServerConfig("token", 8192, "run", silent_s=30.0, stuck_s=600.0, interval_s=1.0)
    server = HeartbeatServer(socket.create_server(("127.0.0.1", 0)), config)
    ends = {rank: socket.socketpair() for rank in range(3)}
    for rank, (own, theirs) in ends.items():
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        own.setblocking(False)
        status = RankStatus(rank, f"host{rank}", 1, 0.0, 0.0, machine=f"machine{rank}")
        server._connections[own] = _Connection(status=status)
        if rank == 2:
            theirs.close()  # a rank that has gone holds up nobody
    received: dict[int, dict[str, Any]] = {}

    def read(rank: int) -> None:
        decoder, connection = MessageDecoder(), ends[rank][1]
        while not (found := list(decoder.feed(connection.recv(4096)))):
            time.sleep(0.001)
        received[rank] = found[0]["diagnosis"]

    readers = [threading.Thread(target=read, args=(rank,)) for rank in (0, 1)]
    for reader in readers:
        reader.start()
    ranks = tuple(range(3, 8192))
    kill = [(f"machine{rank % 1024}", rank, 1) for rank in ranks]
    server._send_diagnosis(Diagnosis("silent", ranks, 31.0), kill)
    for reader in readers:
        reader.join(60.0)
    assert {rank: found["ranks"] for rank, found in received.items()} == {0: list(ranks), 1: list(ranks)}
    assert [process[1] for process in received[1]["kill"]] == [rank for rank in ranks if rank % 1024 == 1]


def test_a_diagnosis_that_was_cut_off_ends_the_rank() -> None:
    code = """
import socket, threading
from pipeline.runtime.faults.heartbeat_messages import MessageDecoder, encode
from pipeline.runtime.faults.heartbeat_server import HeartbeatServer, ServerConfig, _Connection
from pipeline.runtime.faults.monitor import Monitor, RankPosition
server, own = socket.socketpair()
monitor = Monitor(1, position=RankPosition, connect=lambda: (own, MessageDecoder()), on_server_lost=print,
                  interval_s=1.0, timeout_s=30.0)
monitor.start()
monitor.connected.wait()
server.sendall(encode({"diagnosis": {"kind": "silent", "ranks": [0], "kill": []}})[:-9])
server.close()
monitor.join()
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300, check=False)
    assert ended.returncode == EXIT_LOST


OWN_NAME = """
import socket, subprocess
from types import SimpleNamespace
from pathlib import Path
from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.heartbeat_connection import connect, start_heartbeat_server
from pipeline.runtime.faults.monitor import registration
from pipeline.runtime.launch import Launch
subprocess.run("ip link set lo up; ip address add 10.77.0.1/24 dev lo", shell=True, check=True)
subprocess.run("mount --bind hosts /etc/hosts; hostname node01", shell=True, check=True)
store = socket.create_server(("", 0))
port = store.getsockname()[1]
kept = [socket.create_connection((peer, port)) for peer in ("node01", "10.77.0.1")]
launch = Launch("environment", 0, 2, 0, f"node01:{port}")
rendezvous = SimpleNamespace(store=SimpleNamespace(set=print))
address = start_heartbeat_server(launch, rendezvous, config=WatchdogSection(), run_dir=Path("."))
for rank, local in ((0, True), (1, False)):
    found = connect(address, registration(rank), local=local)
    assert found[0].getpeername() == ("10.77.0.1", address.port)
    kept.append(found[0])
    found[0].sendall(b'{"finished":true}\\n')
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_ranks_of_a_host_whose_own_name_is_its_loopback_reach_the_server_on_the_network(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node01\n")
    command = ["unshare", "--net", "--uts", "--mount", sys.executable, "-c", OWN_NAME]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
