"""Times of the journals, as seconds since the epoch and in ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(seconds: float) -> str:
    """Formats seconds since the epoch in ISO 8601: UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(text: object) -> float | None:
    """Converts an ISO 8601 time, or a number, to seconds since the epoch; returns None for any other value."""
    if isinstance(text, int | float):
        return float(text)
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def clock(seconds: float) -> str:
    """Formats seconds as H:MM:SS, with days if over a day."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"
