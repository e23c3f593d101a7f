"""Predicted against measured: peak memory and step time of runs that were trained, with the signed error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.engines.sizes.memory import Bytes, peak_memory
from pipeline.plan.predict.memory_plan import typical_peak
from pipeline.plan.predict.plan import run_rates
from pipeline.plan.predict.planned_run import PlannedRun, planned_run
from pipeline.plan.predict.rates import TYPICAL
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.plan.predict.step_time import StepTime, step_time, works_of
from pipeline.runtime.machines.known import known_machines, machine_of_device
from pipeline.runtime.machines.machine import Machine
from pipeline.runtime.machines.ranks import with_ranks
from pipeline.runtime.metrics.attempts_journal import read_events

LEAST_STEPS = 5
"""Fewest timed steps whose median is taken as the time of a step."""

DRIFT = 0.01
"""Relative difference between the memory predicted today and the memory predicted when the run was trained, above which
the difference is reported."""

_RESIDENT, _ALLOCATED, _RESERVED = "memory_resident_bytes", "memory_allocated_bytes", "memory_reserved_bytes"


@dataclass(frozen=True)
class PredictionComparison:
    """A quantity, predicted and measured, in the same unit."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured: above 0 the prediction is too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class MeasuredRun:
    """A trained run and its measurements.

    Attributes:
        path: directory of the run.
        config: config in the run's manifest.
        record: newest `measured` event of its attempts; see `pipeline.run.hooks.measured`.
        hosts: number of hosts, from the `nodes` event of that attempt; 1 without the event.
    """

    path: Path
    config: Config
    record: dict[str, Any]
    hosts: int = 1

    @property
    def ranks_per_host(self) -> int:
        """Ranks on a host, rounded up: all hosts are taken to have equally many."""
        return -(-int(self.record["world_size"]) // self.hosts)

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Quartiles of the time of a step, in seconds."""
        low, median, high = self.record["step_s"]
        return low, median, high

    def peak(self, name: str) -> int | None:
        """Bytes of the rank that needs most, by a name of `PeakMemory`; None where memory was not recorded."""
        found = self.record["memory"].get(name)
        return max(found) if found else None


@dataclass(frozen=True)
class Score:
    """A run's prediction by a machine, and its measurements.

    Attributes:
        measured: the trained run.
        planned: the same run, resolved and counted for the prediction.
        memory: peak of the rank that needs most: bytes of tensors on a GPU, resident bytes on a CPU.
        step: median seconds of a step, without checkpoints and evaluations.
        parts: predicted seconds by part of a step.
        tensors: peak by the formulas of the rank that needs most.
        drift: relative difference of `tensors` from the peak predicted when the run was trained; None where no peak was
            recorded.
    """

    measured: MeasuredRun
    planned: PlannedRun
    memory: PredictionComparison
    step: PredictionComparison
    parts: StepTime
    tensors: Bytes
    drift: float | None

    @property
    def overhead(self) -> float:
        """Resident bytes beside the tensors that the formulas count, on a CPU."""
        return max(0.0, (self.measured.peak(_RESIDENT) or 0) - self.tensors.total)

    @property
    def fragmentation(self) -> float:
        """Allocator bytes beside tensors, divided by the bytes of activations and logits, on a GPU."""
        lost = (self.measured.peak(_RESERVED) or 0) - (self.measured.peak(_ALLOCATED) or 0)
        return max(0.0, lost / (self.tensors.activations + self.tensors.logits))


def read_measured(path: str | Path) -> MeasuredRun:
    """Reads a run and its measurements.

    Raises:
        DataError: the run does not exist, has recorded nothing, or has too few steps.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        why = "there is no such directory" if not path.is_dir() else f"it has no {MANIFEST}"
        raise DataError(f"--score: {path} is no run: {why}\n  try: the directory that run.dir named in the config")
    manifest = read_manifest(path, kind="run")
    events = read_events(path)[0]
    records = [event for event in events if event["event"] == "measured"]
    if not records:
        why = "it is training, was killed, or was trained by an earlier version"
        remedy = "an attempt records peak memory and step time when it ends or is stopped"
        raise DataError(f"--score: {path} has no measurement: {why}\n  try: let it end; {remedy}")
    record = records[-1]
    if record.get("steps", 0) < LEAST_STEPS or "step_s" not in record:
        why = f"its last attempt timed {record.get('steps', 0)} steps after its warm-up, and {LEAST_STEPS} are needed"
        raise DataError(f"--score: {path} is too short: {why}\n  try: a run of {2 * LEAST_STEPS} steps or more")
    nodes = [
        event["nodes"] for event in events if event["event"] == "nodes" and event["attempt"] == record.get("attempt")
    ]
    hosts = len(nodes[-1]) if nodes else 1
    return MeasuredRun(path, parse(Config, manifest.config), record, hosts)


def machine_of(run: MeasuredRun) -> Machine:
    """The shipped machine of the device that a run was trained on.

    Raises:
        ConfigError: no shipped machine has the device.
    """
    device = str(run.record["device"])
    machine = machine_of_device(device)
    if machine is None:
        why = f"{run.path} was trained on {device!r}, and the machines known are {', '.join(known_machines())}"
        raise ConfigError("--machine", why=why, remedy="--machine FILE, e.g. one that headrace plan --calibrate wrote")
    return machine


def score(run: MeasuredRun, machine: Machine) -> Score:
    """Compares a run's measurements with a machine's prediction.

    Raises:
        ConfigError, DataError: the run cannot be planned, e.g. because its architecture has no formulas.
    """
    resolved = resolve(run.config, world_size=run.record["world_size"], begun=True)
    planned = planned_run(resolved, machine, vocabulary=run.record["vocabulary"])
    return rescored(run, planned, machine)


def rescored(run: MeasuredRun, planned: PlannedRun, machine: Machine) -> Score:
    """Compares a planned run with the prediction of another machine, with as many ranks per host as the run had."""
    of, costs = planned.run, planned.costs
    machine = with_ranks(machine, run.ranks_per_host)
    parts = step_time(of, works_of(of, costs), run_rates(of, costs, machine, TYPICAL), model=SIMULATED)
    footprint = costs.shares(of).footprint
    ranks = [peak_memory(of, footprint, pp_rank=rank) for rank in range(of.topology.pp)]
    tensors = max(ranks, key=lambda each: each.total)
    allocated, resident = run.peak(_ALLOCATED), run.peak(_RESIDENT)
    memory = (
        PredictionComparison(tensors.total, allocated)
        if allocated
        else PredictionComparison(typical_peak(of, costs, machine), resident or float("nan"))
    )
    recorded = run.record.get("predicted_memory_bytes")
    return Score(
        measured=run,
        planned=planned,
        memory=memory,
        step=PredictionComparison(parts.total - parts.checkpoint, run.step_s[1]),
        parts=parts,
        tensors=tensors,
        drift=None if not recorded else tensors.total / max(recorded) - 1,
    )


def worst(errors: Sequence[float]) -> float:
    """The error that is furthest from 0."""
    return max(errors, key=abs)
