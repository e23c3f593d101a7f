"""Islands simulated: closed forms where there are any, and what has to hold of any run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.island_simulator.island_exchange import (
    Exchange,
    Island,
    bytes_sent,
    data_parallel_step_s,
    exchange_s,
    form_s,
    new_connections_s,
)
from benchmarks.island_simulator.island_simulation import Failures, simulate_islands
from pipeline.plan.predict.links import Link

SLOW = Link(100e6 / 8, 0.05)
FOUR = [Island(0.5, SLOW)] * 4
INT8 = Exchange(100, 1e8, "all_gather")


def test_equal_islands_without_failures_are_the_closed_form() -> None:
    takes = exchange_s(FOUR, INT8, kept=True)
    assert takes == pytest.approx(0.2 + 0.1 + new_connections_s(1e8, SLOW, connections=3))
    found = simulate_islands(FOUR, INT8, seconds=10_000.0)
    forms = form_s(4, 0.05) - form_s(4, 0.05, kept=True)
    assert forms == pytest.approx(0.1 * 19)
    assert found.seconds == pytest.approx(found.exchanges * (50 + takes) + forms)
    assert found.efficiency == pytest.approx(50 * found.exchanges / found.seconds)
    assert found.steps == 400 * found.exchanges
    assert found.bytes_sent == found.exchanges * 3e8


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_ring_sends_what_an_all_reduce_needs(count: int) -> None:
    exchange = Exchange(10, 1e9)
    assert bytes_sent(count, exchange) == pytest.approx(2 * (count - 1) / count * 1e9)
    fast = [Island(1.0, Link(1e9, 0.0))] * count
    assert exchange_s(fast, exchange) == pytest.approx(bytes_sent(count, exchange) / 1e9)
    assert exchange_s(fast[:1], exchange) == 0.0


def test_a_new_connection_sends_ten_segments_and_doubles_until_the_round_trip_is_full() -> None:
    window = 10 * 1448
    assert new_connections_s(window, SLOW) == pytest.approx(0.1)
    assert new_connections_s(7 * window, SLOW) == pytest.approx(0.3)  # 1 + 2 + 4 windows
    more = new_connections_s(9e6, SLOW) - new_connections_s(4e6, SLOW)
    assert more == pytest.approx(5e6 / 12.5e6)
    assert new_connections_s(1e6, Link(12.5e6, 0.0)) == pytest.approx(0.08)


def test_a_process_group_is_formed_anew_after_a_change_and_after_a_long_round() -> None:
    forms = form_s(4, 0.05) - form_s(4, 0.05, kept=True)
    rare = replace(INT8, steps=500)  # 250 s
    found = simulate_islands(FOUR, rare, seconds=1e5)
    assert found.seconds == pytest.approx(found.exchanges * (250 + exchange_s(FOUR, rare)))
    kept = simulate_islands(FOUR, INT8, seconds=1e5)
    assert kept.time.exchange == pytest.approx(4 * (kept.exchanges * exchange_s(FOUR, INT8, kept=True) + forms))
    short = replace(INT8, bytes=0.0)  # an exchange is all latency
    failing = simulate_islands(FOUR, short, seconds=1e5, failures=Failures(5_000.0))
    undisturbed = simulate_islands(FOUR, short, seconds=1e5)
    assert failing.time.exchange / failing.exchanges > 1.1 * undisturbed.time.exchange / undisturbed.exchanges


def test_a_delay_hides_as_many_steps_as_it_has() -> None:
    takes, forms = exchange_s(FOUR, INT8, kept=True), form_s(4, 0.05) - form_s(4, 0.05, kept=True)
    some = simulate_islands(FOUR, replace(INT8, delay=10), seconds=1e5)
    # in the first round nothing has been done ahead
    assert some.seconds == pytest.approx(some.exchanges * (50 + takes - 5) + 5 + forms)
    enough = simulate_islands(FOUR, replace(INT8, delay=100), seconds=1e5)
    assert enough.efficiency == 1.0


def test_fragments_send_the_same_bytes_in_more_messages() -> None:
    whole = simulate_islands(FOUR, INT8, seconds=1e5)
    parts = simulate_islands(FOUR, replace(INT8, fragments=4), seconds=1e5)
    assert parts.exchanges / parts.steps == pytest.approx(4 * whole.exchanges / whole.steps)
    assert parts.bytes_sent / parts.steps == pytest.approx(whole.bytes_sent / whole.steps)
    assert parts.time.shares()["exchange"] > whole.time.shares()["exchange"]  # latency


def test_all_wait_for_the_slowest_unless_nobody_waits() -> None:
    uneven = [*FOUR[1:], Island(1.0, SLOW)]
    waiting = simulate_islands(uneven, INT8, seconds=1e5)
    assert waiting.time.shares()["waiting"] == pytest.approx(
        3 * 50 / (4 * (100 + exchange_s(FOUR, INT8, kept=True))), rel=1e-2
    )
    alone = simulate_islands(uneven, replace(INT8, collective="none"), seconds=1e5)
    assert alone.time.waiting == 0.0
    assert alone.steps / alone.seconds > 1.4 * waiting.steps / waiting.seconds


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "none"])
@pytest.mark.parametrize("delay", [0, 5])
def test_all_time_is_accounted_for_under_failures(collective: str, delay: int) -> None:
    islands = [Island(0.4 + 0.1 * i, SLOW) for i in range(6)]
    exchange = Exchange(20, 4e7, collective, delay=delay, state_bytes=1e9)
    found = simulate_islands(islands, exchange, seconds=2e5, failures=Failures(5000.0, 5.0, 100.0), seed=3)
    assert found.failures == pytest.approx(6 * 2e5 / 5000, rel=0.3)
    spent = sum(vars(found.time).values())
    # the rounds that are under way at the end are not accounted for, nor is a state that is being loaded
    assert spent == pytest.approx(6 * found.seconds, rel=2e-3)
    assert all(seconds >= 0 for seconds in vars(found.time).values())
    trained = sum(island.step_s for island in islands) / 6 * found.steps
    if collective != "none":  # equally many steps of each, but for the dead
        assert found.time.training == pytest.approx(trained, rel=0.05)


def test_the_last_island_goes_on_from_its_checkpoint() -> None:
    found = simulate_islands(FOUR[:1], INT8, seconds=1e5, failures=Failures(1000.0, 5.0, 60.0))
    assert found.bytes_sent == 0.0
    # of a round of 50 s about 5 % dies, half a round each
    assert found.efficiency == pytest.approx(0.92, abs=0.02)


def test_islands_beat_data_parallelism_where_links_are_slow_only() -> None:
    gradients = 4e8
    slow = data_parallel_step_s(FOUR, gradients)
    assert slow == pytest.approx(0.5 + 6 * (0.1 + gradients / 4 / 12.5e6) - 1 / 3)
    agreeing = data_parallel_step_s(FOUR, gradients, all_reduces=4)
    assert agreeing == pytest.approx(slow + 3 * 6 * 0.1)
    fast = [replace(island, link=Link(50e9, 1e-6)) for island in FOUR]
    assert data_parallel_step_s(fast, gradients) == 0.5


@pytest.mark.parametrize(
    "changes", [{"steps": 0}, {"fragments": 3}, {"delay": 101}, {"collective": "gossip"}, {"fragments": 4, "delay": 26}]
)
def test_what_cannot_be_exchanged_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"steps|delay|collective"):
        replace(INT8, **changes)  # type: ignore[arg-type]
