"""Asynchronous islands as threads over real connections to a holder."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from foundation.errors import ConfigError
from pipeline.config.schedule import Schedule
from pipeline.config.sections.groups import IslandsSection
from pipeline.engines.base import Engine
from pipeline.run.groups.islands.asynchronous import AsynchronousIsland
from pipeline.run.groups.islands.context import IslandContext, Loader
from pipeline.run.groups.islands.holder import Holder
from pipeline.run.groups.islands.holder_server import HolderServer
from pipeline.run.groups.islands.peers import ExchangeError
from pipeline.run.groups.islands.wire import Channel, HolderClient, WrongSecretError
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from tests.run.groups.islands.test_overlap import Slot, ToyIsland, Weights, exchanges, together

STEPS, TOTAL = 4, 24


def test_sides_with_different_secrets_do_not_talk_and_a_changed_message_is_refused() -> None:
    for secrets in ((b"one", b"one"), (b"one", b"two")):
        left, right = socket.socketpair()
        found: list[Any] = []

        def serve(connection: socket.socket = right, secret: bytes = secrets[1], found: list[Any] = found) -> None:
            try:
                found.append(Channel(connection, secret=secret, server=True).receive())
            except ExchangeError as error:
                found.append(error)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        if secrets[0] == secrets[1]:
            Channel(left, secret=secrets[0], server=False).send({"do": "beat"}, torch.arange(3, dtype=torch.uint8))
            thread.join()
            assert (found[0][0], found[0][1].tolist()) == ({"do": "beat"}, [0, 1, 2])
        else:
            with pytest.raises(WrongSecretError):
                Channel(left, secret=secrets[0], server=False)
            thread.join()
            assert isinstance(found[0], WrongSecretError)
        left.close()
        right.close()


class Site:
    """A holder that is served, and islands that connect."""

    def __init__(self, stack: ExitStack, **fields: Any) -> None:
        outer = {"lr": 0.5, "momentum": 0.0}
        self.fields = {"count": 2, "steps": STEPS, "mode": "asynchronous", "outer": outer, "timeout_s": 5, **fields}
        self.stack, self.secret = stack, b"0123456789abcdef"
        self.serve(0)

    def serve(self, port: int) -> None:
        section = IslandsSection.model_validate(self.fields)
        self.server = HolderServer(Holder(section), f"127.0.0.1:{port}", secret=self.secret, timeout_s=5)
        self.stack.callback(self.server.shutdown)

    def island(self, name: str, *, secret: bytes | None = None) -> ToyIsland:
        engine, rows = Weights(), list[dict[str, Any]]()
        around = IslandContext(
            section=IslandsSection.model_validate({**self.fields, "name": name}), total=TOTAL,
            schedule=Schedule("constant", 1.0), samples=1, layout="x", rank=0,
            engine=cast(Engine, engine), agreement=Agreement(torch.device("cpu")),
            signals=StopSignals(announce=False), watchdog=Watchdog(),
            record=lambda step, **values: rows.append({"step": step, **values}), say=lambda _line: None,
        )  # fmt: skip
        address, secret = f"127.0.0.1:{self.server.port}", secret or self.secret
        loader = cast(Loader, lambda first, last: [Slot(0, slot - 1) for slot in range(first, last + 1)])
        island = AsynchronousIsland(
            around, connect=lambda: HolderClient(address, secret=secret, timeout_s=5), loader=loader, step=0
        )
        self.stack.callback(island.close)
        return ToyIsland(island, engine, rows)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def trained(*toys: ToyIsland) -> list[int]:
    rows = [row for toy in toys for row in exchanges(toy)]
    return sorted(s for row in rows for first, last in row["trained"].values() for s in range(first, last + 1))


@pytest.mark.parametrize("compress", ["none", "int8"])
def test_a_slow_island_is_not_waited_for_and_each_sample_is_trained_once(stack: ExitStack, compress: str) -> None:
    site = Site(stack, compress=compress)
    fast, slow = site.island("a"), site.island("b")
    together(fast.island.start, slow.island.start)
    slow_steps = threading.Event()

    def crawl() -> None:
        slow.train(1.0, until=slow.island.step + 1)
        slow_steps.wait(120)  # in the middle of its first round
        slow.train(1.0)

    def run() -> None:
        fast.train(1.0, until=TOTAL - 2 * STEPS)
        slow_steps.set()
        fast.train(1.0)

    together(crawl, run)
    assert trained(fast, slow) == list(range(TOTAL)) == sorted(fast.slots + slow.slots)
    assert exchanges(slow)[0]["staleness"] >= 2
    assert fast.engine.values.tolist() == slow.engine.values.tolist()
    assert fast.island.step == slow.island.step == TOTAL


def test_an_island_dies_and_another_comes_and_what_is_lost_is_named(stack: ExitStack) -> None:
    site = Site(stack)
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)
    second.train(1.0, until=second.island.step + 1)
    second.island.close()  # as its process ends, with a round that it does not finish
    third = site.island("c")
    assert third.island.start() is Stop.NO
    together(lambda: first.train(1.0), lambda: third.train(1.0))
    lost = {name: ends for row in first.rows + third.rows for name, ends in row.get("lost", {}).items()}
    assert list(lost) == ["b"]
    assert sorted([*trained(first, third), *range(lost["b"][0], lost["b"][1] + 1)]) == list(range(TOTAL))
    assert first.engine.values.tolist() == third.engine.values.tolist()


def test_a_holder_that_dies_is_started_again_and_the_islands_go_on(stack: ExitStack) -> None:
    site = Site(stack)
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)
    together(
        lambda: first.train(1.0, until=first.island.step + STEPS), lambda: second.train(1.0, second.island.step + STEPS)
    )
    port = site.server.port
    site.server.shutdown()
    site.serve(port)
    together(lambda: first.train(1.0), lambda: second.train(1.0))
    assert any(row["event"] == "exchange_failed" for row in first.rows)
    assert trained(first, second) == list(range(TOTAL))
    assert first.engine.values.tolist() == second.engine.values.tolist()


@pytest.mark.parametrize("until", [STEPS, TOTAL - STEPS, TOTAL - 1])
def test_a_checkpoint_at_the_end_of_a_round_goes_on_with_the_round_that_was_dealt_there(
    stack: ExitStack, tmp_path: Path, until: int
) -> None:
    """All are killed, the holder too: what the island has trained and what was dealt to it is in the checkpoint."""
    site = Site(stack, count=1)
    first = site.island("a")
    first.island.start()
    first.train(1.0, until=until)
    if until == TOTAL - 1:  # stopped after the run's last step, before its exchange
        first.island.step, first.engine.values = TOTAL, first.engine.values + 1
    details = first.save(tmp_path / "saved")
    first.island.close()
    site.server.shutdown()
    site.serve(0)
    again = site.island("a")
    again.load(tmp_path / "saved", details)
    assert again.island.start() is Stop.NO
    assert again.island.step == first.island.step
    again.train(1.0)
    assert trained(first, again) == list(range(TOTAL))
    assert again.slots == list(range(first.island.step, TOTAL))


class Exhausted:
    """A listener in a process that is out of file descriptors for a moment."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self.listener, self.times = listener, times

    def accept(self) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.EMFILE, "too many open files")
        return self.listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.listener, name)


def test_a_holder_that_could_not_accept_a_connection_accepts_later_ones(stack: ExitStack) -> None:
    site = Site(stack)
    exhausted = Exhausted(site.server._listener, 2)
    site.server._listener = cast(socket.socket, exhausted)
    for _ in range(2):  # the first one by the accept that is under way
        client = HolderClient(f"127.0.0.1:{site.server.port}", secret=site.secret, timeout_s=5)
        stack.callback(client.close)
        assert client.call({"do": "beat", "name": "a", "session": "1"})[0] == {"state": "taken"}
    assert exhausted.times < 0


def test_a_connection_that_stops_in_the_middle_of_a_message_is_closed(stack: ExitStack) -> None:
    server = HolderServer(Holder(IslandsSection()), "127.0.0.1:0", secret=b"", timeout_s=0.3)
    stack.callback(server.shutdown)
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    Channel(connection, secret=b"", server=False)
    connection.sendall(b"half")
    assert connection.recv(1) == b""


def test_how_many_bytes_follow_is_not_believed_without_the_secret() -> None:
    left, right = socket.socketpair()
    found: list[Channel] = []
    thread = threading.Thread(target=lambda: found.append(Channel(right, secret=b"one", server=True)))
    thread.start()
    Channel(left, secret=b"one", server=False)
    thread.join()
    left.sendall(struct.pack("!IQ", 2, 1 << 39) + b"{}" + bytes(32))
    with pytest.raises(WrongSecretError):
        found[0].receive()
    left.close()
    right.close()


def test_an_island_with_another_secret_is_refused(stack: ExitStack) -> None:
    site = Site(stack)
    with pytest.raises(ConfigError, match="secret_file"):
        site.island("a", secret=b"another secret...").island.start()
