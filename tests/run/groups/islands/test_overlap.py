"""Islands as threads with torchft's lighthouse and process groups: exchanges beside the inner steps of a toy."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from foundation.errors import TrainingError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.schedule import Schedule
from pipeline.config.sections.groups import IslandsSection
from pipeline.engines.base import Engine
from pipeline.run.groups.islands.context import IslandContext, Loader
from pipeline.run.groups.islands.island import Island
from pipeline.run.groups.islands.ledger import Ledger, Member
from pipeline.run.groups.islands.lighthouse import LighthouseMember
from pipeline.run.groups.islands.local import LocalIsland
from pipeline.run.groups.islands.peers import Peers, PeerStore
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.faults.watchdog import Watchdog

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (the extra islands)")

STEPS, OVERLAP, TOTAL = 4, 2, 12


@dataclass
class Weights:
    values: Tensor = field(default_factory=lambda: torch.zeros(5))

    @contextmanager
    def edit_state(self) -> Iterator[dict[str, Any]]:
        yield self.state()

    def state(self) -> dict[str, Any]:
        return {"weight/w": NamedShard((5,), start=0, values=self.values)}


@dataclass(frozen=True)
class Slot:
    step: int
    slot: int


@dataclass
class ToyIsland:
    """An island that adds a constant of its own in every step."""

    island: LocalIsland
    engine: Weights
    rows: list[dict[str, Any]]
    slots: list[int] = field(default_factory=list)

    def save(self, directory: Path) -> dict[str, Any]:
        directory.mkdir()
        named_state.write(self.island.state(), directory)
        details: dict[str, Any] = json.loads(json.dumps(self.island.details()["island"]))
        return details

    def load(self, directory: Path, details: dict[str, Any]) -> None:
        named_state.read(self.engine.state(), directory)
        self.island.load(directory, details, samples=0)

    def train(self, change: float, until: int | None = None) -> None:
        for batch in cast("Iterator[Slot]", self.island.batches()):
            self.slots.append(batch.slot)
            self.engine.values += change
            if self.island.due(batch.step):
                assert self.island.exchange(batch.step) is Stop.NO
            if batch.step == until:
                return


class Site:
    """A lighthouse and what is closed in the end."""

    def __init__(self, stack: ExitStack) -> None:
        from torchft.coordination import LighthouseServer  # noqa: PLC0415

        self.stack = stack
        self._server = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1500
        )
        stack.callback(self._server.shutdown)
        self.address = self._server.address().removeprefix("http://").replace("localhost", "127.0.0.1")
        self.address = f"127.0.0.1:{self.address.rpartition(':')[2]}"

    def member(self, name: str) -> LighthouseMember[Member]:
        store = PeerStore("127.0.0.1")
        self.stack.callback(lambda: store)
        return LighthouseMember(self.address, name, store=store.address, secret=b"", parse=Member.from_plain)

    def island(self, name: str, *, count: int = 2, **fields: Any) -> ToyIsland:
        engine, rows = Weights(), list[dict[str, Any]]()
        outer = {"lr": 0.5, "momentum": 0.0}
        section = IslandsSection.model_validate(
            {"name": name, "count": count, "steps": STEPS, "overlap": OVERLAP, "outer": outer, "timeout_s": 5, **fields}
        )
        around = IslandContext(
            section=section, total=TOTAL, schedule=Schedule("constant", 1.0), samples=1, layout="x",
            rank=0, engine=cast(Engine, engine),
            agreement=Agreement(torch.device("cpu")), signals=StopSignals(announce=False), watchdog=Watchdog(),
            record=lambda step, **values: rows.append({"step": step, **values}), say=lambda _line: None,
        )  # fmt: skip
        peers = Peers(bind="127.0.0.1", timeout_s=5, secret=b"")
        loader = cast(Loader, lambda first, last: [Slot(0, slot - 1) for slot in range(first, last + 1)])
        island = Island(around, peers=peers, lighthouse=self.member(name), loader=loader, step=0)
        self.stack.callback(island.close)
        return ToyIsland(island, engine, rows)


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def together(*work: Callable[[], object]) -> None:
    """Runs all in threads; raises what one of them has raised."""
    errors: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def exchanges(toy: ToyIsland) -> list[dict[str, Any]]:
    return [row for row in toy.rows if row["event"] == "exchange"]


def accounted(rows: list[dict[str, Any]]) -> list[int]:
    """Every slot that was trained or lost, from a journal whose samples are slots."""
    keys = ("trained", "lost", "tail_trained", "tail_lost")
    ranges = [ends for row in rows for key in keys for ends in row.get(key, {}).values()]
    return sorted(slot for first, last in ranges for slot in range(first, last + 1))


def test_the_outer_update_of_a_snapshot_is_applied_later_and_what_was_trained_since_is_kept(site: Site) -> None:
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)
    together(lambda: first.train(1.0, until=STEPS), lambda: second.train(3.0, until=STEPS))
    # snapshots after 2 steps, 2 and 6: the mean is 4; outer lr 0.5: 2, and 2 steps of progress each
    assert (first.engine.values.tolist(), second.engine.values.tolist()) == ([2.0 + 2] * 5, [2.0 + 6] * 5)
    together(lambda: first.train(1.0, until=STEPS + 2), lambda: second.train(3.0, until=STEPS + 2))
    together(lambda: first.train(1.0), lambda: second.train(3.0))
    # the second exchange: (4 + 2, 8 + 6) - 2 have the mean 8: outer 2 + 4 = 6; the last one waits: progress 2 + 4
    # steps each, the mean 12: 6 + 6 = 12
    assert first.engine.values.tolist() == second.engine.values.tolist() == [12.0] * 5
    rows = exchanges(first)
    assert ["overlapped_seconds" in row for row in rows] == [True, True, False]
    assert accounted(rows) == list(range(2 * TOTAL)) == sorted(first.slots + second.slots)


def test_a_peer_that_dies_in_the_background_is_left_out_and_its_samples_are_named(site: Site) -> None:
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)

    def ask_and_die() -> None:
        second.train(3.0, until=1)
        ledger = second.island.ledger
        dead = site.member("b")  # the same island for the others: the later one counts
        second.island.close()
        asked = dead.ask(Member("b", ledger, STEPS - OVERLAP, living=True, waited=False, layout="x"))
        asked.result(30)
        dead.close()

    together(lambda: first.train(1.0), ask_and_die)
    assert [row["event"] for row in first.rows].count("exchange_failed") >= 1
    rows = exchanges(first)
    assert [list(row["trained"]) for row in rows] == [["a"]] * 3
    assert rows[0]["lost"] == {"b": [4, 7]}
    assert accounted(rows) == list(range(TOTAL + STEPS))


def test_a_stop_does_not_wait_for_other_islands_and_the_exchange_is_made_up_for(site: Site) -> None:
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)
    first.train(1.0, until=STEPS - OVERLAP + 1)  # its exchange waits for the other island
    before = first.island.ledger
    assert first.island.settle(STEPS - OVERLAP + 1, Stop.TERMINATE) is Stop.TERMINATE
    assert first.island.ledger == before
    assert first.engine.values.tolist() == [3.0] * 5
    # an island that goes on from there has a pseudo-gradient of three steps, and one step in its tail
    member = Member("a", Ledger.from_plain(first.island.ledger.plain()), 3, living=False, waited=False, layout="x")
    assert member.trained


def test_an_island_stopped_between_the_last_step_and_its_exchange_makes_it_later(site: Site, tmp_path: Path) -> None:
    first = site.island("a", count=1, overlap=0)
    first.island.start()
    first.train(1.0, until=TOTAL - 1)
    details = {**first.save(tmp_path / "saved"), "step": TOTAL}  # of the last step, had it been saved there
    first.island.close()
    again = site.island("a", count=1, overlap=0)
    again.load(tmp_path / "saved", details)
    again.island.start()
    again.train(1.0)
    assert (again.slots, [row["trained"] for row in exchanges(again)]) == ([], [{"a": [TOTAL - STEPS, TOTAL - 1]}])


def asked_to_stop(toy: ToyIsland, *, after_s: float) -> None:
    def ask() -> None:
        toy.island._context.signals.requested = Stop.TERMINATE

    timer = threading.Timer(after_s, ask)
    timer.daemon = True
    timer.start()


def test_an_island_that_waits_for_others_to_begin_is_stopped_by_a_signal(site: Site) -> None:
    """Its lighthouse answers at once: with it alone."""
    alone = site.island("a", count=2, start_s=300)
    asked_to_stop(alone, after_s=0.5)
    assert alone.island.start() is Stop.TERMINATE


def test_an_island_that_waits_for_the_state_of_one_in_its_tail_is_stopped_by_a_signal(site: Site) -> None:
    first = site.island("a", count=1)
    first.island.start()
    late, stops = site.island("b", count=1), list[Stop]()
    waits = threading.Thread(target=lambda: stops.append(late.island.start()))
    waits.start()
    time.sleep(1)  # it has asked
    first.train(1.0, until=STEPS - OVERLAP)
    asked_to_stop(late, after_s=2)  # it is in the exchange by then, whose source does not go on
    waits.join(120)
    assert stops == [Stop.TERMINATE]
    assert late.island.ledger == Ledger()
    late.island.close()
    first.train(1.0, until=STEPS)
    assert exchanges(first)[0]["trained"] == {"a": [0, STEPS - OVERLAP - 1]}


def test_a_failed_exchange_of_another_rank_ends_the_run_of_this(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank will not take its part: what runs here would wait for it."""
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)
    first.train(1.0, until=STEPS - OVERLAP)  # its exchange waits for the other island

    def with_another_rank(_agreement: Agreement, *values: int) -> list[int]:
        return [max(pair) for pair in zip(values, (0, 1), strict=True)]

    monkeypatch.setattr(Agreement, "max_over_ranks", with_another_rank)
    with pytest.raises(TrainingError, match="another rank"):
        first.island.settle(STEPS - OVERLAP, Stop.NO)


def test_a_checkpoint_beside_an_exchange_waits_for_it_and_has_no_part_of_it(site: Site) -> None:
    first, second = site.island("a"), site.island("b")
    together(first.island.start, second.island.start)

    def train(toy: ToyIsland, change: float) -> None:
        toy.train(change, until=STEPS - OVERLAP + 1)
        assert toy.island.settle(STEPS - OVERLAP + 1, Stop.NO) is Stop.NO
        assert toy.engine.values.tolist() == [2.0 + change] * 5
        details = toy.island.ledger.plain()
        again = Ledger.from_plain(details)
        assert again == toy.island.ledger
        deal = again.deal_of(toy.island.name, STEPS - OVERLAP + 1)
        # what is left of the first round comes before the next one
        assert (deal.first, deal.step) == (0, 0)

    together(lambda: train(first, 1.0), lambda: train(second, 3.0))
    together(lambda: first.train(1.0), lambda: second.train(3.0))
    assert accounted(exchanges(first)) == list(range(2 * TOTAL))


def test_an_island_that_leaves_while_it_waits_for_a_quorum_ends_at_once(site: Site) -> None:
    """The lighthouse waits for the other one, which lives and asks for none; it never answers one that has left."""
    other = site.member("b")
    code = """
import sys
from foundation.cli import leave
from pipeline.run.groups.islands.ledger import Ledger, Member
from pipeline.run.groups.islands.lighthouse import LighthouseMember
member = LighthouseMember(sys.argv[1], "a", store="127.0.0.1:1", secret=b"", parse=Member.from_plain)
asked = member.ask(Member("a", Ledger(), 0, living=False, waited=False, layout="x"))
try:
    asked.result(2)
except TimeoutError:
    member.close()
    print("left")
    leave(0)  # as a run does: the interpreter's end has aborted in a thread of torchft's ("exception not rethrown")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, site.address], capture_output=True, text=True, timeout=300, check=False
    )
    other.close()
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
