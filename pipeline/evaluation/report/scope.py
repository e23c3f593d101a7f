"""The scope of a comparison: its tokens, devices and machine. No torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.evaluation.comparison.rows import Row
from pipeline.evaluation.heldout.data import HeldOutData


def scope(rows: Sequence[Row], data: HeldOutData) -> str:
    """One line on the evaluated tokens."""
    counts = " / ".join(dict.fromkeys(f"{row.tokens:,}" for row in rows if row.tokens is not None)) or "no"
    return f"{counts} tokens of the {data.split} split of {data.path}, in windows of {data.sequence_length}"


def where(rows: Sequence[Row]) -> str:
    """Device and dtype of the loss, e.g. "cpu, float32"; every pair if models differ."""
    found = (", ".join(filter(None, (row.device, row.dtype))) for row in rows if row.device)
    return " / ".join(dict.fromkeys(found))


def hardware(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The machine on which the models were measured, as pairs of term and text."""
    yield "processor", _processor()
    threads = " / ".join(dict.fromkeys(f"{row.threads}" for row in rows if row.threads))
    yield "threads", f"{threads} of {os.cpu_count()} for generation and KL" if threads else f"{os.cpu_count()}"
    memory = _memory_bytes()
    if memory is not None:
        yield "memory", f"{memory / 1e9:,.0f} GB"
    yield "system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    versions = dict.fromkeys(f"{row.consumer} {row.version}" for row in rows if row.version)
    yield "programs", ", ".join(versions)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
