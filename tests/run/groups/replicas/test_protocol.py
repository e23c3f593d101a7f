"""What may go wrong in a step leaves every update as one process would have made it, and all replicas with the same
bits: replicas as threads, with a real lighthouse and real process groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError, LostError
from pipeline.data.skips import Skip, Skips
from pipeline.run.groups.islands.lighthouse import Quorum
from pipeline.run.groups.islands.peers import ExchangeError
from pipeline.run.groups.replicas.deal import ReplicaMember
from pipeline.runtime.launch.group import free_port
from tests.run.groups.replicas.threads import STEPS, Died, Thread, assert_undisturbed, at, die, one_process
from tests.support import wait_until

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (the extra islands)")


@pytest.fixture
def address() -> Iterator[str]:
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    found = f"127.0.0.1:{free_port()}"
    server = LighthouseServer(bind=found, min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=5000)
    yield found
    server.shutdown()


@pytest.mark.parametrize("step", [3, STEPS])
def test_a_replica_that_misses_an_exchange_makes_the_same_update_in_the_same_step(step: int, address: str) -> None:
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

    b.before = at(step, lose_the_answer)
    a.start(), b.start()
    a.join(), b.join()
    assert_undisturbed(a, b)
    assert list(b.updates) == list(range(1, STEPS + 1))
    assert [row["step"] for row in b.events if row["event"] == "exchange_failed"] == [step]
    assert not [row for row in b.events if row["event"] == "redealt"]


def damage(replica: Thread, *, tag: int, change: Callable[[Tensor], object], times: int = 1) -> list[int]:
    """Changes what arrives with a tag in step 3, so many times; returns how many of them are left."""
    left = [times]

    def begin() -> None:
        group = replica.peers._group
        receive = group.recv

        def recv(tensors: list[Tensor], source: int, its_tag: int) -> Any:
            work = receive(tensors, source, its_tag)
            if its_tag == tag and left[0]:
                left[0] -= 1
                work.wait()
                change(tensors[0])
                return SimpleNamespace(wait=lambda: True)
            return work

        group.recv = recv

    replica.before = at(3, begin)
    return left


@pytest.mark.parametrize("times", [1, 3])
def test_a_damaged_message_is_asked_for_again_and_three_times_fail_the_exchange(times: int, address: str) -> None:
    a, b = Thread("a", address), Thread("b", address)
    # the values, not their checksum; an exponent: 1e36 in the place of 1
    damage(b, tag=0, change=lambda values: values.view(torch.uint8)[-1:].bitwise_xor_(0x40), times=times)
    a.start(), b.start()
    a.join(), b.join()
    assert_undisturbed(a, b)
    damaged = [(row["step"], row["messages"]) for row in b.events if row["event"] == "exchange_damaged"]
    assert damaged == [(3, times)]
    assert [row["step"] for row in b.events if row["event"] == "exchange_failed"] == ([3] if times == 3 else [])


def test_a_damaged_verdict_disturbs_nothing(address: str) -> None:
    a, b = Thread("a", address), Thread("b", address)
    left = damage(b, tag=2, change=lambda verdict: verdict.bitwise_xor_(0x40))
    a.start(), b.start()
    a.join(), b.join()
    assert_undisturbed(a, b)
    assert left == [0]
    assert not [row for row in b.events if row["event"].startswith("exchange_")]


def test_what_a_checkpoint_records_of_a_step_is_the_same_on_a_replica_that_was_given_the_next_one(address: str) -> None:
    back = threading.Event()
    a, b = Thread("a", address, after=at(3, lambda: assert_set(back))), Thread("b", address)

    def pause() -> None:
        b.lighthouse.close()
        wait_until(lambda: 3 in a.updates)
        b.lighthouse._closed.clear()
        threading.Thread(target=b.lighthouse._send_heartbeats, daemon=True).start()
        whole = b.lighthouse._ask

        def ask(member: ReplicaMember) -> Quorum[ReplicaMember]:
            threading.Timer(3, back.set).start()  # a quorum of the same members does not wait for one that comes later
            return whole(member)

        b.lighthouse._ask = ask  # type: ignore[method-assign]

    b.after = at(2, pause)
    a.start(), b.start()
    a.join(), b.join()
    assert_undisturbed(a, b)
    assert list(b.updates) == list(range(1, STEPS + 1))
    assert a.details == b.details


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def await_question(late: Thread) -> None:
    """Returns when the lighthouse has a late comer's question, which is on its way for a moment."""
    assert_set(late.asks)
    time.sleep(1.0)


def test_of_three_replicas_one_dies_in_a_step_and_another_one_joins(address: str) -> None:
    dead = threading.Event()
    late = Thread("d", address)

    def wait_for_the_late_comer() -> None:
        dead.wait(60)
        late.start()
        await_question(late)

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
        await_question(late)

    a = Thread("a", address, at(2, wait_for_the_late_comer), count=1).start().join()
    late.join()
    assert isinstance(late.error, ConfigError)
    assert "d has a checkpoint of step 5, and the replicas that run are at step 2" in str(late.error)
    assert_undisturbed(a)


def test_a_replica_that_comes_in_the_last_step_takes_its_result(address: str) -> None:
    late = Thread("d", address)

    def wait_for_the_late_comer() -> None:
        late.start()
        await_question(late)

    a = Thread("a", address, at(STEPS, wait_for_the_late_comer), count=1).start().join()
    late.join()
    assert_undisturbed(a)
    assert (late.error, late.updates) == (None, {})
    assert torch.equal(late.model.weights, a.model.weights)


def test_replicas_that_cannot_connect_to_each_other_end_and_name_the_address(address: str) -> None:
    a, b = Thread("a", address), Thread("b", address)
    for each in (a, b):
        each.start(reachable=False)
    a.join(), b.join()
    assert isinstance(a.error, LostError)
    assert f"the others: b at {b.store.address}\n" in str(a.error)
    assert "replicas.bind" in str(b.error)
    assert not a.updates


def test_an_old_report_of_a_replica_that_comes_in_place_of_its_own_changes_nothing(address: str) -> None:
    a, b = Thread("a", address), Thread("b", address)

    def replay() -> None:
        own, member = b.lighthouse.ask, b.lighthouse

        def ask(now: ReplicaMember) -> Future[Quorum[ReplicaMember]]:
            member.ask = own  # type: ignore[method-assign]
            return own(replace(now, held=(), between=True))

        member.ask = ask  # type: ignore[method-assign]
        swap = b.peers.all_to_all

        def all_to_all(_values: Tensor) -> Tensor:
            b.peers.all_to_all = swap  # type: ignore[method-assign]
            raise ExchangeError("lost")  # both ask

        b.peers.all_to_all = all_to_all  # type: ignore[method-assign]

    b.before = at(3, replay)
    a.start(), b.start()
    a.join(), b.join()
    assert_undisturbed(a, b)
    assert "another report of b than its own" in str(b.events)
