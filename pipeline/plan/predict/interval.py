"""A number with its interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Interval:
    """Low, typical and high value of a quantity."""

    low: float
    typical: float
    high: float

    @classmethod
    def of(cls, *values: float) -> Interval:
        """The interval of three values: the second is typical, the others may be in any order."""
        return cls(min(values), values[1], max(values))

    @classmethod
    def exact(cls, value: float) -> Interval:
        """The interval of a known number, without width."""
        return cls(value, value, value)

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of a monotone function of the quantity."""
        return Interval.of(function(self.low), function(self.typical), function(self.high))

    def shown(self, text: Callable[[float], str]) -> str:
        """The interval in words, e.g. "1.2 s (1.0 to 1.5)"; only the number if the interval has no width."""
        typical, low, high = text(self.typical), text(self.low), text(self.high)
        return typical if low == high else f"{typical} ({low} to {high})"

    def plain(self) -> dict[str, float]:
        """The interval for JSON."""
        return asdict(self)


def hours_text(hours: Interval) -> str:
    """GPU-hours with their interval."""
    return hours.shown(lambda each: f"{each:,.1f}" if each < 100 else f"{each:,.0f}")


def days_text(days: float) -> str:
    """A duration in days, hours or minutes."""
    if days >= 2:
        return f"{days:,.1f} days"
    return f"{days * 24:,.1f} h" if days * 24 >= 1 else f"{days * 1440:,.1f} min"


def seconds_text(seconds: float) -> str:
    """A duration in seconds or milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
