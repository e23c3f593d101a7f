"""A run's goodput for people: one line, and the names of the categories."""

from __future__ import annotations

from dataclasses import asdict

from pipeline.runtime.goodput.account import Goodput
from pipeline.runtime.metrics.times import clock

NAMES = {
    "productive": "productive steps",
    "lost": "lost steps",
    "startup": "start-up",
    "down": "down",
    "data_wait": "data wait",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "stragglers": "stragglers (estimated)",
    "exchange": "exchanges",
    "other": "other",
}
"""Field of `TimeSpent` -> its name."""
_SHOWN = 0.0005
"""Smaller shares are not listed: they would be 0.0 %."""


def goodput_line(goodput: Goodput) -> str:
    """Formats the goodput in one line: "goodput 93.1 % of 1:02:03 in 2 attempts: start-up 3.0 %, ..."."""
    return f"goodput {goodput_text(goodput)}"


def goodput_text(goodput: Goodput) -> str:
    """Formats the line without the word "goodput"; the largest loss comes first."""
    spent = asdict(goodput.spent)
    productive, wall = spent.pop("productive"), goodput.spent.wall
    ordered = sorted(spent.items(), key=lambda each: -each[1])
    rest = [f"{NAMES[name]} {percent(seconds / wall)}" for name, seconds in ordered if seconds > _SHOWN * wall]
    count = len(goodput.attempts)
    where = f"of {clock(wall)}" + (f" in {count} attempts" if count > 1 else "")
    return f"{percent(productive / wall)} {where}" + (f": {', '.join(rest)}" if rest else "")


def percent(share: float) -> str:
    """Formats a fraction as "93.1 %"."""
    return f"{100 * share:.1f} %"
