"""Replicas as threads, with a real lighthouse and real process groups, and a model of six weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foundation.errors import HeadraceError
from pipeline.config.sections.groups import ReplicasSection
from pipeline.data.micro_batch import StepBatch
from pipeline.data.skips import NO_SKIPS, Skips
from pipeline.run.groups.islands.lighthouse import LighthouseMember, Quorum
from pipeline.run.groups.islands.peers import ExchangeError, Peers, PeerStore
from pipeline.run.groups.replicas.deal import Ranges, ReplicaMember
from pipeline.run.groups.replicas.quorums import Quorums
from pipeline.run.groups.replicas.record import ReplicaRecord
from pipeline.run.groups.replicas.replica import ReplicaContext, ReplicaOfRun
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import StopSignals

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
        yield {"weight/empty": torch.empty(0), "weight/x": self.weights}

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
        after: called with a step that was run, before the quorum that follows it.
        asks: set once it asks for a quorum.
        executions: number of executions of every step.
        count: replicas that are waited for.
        resumed: step and weights of its checkpoint.
        skips: data that it leaves out.
        updates: step -> weights after it.
        details: step -> what a checkpoint of it records.
        events: events of its journal.
    """

    name: str
    address: str
    before: Callable[[int], None] = lambda _step: None
    after: Callable[[int], None] = lambda _step: None
    executions: int = 1
    count: int = 2
    resumed: tuple[int, Tensor] = (0, torch.ones(6))
    skips: Skips = NO_SKIPS
    updates: dict[int, Tensor] = field(default_factory=dict)
    details: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None

    def start(self, *, reachable: bool = True) -> Thread:
        self.model, self.store, self.asks = Toy(self.resumed[1].clone()), PeerStore("127.0.0.1"), threading.Event()
        self.peers = Peers(bind="127.0.0.1", timeout_s=5, secret=b"")
        if not reachable:
            self.peers.form = fail  # type: ignore[method-assign]
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
        self.lighthouse = LighthouseMember(
            self.address, self.name, store=self.store.address, secret=b"", parse=ReplicaMember.from_plain
        )
        ask = self.lighthouse._ask

        def asking(member: ReplicaMember) -> Quorum[ReplicaMember]:
            self.asks.set()
            return ask(member)

        self.lighthouse._ask = asking  # type: ignore[method-assign]
        around = ReplicaContext(
            section=ReplicasSection(name=self.name, count=self.count, start_s=100),
            total=STEPS,
            samples=SAMPLES,
            rank=0,
            engine=engine,
            stepper=stepper,
            load=load,
            quorums=Quorums(Agreement(torch.device("cpu")), StopSignals(announce=False), watchdog, self.lighthouse),
            record=ReplicaRecord(lambda step, **row: self.events.append({"step": step, **row}), lambda _line: None),
        )
        me = ReplicaMember(
            self.name, self.resumed[0], 0, "", None, (), True, "", living=False, waited=False, layout="x"
        )
        return ReplicaOfRun(around, peers=self.peers, member=me)

    def _run(self) -> None:
        replica = self._replica()
        try:
            replica.start()
            for batch in replica.batches():
                self.updates[batch.step] = self._step(replica, batch)
                self.after(batch.step)
                replica.exchange(batch.step)
                self.details[batch.step] = replica.details()
        except (Died, HeadraceError) as error:
            self.error = error
        finally:
            replica.close()

    def _step(self, replica: ReplicaOfRun, batch: StepBatch) -> Tensor:
        for _ in range(self.executions):
            gradients, sums, samples = [torch.zeros(6)], torch.zeros(1), self._samples(batch.micro_batches)
            while True:
                for sample in samples:
                    gradients[0] += self.model.gradient(sample)
                    sums += 1
                self.before(batch.step)
                samples = self._samples(replica.sum_gradients(batch, gradients, sums))
                if not samples:
                    break
            assert float(sums) == SAMPLES  # every sample once
        return self.model.update(gradients[0])

    def _samples(self, given: Sequence[Any]) -> list[Sample]:
        return list(given)


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
    left = [step]

    def before(now: int) -> None:
        if left == [now]:
            left.clear()
            action()

    return before


def fail(*_: object, **__: object) -> None:
    raise ExchangeError("connection refused")


def die() -> None:
    raise Died
