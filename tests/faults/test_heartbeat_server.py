"""The hub itself, as a process, with connections that are not what it expects."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from pipeline.config.schema import WatchdogSection
from pipeline.faults.heartbeat_messages import Lines, line
from pipeline.faults.monitor import Address, Monitor, RankPosition, hello
from pipeline.faults.rendezvous import connect, start_heartbeat_server
from pipeline.faults.report import read_faults
from pipeline.launch import detect


@pytest.fixture
def address(tmp_path: Path) -> Address:
    """Of a hub for one rank."""
    return start_heartbeat_server(detect({}), None, config=WatchdogSection(heartbeat_timeout=30.0), run_dir=tmp_path)


def closes(connection: socket.socket) -> bool:
    """Whether the other end closes within 10 s; what it sends before is passed over."""
    connection.settimeout(10.0)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset
        pass
    return True


def refuses(address: Address) -> bool:
    """Whether nobody listens any more, within 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", address.port), timeout=1).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_stranger_is_sent_away_and_ends_nothing(address: Address, tmp_path: Path) -> None:
    found = connect(address, hello(0), local=True)
    assert found is not None
    for said in (b"GET / HTTP/1.0\r\n\r\n", line({**hello(0), "token": "guessed"}), line({"failed": "no"})):
        stranger = socket.create_connection(("127.0.0.1", address.port))
        stranger.sendall(said)
        assert closes(stranger)
    found[0].sendall(line({"left": True}))
    found[0].close()
    assert refuses(address)
    assert read_faults(tmp_path) == []


def test_a_stranger_that_stays_does_not_keep_the_hub(address: Address) -> None:
    with socket.create_connection(("127.0.0.1", address.port)) as stranger:
        found = connect(address, hello(0), local=True)
        assert found is not None
        found[0].sendall(line({"left": True}))
        found[0].close()
        assert closes(stranger)


@pytest.mark.parametrize("seconds", [0.3, 2.5], ids=["while it leaves", "after that"])
def test_a_rank_that_leaves_before_it_has_found_the_hub_is_not_dead(
    address: Address, tmp_path: Path, seconds: float
) -> None:
    def find() -> tuple[socket.socket, Lines] | None:
        found = connect(address, hello(0), local=True)
        time.sleep(seconds)
        return found

    monitor = Monitor(0, place=RankPosition, find=find, lost=lambda _seconds: None, beat_s=1.0, silent_s=30.0)
    monitor.start()
    monitor.close()
    assert refuses(address)
    assert read_faults(tmp_path) == []


def test_a_rank_that_closes_without_goodbye_is_written_down(address: Address, tmp_path: Path) -> None:
    found = connect(address, hello(0), local=True)
    assert found is not None
    found[0].close()
    assert refuses(address)
    assert [row["fault"] for row in read_faults(tmp_path)] == ["died"]
