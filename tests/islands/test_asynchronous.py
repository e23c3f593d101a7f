"""Asynchronous islands: the holder's updates, deals and returns; islands as threads over real connections."""

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

from headrace.base.errors import ConfigError
from pipeline.checkpoint.shards import NamedShard
from pipeline.config.islands_schema import IslandsSection, OuterSection
from pipeline.engines.base import Engine
from pipeline.faults.agreement import Agreement
from pipeline.faults.stop import Stop, StopSignals
from pipeline.faults.watchdog import Watchdog
from pipeline.islands.asynchronous import AsynchronousIsland
from pipeline.islands.holder import SILENT_S, Holder, Shard
from pipeline.islands.holder_server import HolderServer
from pipeline.islands.ledger import Deal, Ledger, Tail
from pipeline.islands.outer import OuterState
from pipeline.islands.peers import ExchangeError
from pipeline.islands.surroundings import Loader, Surroundings
from pipeline.islands.wire import Channel, HolderClient, WrongSecretError
from tests.islands.test_overlap import Slot, ToyIsland, Weights, exchanges, together

STEPS, TOTAL = 4, 24


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Islands:
    """Islands of one rank that call a holder directly."""

    def __init__(self, **fields: Any) -> None:
        outer = {"lr": 0.5, "momentum": 0.0}
        section = {"count": 2, "steps": STEPS, "outer": outer, "start_s": 10, **fields}
        self.clock, self.ledgers = Clock(), dict[str, dict[str, Any]]()
        self.holder = Holder(IslandsSection.model_validate(section), clock=self.clock)

    def join(self, name: str, session: str = "1") -> dict[str, Any]:
        ledger = self.ledgers.get(name, Ledger().plain())
        answer = self.holder.join(name, session, layout="x", ranks=1, total=TOTAL, ledger=ledger)
        if answer["state"] == "upload":
            self.holder.upload(name, session, 0, Shard(torch.zeros(3), torch.zeros(3)))
            return self.join(name, session)
        return self._taken(name, answer)

    def commit(self, name: str, gradient: float, session: str = "1") -> dict[str, Any]:
        self.holder.push(name, session, 0, torch.full((3,), gradient))
        first = self.ledgers[name]["deal"]["first"]
        return self._taken(name, self.holder.commit(name, session, first))

    def weight(self, name: str) -> float:
        shard = self.holder.pull(name, "1", 0)
        assert shard is not None
        return float(shard.weights[0])

    def _taken(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        if "ledger" in answer:
            self.ledgers[name] = answer["ledger"]
        return answer

    def slots(self, name: str) -> list[int]:
        ledger = Ledger.from_plain(self.ledgers[name])
        assert ledger.deal is not None
        return list(ledger.deal.slots(name))


def test_a_pseudo_gradient_counts_by_the_outer_updates_since_its_island_has_got_its_weights() -> None:
    islands = Islands()
    assert islands.join("a")["state"] == "wait"  # for the other of count
    islands.join("b")
    islands.join("a")
    assert islands.commit("b", 1.0)["committed"] == {"first": 0, "staleness": 0, "weight": 1.0}
    assert islands.commit("b", 1.0)["committed"]["staleness"] == 0
    # two updates since: lr 0.5 / 3
    assert islands.commit("a", 6.0)["committed"]["weight"] == pytest.approx(1 / 3)
    assert islands.weight("a") == pytest.approx(-0.5 - 0.5 - 0.5 * 6 / 3)


def test_one_island_alone_makes_the_nesterov_step_of_the_synchronous_mode() -> None:
    outer = {"lr": 0.7, "momentum": 0.9}
    islands = Islands(count=1, outer=outer)
    islands.join("a")
    state = {"weight/w": NamedShard((3,), start=0, values=torch.zeros(3))}
    reference = OuterState(state, OuterSection.model_validate(outer))
    for gradient in (1.0, -2.0, 0.5):
        reference.step(torch.full((3,), gradient))
        islands.commit("a", gradient)
    assert islands.weight("a") == pytest.approx(float(reference.weights[0]))


def test_islands_in_turn_with_momentum_add_up_to_the_nesterov_step_of_their_mean() -> None:
    """Two of one speed: each has missed one update of the other, counts half, and every second one has momentum."""
    outer = {"lr": 0.7, "momentum": 0.9}
    islands = Islands(outer=outer)
    islands.join("a")
    islands.join("b")
    islands.join("a")
    islands.commit("a", 0.0)
    islands.commit("b", 0.0)
    state = {"weight/w": NamedShard((3,), start=0, values=torch.zeros(3))}
    reference = OuterState(state, OuterSection.model_validate(outer))
    for first, second in ((1.0, 3.0), (2.0, -1.0)):
        islands.commit("a", first)
        islands.commit("b", second)
        reference.step(torch.full((3,), (first + second) / 2))
    assert islands.weight("b") == pytest.approx(float(reference.weights[0]))


def test_an_island_that_is_silent_loses_its_round_and_the_others_name_it() -> None:
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    lost = islands.slots("a")
    islands.clock.now += SILENT_S / 2
    assert islands.commit("b", 1.0)["lost"] == []
    islands.clock.now += SILENT_S * 0.6
    assert islands.commit("b", 1.0)["lost"] == [["a", lost[0], lost[-1] + 1]]
    assert islands.commit("a", 1.0)["state"] == "rejoin"  # it was only paused: what it has trained is dropped
    assert islands.join("a")["state"] == "take"
    assert islands.slots("a")[0] > lost[-1]


def test_lost_slots_are_named_again_where_the_answer_that_named_them_has_not_arrived() -> None:
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    lost = islands.slots("a")
    islands.holder.leave("a", "1")
    before, named = dict(islands.ledgers), [["a", lost[0], lost[-1] + 1]]
    assert islands.commit("b", 1.0)["lost"] == named
    islands.ledgers = before
    assert islands.join("b")["lost"] == named
    assert islands.commit("b", 1.0)["lost"] == []
    assert islands.join("a")["lost"] == []


def test_an_outer_update_that_takes_long_costs_no_island_its_round() -> None:
    """What islands send meanwhile waits for it."""
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    update = islands.holder._update

    def slow(*args: Any) -> None:
        update(*args)
        islands.clock.now += 3 * SILENT_S

    islands.holder._update = slow  # type: ignore[method-assign]
    assert islands.commit("b", 1.0)["islands"] == ["a", "b"]
    islands.holder.beat("b", "1")
    assert islands.commit("a", 1.0)["lost"] == []
    islands.clock.now += 2 * SILENT_S  # a message of its own says that an island lives
    assert islands.commit("a", 1.0)["lost"] == [["b", 8, 12]]


def test_a_late_comer_takes_the_newest_weights_and_the_next_slots() -> None:
    islands = Islands(count=1)
    islands.join("a")
    islands.commit("a", 1.0)
    assert islands.join("b")["state"] == "take"
    assert (islands.weight("b"), islands.slots("a"), islands.slots("b")) == (-0.5, [4, 5, 6, 7], [8, 9, 10, 11])


def test_all_wait_in_the_end_for_the_rounds_that_are_open_and_take_the_same_weights() -> None:
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    while islands.commit("b", 1.0)["state"] == "take":
        pass
    assert islands.join("b")["state"] == "wait"
    assert islands.commit("a", 1.0)["state"] == "end"
    assert islands.join("b")["state"] == "end"
    assert islands.weight("a") == islands.weight("b")


def test_a_holder_that_is_started_again_goes_on_with_the_newest_state_and_the_rounds_that_were_open() -> None:
    """Slots 0 to 3 of b are in a's weights: b, whose checkpoint is of before, may not train them again."""
    old = Islands()
    old.join("a")
    old.join("b")
    old.join("a")
    assert (old.slots("a"), old.slots("b")) == ([4, 5, 6, 7], [0, 1, 2, 3])
    before = dict(old.ledgers)
    old.commit("b", 1.0)  # b goes on with slots 8 to 11
    old.commit("a", 1.0)  # a with 12 to 15
    for of_b, state, lost in ((old.ledgers["b"], "keep", []), (before["b"], "take", [["b", 8, 12]])):
        new = Islands()
        new.ledgers = {"a": old.ledgers["a"], "b": of_b}
        new.join("a")
        answers = {"b": new.join("b"), "a": new.join("a")}
        assert (answers["a"]["state"], answers["b"]["state"]) == ("keep", "wait")
        answers["b"] = new.join("b")
        assert answers["b"]["state"] == state
        assert answers["b"].get("lost", []) == lost
        assert new.holder.version == 2
        assert new.slots("b") == ([8, 9, 10, 11] if state == "keep" else [16, 17, 18, 19])


def test_a_round_of_the_synchronous_mode_is_lost_with_a_name_for_each_of_its_islands() -> None:
    islands = Islands()
    deal, before = Deal(8, STEPS, ("a", "b"), 4), Deal(0, STEPS, ("a", "b"), 0)
    tails = (Tail("a", 3, 4), Tail("b", 7, 8))
    ledger = Ledger(1, "of rounds", deal, before, tails).plain()
    islands.ledgers = {"a": ledger, "b": ledger}
    answers = [islands.join(name) for name in ("a", "b", "a")]
    named = {tuple(each) for answer in answers for each in answer.get("lost", [])}
    assert named == {("a", 3, 4), ("b", 7, 8), ("a", 8, 12), ("b", 12, 16)}
    assert sorted(islands.slots("a") + islands.slots("b")) == list(range(16, TOTAL))


def test_a_run_with_another_layout_begins_afresh_at_a_holder_whose_islands_have_left() -> None:
    islands = Islands(count=1)
    islands.join("a")
    islands.commit("a", 1.0)
    fresh: dict[str, Any] = {"layout": "y", "ranks": 1, "total": TOTAL, "ledger": Ledger().plain()}
    assert islands.holder.join("b", "1", **fresh) == {"state": "refused", "islands": ["a"]}
    islands.holder.leave("a", "1")
    assert islands.holder.join("b", "1", **fresh)["state"] == "upload"
    islands.holder.upload("b", "1", 0, Shard(torch.full((7,), 5.0), torch.zeros(7)))
    deal = islands.holder.join("b", "1", **fresh)["ledger"]["deal"]
    assert (deal["first"], islands.weight("b")) == (0, 5.0)


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
        around = Surroundings(
            section=IslandsSection.model_validate({**self.fields, "name": name}), total=TOTAL, samples=1, layout="x",
            rank=0, engine=cast(Engine, engine), agreement=Agreement(torch.device("cpu")),
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
        slow_steps.wait(30)  # in the middle of its first round
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
