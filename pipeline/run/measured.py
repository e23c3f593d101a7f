"""Measurements of an attempt of a run, beside the memory that formulas predict: for `headrace plan --score`.

They are an event `measured` of the journal of attempts, and not in the run's manifest: nothing there depends on the
time or the host, and a run that was resumed has the manifest of one that was not. To predict the time of a step takes
a machine: it is predicted when the run is scored, by the formulas of that day.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.base.version import __version__
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.run.prepare import PreparedRun
from pipeline.run.step_times import StepTimes
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.metrics.memory import PeakMemory


def measured(
    prepared: PreparedRun, times: StepTimes, agreement: Agreement, *, rank: int, device_name: str
) -> dict[str, Any]:
    """Returns the fields of the event on rank 0, and none on other ranks. Collective.

    Args:
        prepared: the run.
        times: seconds of the newest steps.
        agreement: all-reduces the peaks.
        rank: global rank of this process.
        device_name: name of the GPU, as torch reports it; "cpu" without one.

    Returns:
        `steps` (how many were timed), `step_s` (quartiles, in seconds), `cpu_s` (median CPU time of this process, in
        seconds), `memory` (name of `PeakMemory` -> bytes by pipeline rank, the largest of its ranks),
        `predicted_memory_bytes` (tensors by the formulas, by pipeline rank; absent where an architecture has none),
        `world_size`, `vocabulary`, `device`, `threads`, `torch`, `headrace`.
    """
    run = prepared.run
    memory = _peaks(run.topology.pp, run.topology.coordinates(rank)["pp"], PeakMemory(agreement.device), agreement)
    if rank != 0:
        return {}
    quartiles = times.quartiles()
    predicted = _predicted(prepared)
    return {
        "steps": len(times),
        **({} if quartiles is None else {"step_s": list(quartiles), "cpu_s": times.cpu_median()}),
        "memory": memory,
        **({} if predicted is None else {"predicted_memory_bytes": predicted}),
        "world_size": run.topology.world_size,
        "vocabulary": int(prepared.hf_config["vocab_size"]),
        "device": device_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "headrace": __version__,
    }


def _peaks(stages: int, mine: int, own: PeakMemory, agreement: Agreement) -> dict[str, list[int]]:
    """The largest peak of the ranks of every pipeline stage, by name. Collective."""
    values = [value if stage == mine else 0 for value in own.read() for stage in range(stages)]
    found = agreement.max_over_ranks(*values)
    return {name: found[at * stages : (at + 1) * stages] for at, name in enumerate(own.names)}


def _predicted(prepared: PreparedRun) -> Sequence[int] | None:
    footprint = footprint_of(prepared.run, prepared.model)
    if footprint is None:
        return None
    ranks = range(prepared.run.topology.pp)
    return [round(peak_memory(prepared.run, footprint, pp_rank=rank).total) for rank in ranks]
