"""Finds the one change of the layout that gives most tokens per second and fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError
from pipeline.config.load import as_sets, changed
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.layout import SCHEDULES
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.rank_model import Widths
from pipeline.plan.predict.closed_form_step import CLOSED
from pipeline.plan.predict.memory_plan import host_fits, typical_peak
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.plan import Plan, typical_time
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.runtime.machines.machine import Machine

_WORTH_IT = 1.01
"""Least speed-up of a proposed change."""

_SIMULATED = 4
"""Number of changes that are simulated: the fastest by closed forms."""


@dataclass(frozen=True)
class Change:
    """A change of the config.

    Attributes:
        sets: dotted keys with their values.
        peak: typical peak per rank, in bytes.
        step_s: typical seconds of a step, simulated for the change that is proposed.
    """

    sets: Mapping[str, Any]
    peak: float
    step_s: float

    def __str__(self) -> str:
        return as_sets(self.sets)


def nearest_change(run: ResolvedRun, costs: ModelCosts, machine: Machine, plan: Plan) -> Change | None:
    """The change that helps most: the fastest that fits.

    Only the layout changes: the loss curve stays the same. For a run that does not fit, changes of one setting are
    tried first, then changes of two.

    Returns:
        None where no change fits, or none makes a fitting run faster.
    """
    single = [each for each in _neighbours(run, costs.widths) if machine.gpu or "compile.enabled" not in each]
    found = [each for sets in single if (each := evaluated(run, costs, machine, sets)) is not None]
    if plan.memory.fits:
        own = typical_time(run, costs, machine, model=CLOSED).total
        found = [each for each in found if each.step_s * _WORTH_IT < own]
    elif not found:
        pairs = ({**a, **b} for number, a in enumerate(single) for b in single[:number] if not a.keys() & b.keys())
        found = [each for sets in pairs if (each := evaluated(run, costs, machine, sets)) is not None]
    best = _simulated(run, costs, machine, sorted(found, key=lambda change: change.step_s))
    if best is None or (plan.memory.fits and best.step_s * _WORTH_IT >= plan.step_s.typical):
        return None
    return best


def _simulated(run: ResolvedRun, costs: ModelCosts, machine: Machine, changes: Sequence[Change]) -> Change | None:
    """The fastest by simulation of the first few changes, in order of speed, that the architecture supports."""
    found: list[Change] = []
    for each in changes:
        if len(found) == _SIMULATED:
            break
        with suppress(ConfigError):
            other = applied(run, each.sets)
            check_layout(other, costs.model, packages=False)
            seconds = typical_time(other, costs, machine, model=SIMULATED).total
            found.append(replace(each, step_s=seconds))
    return min(found, key=lambda change: change.step_s, default=None)


def evaluated(run: ResolvedRun, costs: ModelCosts, machine: Machine, sets: Mapping[str, Any]) -> Change | None:
    """Evaluates a change's peak and time; None if a rule refuses it or it does not fit."""
    try:
        other = applied(run, sets)
        if (
            other.spare
            or other.batch.padding_rows > run.batch.padding_rows
            or other.batch.samples != run.batch.samples
            or other.topology.world_size != run.topology.world_size
        ):
            return None
        peak = typical_peak(other, costs, machine)
        if peak > machine.memory.bytes or not host_fits(other, costs, machine):
            return None
        return Change(sets, peak, typical_time(other, costs, machine, model=CLOSED).total)
    except ConfigError:
        return None


def applied(run: ResolvedRun, sets: Mapping[str, Any]) -> ResolvedRun:
    """The run with other settings on the same processes; no fallback layout, which would hide a misfit."""
    config = changed(run.config, {"launch.fallback_layouts": (), **sets})
    return replace(resolve(config, world_size=run.topology.world_size), imbalance=run.imbalance)


def _neighbours(run: ResolvedRun, widths: Widths) -> Iterator[ConfigTree]:
    """Changes of one setting; the rules check them later."""
    yield from _batches(run)
    yield from _sharding(run)
    yield from _axes(run, widths)
    yield from _kernels(run)


def _batches(run: ResolvedRun) -> Iterator[ConfigTree]:
    """Yields other micro-batches of the same global batch, and activation checkpointing."""
    config, micro = run.config, run.batch.micro
    derived = {} if config.gradient_accumulation_steps is None else {"gradient_accumulation_steps": None}
    sizes = {micro * 4, micro * 2, micro // 2, micro // 4, 1} - {0, micro}
    if config.train_batch_size is not None:
        yield from ({"train_micro_batch_size_per_gpu": size, **derived} for size in sorted(sizes, reverse=True))
    modes = {"none", "selective", "full"} - {config.memory.activation_checkpointing}
    yield from ({"memory.activation_checkpointing": mode} for mode in sorted(modes))


def _sharding(run: ResolvedRun) -> Iterator[ConfigTree]:
    config, topology = run.config, run.topology
    yield from ({"zero_optimization.stage": each} for each in range(4) if each != config.zero_optimization.stage)
    if config.parallel.hybrid_shard_size is None and topology.dp * topology.cp > _NODE:
        yield {"parallel.hybrid_shard_size": _NODE}
    if config.engine == "deepspeed" and config.zero_optimization.offload_optimizer.device == "none":
        yield {"zero_optimization.offload_optimizer.device": "cpu"}


def _axes(run: ResolvedRun, widths: Widths) -> Iterator[ConfigTree]:
    """Yields other sizes of an axis, and other schedules of a pipeline."""
    sparse = ("ep",) if widths.experts else ()
    for axis in ("tp", "pp", "cp", *sparse):
        size = getattr(run.topology, axis)
        yield from ({f"parallel.{axis}": size * each} for each in (2, 4, 8))
        yield from ({f"parallel.{axis}": size // each} for each in (2, 4) if size >= each)
    if run.topology.ep > 1 and not run.config.parallel.ep_overlap:
        yield {"parallel.ep_overlap": True}
    if run.topology.pp > 1:
        others = {name for name, kind in SCHEDULES.items() if kind.searched} - {run.config.parallel.schedule}
        yield from ({"parallel.schedule": each, "parallel.virtual_stages": None} for each in sorted(others))
        yield {"parallel.virtual_stages": run.virtual_stages * 2}


def _kernels(run: ResolvedRun) -> Iterator[ConfigTree]:
    if run.config.compile.enabled is False:
        yield {"compile.enabled": True}
    if run.config.loss.chunk is None:
        yield {"loss.chunk": 2048}


_NODE = 8
"""Ranks of a hybrid shard group."""
