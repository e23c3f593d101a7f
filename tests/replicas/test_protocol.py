"""Replicas as threads, with a real lighthouse and real process groups, and a model of six weights: what may go wrong
in a step leaves every update as one process would have made it, and all replicas with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.base.errors import ConfigError, HeadraceError
from pipeline.config.replicas_schema import ReplicasSection
from pipeline.data.loader import StepBatch
from pipeline.data.skips import NO_SKIPS, Skip, Skips
from pipeline.faults.agreement import Agreement
from pipeline.faults.stop import StopSignals
from pipeline.islands.lighthouse import LighthouseMember
from pipeline.islands.peers import ExchangeError, Peers, PeerStore
from pipeline.launch.group import free_port
from pipeline.replicas.deal import Member, Ranges
from pipeline.replicas.quorums import Quorums
from pipeline.replicas.record import ReplicaRecord
from pipeline.replicas.replica import ReplicaOfRun, Surroundings

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (the extra islands)")

SAMPLES, STEPS = 8, 6
Sample = tuple[int, int]
"""Step, and index in it."""


class Died(Exception):  # noqa: N818
    """Raised in the thread of a replica that is to die."""


@dataclass
class Toy:
    """A linear model: the gradient of a sample depends on the weights."""

    weights: Tensor = field(default_factory=lambda: torch.ones(6))

    def gradient(self, sample: Sample) -> Tensor:
        random = torch.Generator().manual_seed(1000 * sample[0] + sample[1])
        return torch.randn(6, generator=random) + 0.1 * self.weights

    @contextmanager
    def edit_state(self) -> Iterator[dict[str, Tensor]]:
        yield {"weight/x": self.weights}

    def update(self, gradient: Tensor) -> Tensor:
        self.weights -= 0.1 * gradient / SAMPLES
        return self.weights.clone()


class Loader:
    def __init__(self, ranges: Ranges, steps: tuple[int, int], skips: Skips) -> None:
        self.ranges, self.steps, self.skips = ranges, steps, skips

    def __iter__(self) -> Iterator[StepBatch]:
        return (self.gather(step) for step in range(self.steps[0], self.steps[1] + 1))

    def gather(self, step: int) -> StepBatch:
        samples: Any = [(self.skips.data_step(step), n) for first, end in self.ranges for n in range(first, end)]
        return StepBatch(step, samples, SAMPLES)


@dataclass
class Thread:
    """A replica that trains in a thread.

    Attributes:
        before: called with the step before gradients are exchanged; may raise Died.
        executions: of every step.
        count: replicas that are waited for.
        resumed: step and weights of its checkpoint.
        skips: data that it leaves out.
        updates: step -> weights after it.
        events: of its journal.
    """

    name: str
    address: str
    before: Callable[[int], None] = lambda _step: None
    executions: int = 1
    count: int = 2
    resumed: tuple[int, Tensor] = (0, torch.ones(6))
    skips: Skips = NO_SKIPS
    updates: dict[int, Tensor] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None

    def start(self) -> Thread:
        self.model, self.store = Toy(self.resumed[1].clone()), PeerStore("127.0.0.1")
        self.peers = Peers(bind="127.0.0.1", timeout_s=20, secret=b"")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def join(self) -> Thread:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self

    def _replica(self) -> ReplicaOfRun:
        watchdog: Any = SimpleNamespace(enter_phase=lambda *_: None, report_progress=lambda: None)
        stepper: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda _state: None, skips=self.skips)
        engine: Any = self.model
        load: Any = lambda ranges, steps: Loader(ranges, steps, stepper.skips)  # noqa: E731
        member = LighthouseMember(
            self.address, self.name, store=self.store.address, secret=b"", parse=Member.from_plain
        )
        around = Surroundings(
            section=ReplicasSection(name=self.name, count=self.count, start_s=100),
            total=STEPS,
            samples=SAMPLES,
            rank=0,
            engine=engine,
            stepper=stepper,
            load=load,
            quorums=Quorums(Agreement(torch.device("cpu")), StopSignals(announce=False), watchdog, member),
            record=ReplicaRecord(lambda step, **row: self.events.append({"step": step, **row}), lambda _line: None),
        )
        me = Member(self.name, self.resumed[0], 0, "", "", (), True, "", living=False, waited=False, layout="x")
        return ReplicaOfRun(around, peers=self.peers, member=me)

    def _run(self) -> None:
        replica = self._replica()
        try:
            replica.start()
            for batch in replica.batches():
                self.updates[batch.step] = self._step(replica, batch)
                if replica.due(batch.step):
                    replica.exchange(batch.step)
        except (Died, HeadraceError) as error:
            self.error = error
        finally:
            replica.close()

    def _step(self, replica: ReplicaOfRun, batch: StepBatch) -> Tensor:
        for _ in range(self.executions):
            gradients, sums, samples = [torch.zeros(6)], torch.zeros(1), self._samples(batch.micro_batches)
            while samples:
                for sample in samples:
                    gradients[0] += self.model.gradient(sample)
                    sums += 1
                samples = []
                self.before(batch.step)
                samples = self._samples(replica.sum_gradients(batch, gradients, sums))
            assert float(sums) == SAMPLES  # every sample once
        return self.model.update(gradients[0])

    def _samples(self, given: Sequence[Any]) -> list[Sample]:
        return list(given)


@pytest.fixture
def address() -> Iterator[str]:
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    found = f"127.0.0.1:{free_port()}"
    server = LighthouseServer(bind=found, min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=2500)
    yield found
    server.shutdown()


def one_process(skips: Skips = NO_SKIPS) -> dict[int, Tensor]:
    model, updates = Toy(), {}
    for step in range(1, STEPS + 1):
        updates[step] = model.update(
            torch.stack([model.gradient((skips.data_step(step), n)) for n in range(SAMPLES)]).sum(0)
        )
    return updates


def assert_undisturbed(*replicas: Thread) -> None:
    """Every update that a replica has made is that of one process, and the same bits on all."""
    expected = one_process()
    assert list(replicas[0].updates) == list(expected)
    for step, weights in replicas[0].updates.items():
        torch.testing.assert_close(weights, expected[step], rtol=1e-5, atol=1e-6)  # fp32 sums in another order
    for other in replicas[1:]:
        assert all(torch.equal(weights, replicas[0].updates[step]) for step, weights in other.updates.items())


def at(step: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Does something once in a step."""
    left = [step]

    def before(now: int) -> None:
        if left == [now]:
            left.clear()
            action()

    return before


def die() -> None:
    raise Died


def test_a_replica_that_misses_an_exchange_makes_the_same_update_in_the_same_step(address: str) -> None:
    a, b = Thread("a", address), Thread("b", address)

    def lose_the_answer() -> None:
        whole = b.peers.all_gather

        def all_gather(values: Tensor) -> list[Tensor]:
            found = whole(values)
            if values.dtype == torch.float64:  # the last message of an exchange: a has all, b fails
                b.peers.all_gather = whole  # type: ignore[method-assign]
                raise ExchangeError("lost")
            return found

        b.peers.all_gather = all_gather  # type: ignore[method-assign]

    b.before = at(3, lose_the_answer)
    a.start(), b.start()
    a.join(), b.join()
    assert_undisturbed(a, b)
    assert list(b.updates) == list(range(1, STEPS + 1))
    assert [row["step"] for row in b.events if row["event"] == "exchange_failed"] == [3]


def test_of_three_replicas_one_dies_in_a_step_and_another_one_joins(address: str) -> None:
    dead = threading.Event()
    late = Thread("d", address)

    def wait_for_the_late_comer() -> None:
        dead.wait(60)
        late.start()
        threading.Event().wait(1)  # until it has asked

    a = Thread("a", address, at(4, wait_for_the_late_comer), count=3)
    b, c = Thread("b", address, count=3), Thread("c", address, at(3, die), count=3)
    for each in (a, b, c):
        each.start()
    c.join()
    dead.set()
    for each in (a, b, late):
        each.join()
    assert isinstance(c.error, Died)
    assert_undisturbed(a, b, c, late)
    [redealt] = [row for row in a.events if row["event"] == "redealt"]
    assert (redealt["step"], redealt["parts"]) == (3, {"a": [[6, 7]], "b": [[7, 8]]})
    assert list(late.updates)[-1] == STEPS
    assert 5 <= next(iter(late.updates)) <= STEPS


def test_a_replica_dies_while_a_step_is_executed_for_the_second_time(address: str) -> None:
    """As the recheck of an anomaly does: the second execution begins with the micro-batches of the step's division."""
    times: list[int] = []

    def die_in_the_second() -> None:
        if times.count(3) == 2:
            raise Died

    def before(step: int) -> None:
        times.append(step)
        die_in_the_second()

    a, b = Thread("a", address, executions=2), Thread("b", address, before, executions=2)
    a.start(), b.start()
    a.join(), b.join()
    assert isinstance(b.error, Died)
    assert_undisturbed(a, b)
    redealt = [(row["step"], row["parts"]) for row in a.events if row["event"] == "redealt"]
    assert redealt == [(3, {"a": [[4, 8]]})]


def test_replicas_that_resume_different_checkpoints_go_on_from_the_newest(address: str) -> None:
    done = one_process()
    a, b, c = (
        Thread(name, address, count=3, resumed=resumed)
        for name, resumed in (("a", (2, done[2])), ("b", (3, done[3])), ("c", (0, torch.ones(6))))
    )
    for each in (a, b, c):
        each.start()
    for each in (a, b, c):
        each.join()
        assert list(each.updates) == [4, 5, 6]
    for step, weights in b.updates.items():
        torch.testing.assert_close(weights, done[step], rtol=1e-5, atol=1e-6)
        assert torch.equal(a.updates[step], weights)
        assert torch.equal(c.updates[step], weights)


def test_a_replica_leaves_out_the_data_that_those_it_joins_leave_out(address: str) -> None:
    skips = Skips((Skip(1, 10),))
    done = one_process(skips)
    a, b = Thread("a", address, resumed=(2, done[2]), skips=skips), Thread("b", address)
    a.start(), b.start()
    a.join(), b.join()
    for step in (3, 4, 5, 6):
        torch.testing.assert_close(a.updates[step], done[step], rtol=1e-5, atol=1e-6)
        assert torch.equal(a.updates[step], b.updates[step])


def test_a_replica_with_a_later_checkpoint_than_those_that_run_does_not_give_its_work_up(address: str) -> None:
    late = Thread("d", address, resumed=(5, torch.zeros(6)))

    def wait_for_the_late_comer() -> None:
        late.start()
        threading.Event().wait(1)  # until it has asked

    a = Thread("a", address, at(2, wait_for_the_late_comer), count=1).start().join()
    late.join()
    assert isinstance(late.error, ConfigError)
    assert "d has a checkpoint of step 5, and the replicas that run are at step 2" in str(late.error)
    assert_undisturbed(a)
