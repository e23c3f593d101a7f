"""The peak memory of a run per rank, before it starts: for `headrace check`. The formulas are in `parallel.memory`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from headrace.base.errors import ConfigError
from pipeline.config.rules import ResolvedRun
from pipeline.parallel.footprint import footprint_of
from pipeline.parallel.memory import KINDS, Bytes, largest_micro_batch, peak_memory
from pipeline.run.summary import Entry

_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def memory_bytes(text: str) -> int:
    """Bytes from a size with its unit, e.g. 80GB or 139GiB.

    Raises:
        ConfigError: it is no such size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        why = "it is not a positive number with a unit: MB, GB, MiB or GiB"
        raise ConfigError("--memory", text, why=why, remedy="e.g. --memory 80GB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def memory_entries(run: ResolvedRun, model: nn.Module, *, memory: int | None = None) -> Iterator[Entry]:
    """The peak of the rank that needs most, by kind; with `memory`, whether it fits and what would.

    Args:
        run: the resolved config.
        model: on meta.
        memory: of a device, in bytes.
    """
    footprint = footprint_of(run, model)
    if footprint is None:
        kind = getattr(model.config, "model_type", "this architecture")
        yield Entry("memory", f"not known for {kind}: its layers are not built like Llama's", None)
        return
    peaks = [peak_memory(run, footprint, pp_rank=rank) for rank in range(run.topology.pp)]
    worst = max(range(run.topology.pp), key=lambda rank: peaks[rank].total)
    yield _peak_entry(run, peaks[worst], worst)
    if memory is not None:
        # which rank needs most depends on the micro-batch
        ranks = range(run.topology.pp)
        largest = min(largest_micro_batch(run, footprint, memory=memory, pp_rank=rank) for rank in ranks)
        yield _fit_entry(run, peaks[worst].total, memory=memory, largest=largest)


def _peak_entry(run: ResolvedRun, peak: Bytes, worst: int) -> Entry:
    parts = ", ".join(f"{kind} {_shown(getattr(peak, kind))}" for kind in KINDS if getattr(peak, kind) >= 1e6)
    where = f" (pipeline rank {worst}, which needs most)" if run.topology.pp > 1 else ""
    values: dict[str, Any] = {kind: round(getattr(peak, kind)) for kind in KINDS}
    values |= {"peak": round(peak.total), "pp_rank": worst}
    return Entry("memory", f"peak {_shown(peak.total)} per rank{where}: {parts}", values)


def _fit_entry(run: ResolvedRun, peak: float, *, memory: int, largest: int) -> Entry:
    fits = "fits" if peak <= memory else "does not fit"
    best = f"the largest micro-batch that does is {largest}" if largest else "not even a micro-batch of 1 does"
    text = f"{fits} {_shown(memory)} (peak {peak / memory:.0%} of it); {best}"
    if peak > memory and not largest:
        text += "; try: " + _remedy(run)
    values = {"memory": memory, "fits": peak <= memory, "largest_micro_batch": largest}
    return Entry("memory fit", text, values)


def _remedy(run: ResolvedRun) -> str:
    if run.config.memory.activation_checkpointing != "full":
        return "memory.activation_checkpointing full, or more ranks"
    return "more ranks with zero_optimization.stage 3, or a smaller model"


def _shown(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
