"""Measurements of an attempt of a run, beside the memory that formulas predict: for `headrace plan --score`.

They are an event `measured` in the journal of attempts, not in the run's manifest: nothing in a manifest depends on
time or host, and a resumed run has the manifest of an uninterrupted one. The time of a step is not predicted here,
since that needs the description of a machine: `headrace plan --score` predicts it, with the formulas of its version.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from foundation.version import __version__
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import peak_memory
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.run.prepare import PreparedRun
from pipeline.run.rank_of_run import RankOfRun
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.metrics.memory import PeakMemory

WARM_UP = 3
"""Number of first steps of an attempt that do not count: they compile kernels and allocate memory and communicators."""

NEWEST = 1000
"""Number of newest steps whose times are kept."""


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    return Measured(context.here)


class Measured(Hook):
    """Times the newest steps of an attempt, without warm-up steps and steps that compiled.

    This process's CPU time beside the wall-clock time distinguishes a busy host from a slow one.
    """

    def __init__(self, here: RankOfRun) -> None:
        self._here = here
        self._seconds: deque[float] = deque(maxlen=NEWEST)
        self._cpu: deque[float] = deque(maxlen=NEWEST)
        self._seen, self._mark = 0, time.process_time()

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Adds a step."""
        self._seen += 1
        before, self._mark = self._mark, time.process_time()
        if self._seen > WARM_UP and not numbers.graphs:
            self._seconds.append(numbers.cost.seconds)
            self._cpu.append(self._mark - before)

    def end(self, step: int) -> None:
        """Records the event `measured`. Collective.

        Its fields: `steps` (number of timed steps), `step_s` (quartiles, in seconds), `cpu_s` (median CPU seconds of
        this process from one report to the next, with checkpoints and evaluations between them), `memory` (name of
        `PeakMemory` -> bytes by pipeline rank, the largest of its ranks), `predicted_memory_bytes` (tensors by the
        formulas, by pipeline rank; absent for an architecture without formulas), `world_size`, `vocabulary`, `device`,
        `threads`, `torch`, `headrace`.
        """
        here, topology = self._here, self._here.run.topology
        own = PeakMemory(here.agreement.device)
        memory = _peaks(topology.pp, topology.coordinates(here.rank)["pp"], own, here.agreement)
        if here.rank != 0:
            return
        predicted = _predicted(here.prepared)
        here.attempt.record(
            "measured",
            step=step,
            steps=len(self._seconds),
            **self._times(),
            memory=memory,
            **({} if predicted is None else {"predicted_memory_bytes": predicted}),
            world_size=topology.world_size,
            vocabulary=int(here.prepared.hf_config["vocab_size"]),
            device=here.engine.device_name,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            headrace=__version__,
        )

    def _times(self) -> dict[str, Any]:
        """Returns quartiles and CPU time; nothing for fewer than two steps."""
        if len(self._seconds) < 2:
            return {}
        quartiles = statistics.quantiles(self._seconds, n=4, method="inclusive")
        return {"step_s": quartiles, "cpu_s": statistics.median(self._cpu)}


def _peaks(stages: int, mine: int, own: PeakMemory, agreement: Agreement) -> dict[str, list[int]]:
    """Returns the largest peak of the ranks of every pipeline stage, by name. Collective."""
    values = [value if stage == mine else 0 for value in own.read() for stage in range(stages)]
    found = agreement.max_over_ranks(*values)
    return {name: found[at * stages : (at + 1) * stages] for at, name in enumerate(own.names)}


def _predicted(prepared: PreparedRun) -> Sequence[int] | None:
    footprint = footprint_of(prepared.run, prepared.model)
    if footprint is None:
        return None
    ranks = range(prepared.run.topology.pp)
    return [round(peak_memory(prepared.run, footprint, pp_rank=rank).total) for rank in ranks]
