"""The heartbeat server as a process: connections of other programs, ranks that sign off and ranks that do not."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.heartbeat_connection import connect, start_heartbeat_server
from pipeline.runtime.faults.heartbeat_messages import MessageDecoder, encode
from pipeline.runtime.faults.monitor import Monitor, RankPosition, ServerAddress, registration
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.launch import detect


@pytest.fixture
def address(tmp_path: Path) -> ServerAddress:
    return start_heartbeat_server(detect({}), None, config=WatchdogSection(heartbeat_timeout=30.0), run_dir=tmp_path)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection within 10 s; data before that is ignored."""
    connection.settimeout(10.0)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset
        pass
    return True


def has_exited(address: ServerAddress) -> bool:
    """Whether the server stops listening within 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", address.port), timeout=1).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_connection_without_the_token_does_not_disturb_the_run(address: ServerAddress, tmp_path: Path) -> None:
    found = connect(address, registration(0), local=True)
    for data in (b"GET / HTTP/1.0\r\n\r\n", encode({**registration(0), "token": "guessed"}), encode({"error": "no"})):
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
