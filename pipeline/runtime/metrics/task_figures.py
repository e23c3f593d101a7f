"""The newest figures of tasks, from rows of a journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.runtime.metrics.sinks import TASK


def newest_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Task -> its figures, with their step, of the newest of its rows in a journal."""
    left_out = ("kind", "time", "seconds")
    return {
        str(row["kind"]).removeprefix(TASK): {key: value for key, value in row.items() if key not in left_out}
        for row in rows
        if str(row["kind"]).startswith(TASK)
    }
