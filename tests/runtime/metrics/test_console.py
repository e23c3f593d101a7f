"""What a run prints while it trains: in a log file, and on a terminal."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from pipeline.runtime.metrics import console
from pipeline.runtime.metrics.console import SmoothedLoss, TimeLeft, TrainingDisplay
from pipeline.runtime.metrics.step_clock import StepCost

MEMORY = {"memory_allocated_bytes": int(61.2 * 2**30), "memory_reserved_bytes": 64 * 2**30}
COST = StepCost(2.0, 0.012, 1234.5, 0.41, MEMORY)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the display sees; tests move it on."""
    now = [1000.0]
    monkeypatch.setattr("pipeline.runtime.metrics.console.time.monotonic", lambda: now[0])
    return now


def test_the_smoothed_loss_begins_at_the_first_loss_and_follows_slowly() -> None:
    loss = SmoothedLoss()
    assert loss.add(8.0) == pytest.approx(8.0)
    assert loss.add(6.0) == pytest.approx((0.9 * 8 + 6) / 1.9)
    for _ in range(200):
        last = loss.add(2.0)
    assert last == pytest.approx(2.0)


def test_a_non_finite_loss_is_shown_and_does_not_spoil_the_average() -> None:
    loss = SmoothedLoss()
    loss.add(4.0)
    assert math.isnan(loss.add(math.nan))
    assert loss.add(4.0) == pytest.approx(4.0)


def test_the_time_left_counts_from_the_first_step_of_this_process(clock: list[float]) -> None:
    left = TimeLeft(1000)
    assert left.after(501) == ""  # resumed at 500; the first step compiles
    clock[0] += 20.0
    assert left.after(511) == "0:16:18"  # 2 s a step, 489 steps
    clock[0] += 2.0
    assert left.after(401) == ""  # rolled back
    clock[0] += 3600.0
    assert left.after(402) == "24 d 22:00:00"
    assert left.after(1000) == ""


def test_a_line_has_loss_gradient_norm_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingDisplay(first=0, total=100, shown=True) as display:
        for step in range(1, 101):
            clock[0] += 6.0
            display.step(step, loss=3.0, grad_norm=0.5, lr=1e-3, cost=COST)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == (
        "step 3/100  loss 3.0000  grad norm 0.50  lr 1.00e-03  1,234 tok/s  MFU 41.0%"
        "  mem 61.2 GiB (64.0 reserved)  data wait 0.012 s  0:09:42 left"
    )
    assert len(lines) == 51  # one in 10 s, and the last
    assert lines[-1].startswith("step 100/100")
    assert "left" not in lines[-1]


def test_the_bar_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "Console", lambda **_: terminal)
    with TrainingDisplay(first=0, total=100_000, shown=True) as display:
        for step in (99_000, 99_001):
            cost = replace(COST, tokens_per_second=123_456.0, mfu=0.415)
            display.step(step, loss=3.14159, grad_norm=12.34, lr=1e-3, cost=cost)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert re.search(r"99001/100000 loss 3.1416 gnorm 12.34 123,456 tok/s MFU 41.5% \d+:\d\d:\d\d", plain)
