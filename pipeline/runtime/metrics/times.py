"""Times of the journals: seconds since the epoch, and the same in ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(seconds: float) -> str:
    """Seconds since the epoch in ISO 8601: UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: object) -> float | None:
    """Seconds since the epoch of a time in ISO 8601, or of a number; None of anything else."""
    if isinstance(text, int | float):
        return float(text)
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
