"""Times of the journals: seconds since the epoch, and the same in ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(seconds: float) -> str:
    """Seconds since the epoch in ISO 8601: UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: object) -> float | None:
    """Seconds since the epoch of a time in ISO 8601, or of a number; None for anything else."""
    if isinstance(text, int | float):
        return float(text)
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def clock(seconds: float) -> str:
    """Seconds as H:MM:SS, with days from one on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"
