"""Searches the fastest layouts that fit, by closed forms; simulates layouts for display (`simulated`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from foundation.configfile import ConfigTree
from foundation.errors import ConfigError
from pipeline.config.load import changed
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.fp8 import check_fp8
from pipeline.plan.predict.closed_form_step import CLOSED
from pipeline.plan.predict.memory_plan import host_fits, typical_peak
from pipeline.plan.predict.model_costs import ModelCosts
from pipeline.plan.predict.plan import typical_time
from pipeline.plan.predict.planned_run import check_fp8_machine
from pipeline.plan.predict.simulated_step import SIMULATED
from pipeline.plan.search.layouts import MODES, layouts
from pipeline.runtime.machines.machine import Machine


@dataclass(frozen=True)
class Candidate:
    """A layout that the rules allow, with its peak and time.

    Attributes:
        run: the run in this layout.
        sets: settings that differ from the search's config.
        peak: typical peak of a rank, in bytes.
        step_s: typical seconds of a step; infinite where the peak is above a device's memory, or where a node's host
            has less memory or disk than its ranks need.
    """

    run: ResolvedRun
    sets: Mapping[str, Any]
    peak: float
    step_s: float

    @property
    def fits(self) -> bool:
        """Whether the peak is within a device's memory, and the node's ranks within the host's memory and disk."""
        return self.step_s < math.inf


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        looked_at: number of layouts that were computed, i.e. that the rules allow.
        refused: number of layouts that a rule refuses.
        larger: number of layouts that need more memory than a layout that does not fit, and were not computed.
        seconds: duration of the search in seconds.
        candidates: the layouts that were computed, the fastest first.
        whole: whether all layouts were compared, and Ctrl-C did not end the search.
    """

    looked_at: int
    refused: int
    larger: int
    seconds: float
    candidates: list[Candidate]
    whole: bool = True

    def fitting(self) -> list[Candidate]:
        """The layouts that fit, the fastest first."""
        return [each for each in self.candidates if each.fits]

    def pareto(self) -> list[Candidate]:
        """The Pareto front of the layouts that fit, the fastest first: no other layout is both faster and smaller."""
        front: list[Candidate] = []
        for each in self.fitting():
            if not front or each.peak < front[-1].peak:
                front.append(each)
        return front


class _Bounds:
    """Results of a smaller micro-batch of the same layout, which make other layouts need no computation.

    A smaller micro-batch means more of them, so a layout whose pipeline or mesh a rule refuses with it is refused with
    a larger one, too. Activation checkpointing is compared in the order of `MODES`. A single micro-batch has bounds of
    its own, since it adds up no gradients.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._refused: set[tuple[object, ...]] = set()
        self._too_large: dict[tuple[object, ...], int] = {}

    def known(self, sets: ConfigTree) -> bool | None:
        """Whether the layout is refused (True) or too large (False); None if it has to be computed."""
        key, mode = self._key(sets)
        if (*key, mode) in self._refused:
            return True
        return False if mode >= self._too_large.get(key, len(MODES)) else None

    def add(self, sets: ConfigTree, candidate: Candidate | None) -> None:
        """Remembers the result of a layout: None if a rule refuses it."""
        key, mode = self._key(sets)
        if candidate is None:
            self._refused.add((*key, mode))
        elif not candidate.fits:
            self._too_large[key] = min(mode, self._too_large.get(key, mode))

    def _key(self, sets: ConfigTree) -> tuple[tuple[object, ...], int]:
        rest = dict(sets)
        mode, micro = (rest.pop(each) for each in ("memory.activation_checkpointing", "train_micro_batch_size_per_gpu"))
        model_ranks = math.prod(sets[f"parallel.{axis}"] for axis in ("pp", "tp", "cp"))
        single = micro * self._run.topology.world_size == self._run.batch.samples * model_ranks
        return (*rest.values(), *(("single",) if single else ())), MODES.index(mode)


def search(
    run: ResolvedRun,
    costs: ModelCosts,
    machine: Machine,
    *,
    on_progress: Callable[[int, Candidate | None], None] = lambda _count, _best: None,
) -> Search:
    """Compares the layouts of `layouts` that the rules allow; Ctrl-C ends the comparison early.

    Args:
        run: run whose model, batch and precision are kept.
        costs: sizes and FLOPs of its model.
        machine: machine of the nodes.
        on_progress: function that gets the number of layouts so far and the fastest one that fits, after 5
            seconds and then every 20.
    """
    started = time.monotonic()
    next_report = started + _FIRST_S
    found, bounds, skipped, whole = list[Candidate](), _Bounds(run), [0, 0], True
    try:
        for sets in layouts(run, machine, experts=costs.widths.all_experts, fp8=_fp8(run, costs, machine)):
            known = bounds.known(sets)
            if known is None:
                candidate = evaluate(run, costs, machine, sets)
                bounds.add(sets, candidate)
                if candidate is None:
                    known = True
                else:
                    found.append(candidate)
            if known is not None:
                skipped[known] += 1
            if time.monotonic() > next_report:
                next_report = time.monotonic() + _EVERY_S
                own = (each for each in found if "fp8.enabled" not in each.sets)
                fastest = min(own, key=lambda each: each.step_s, default=None)
                on_progress(len(found) + sum(skipped), fastest if fastest is not None and fastest.fits else None)
    except KeyboardInterrupt:
        whole = False
    found.sort(key=lambda each: (each.step_s, len(each.sets), each.peak))
    larger, refused = skipped
    return Search(len(found), refused, larger, time.monotonic() - started, found, whole)


_FIRST_S, _EVERY_S = 5.0, 20.0
"""Seconds until the first report of progress, and between later ones."""


def _fp8(run: ResolvedRun, costs: ModelCosts, machine: Machine) -> ConfigTree | None:
    """Settings of fp8 that a run on this machine accepts; experts stay in bf16 if needed. None if it accepts none."""
    if not run.config.bf16.enabled or run.config.fp8.enabled or "fp8" not in machine.peak_flops:
        return None
    for sets in ({"fp8.enabled": True}, {"fp8.enabled": True, "fp8.experts": False}):
        try:
            section = changed(run.config, sets).fp8
            check_fp8(section, costs.model, tp=1, packages=False)
            check_fp8_machine(section, costs.model, machine)
        except ConfigError:
            continue
        return sets
    return None


def evaluate(run: ResolvedRun, costs: ModelCosts, machine: Machine, sets: Mapping[str, Any]) -> Candidate | None:
    """Evaluates a layout's peak and time; None if a rule refuses it."""
    try:
        other = in_layout(run, sets)
        if other.spare or other.batch.padding_rows:
            return None
        peak = typical_peak(other, costs, machine)
        fits = peak <= machine.memory.bytes and host_fits(other, costs, machine)
        seconds = typical_time(other, costs, machine, model=CLOSED).total if fits else math.inf
        return Candidate(other, different(run, sets), peak, seconds)
    except ConfigError:
        return None


def in_layout(run: ResolvedRun, sets: Mapping[str, Any], *, world_size: int | None = None) -> ResolvedRun:
    """The run in another layout; no fallback layout, which would hide that the layout does not fit the processes.

    Raises:
        ConfigError: a rule refuses the layout.
    """
    alone = {"launch.fallback_layouts": (), **sets}
    if run.batch.samples != run.config.train_batch_size:
        alone["train_batch_size"] = run.batch.samples
    found = resolve(changed(run.config, alone), world_size=world_size or run.topology.world_size)
    return replace(found, imbalance=run.imbalance)


def allowed(candidates: Iterable[Candidate], costs: ModelCosts, *, count: int) -> list[Candidate]:
    """The first candidates that the architecture supports; this check comes last because it takes longest."""
    found: list[Candidate] = []
    answers: dict[tuple[object, ...], bool] = {}
    for each in candidates:
        if len(found) == count:
            break
        config = each.run.config
        key = (
            config.engine,
            config.zero_optimization.stage,
            each.run.topology,
            config.parallel,
            config.memory,
            config.fp8,
        )
        asked = tuple(map(repr, key))
        if asked not in answers:
            answers[asked] = _has(each, costs)
        if answers[asked]:
            found.append(each)
    return found


def simulated(candidates: Iterable[Candidate], costs: ModelCosts, machine: Machine) -> list[Candidate]:
    """The candidates with simulated times, the fastest first."""
    found = [replace(each, step_s=typical_time(each.run, costs, machine, model=SIMULATED).total) for each in candidates]
    return sorted(found, key=lambda each: each.step_s)


def _has(candidate: Candidate, costs: ModelCosts) -> bool:
    try:
        check_layout(candidate.run, costs.model, packages=False)
    except ConfigError:
        return False
    return True


def different(run: ResolvedRun, sets: Mapping[str, Any]) -> ConfigTree:
    """The settings that differ from the run's config; sizes of 1 count as absent."""
    kept = {key: value for key, value in sets.items() if _value(run, key) != value}
    axes = ("parallel.pp", "parallel.tp", "parallel.cp", "parallel.ep")
    kept = {key: value for key, value in kept.items() if not (key in axes and value == 1 and _value(run, key) is None)}
    if run.config.launch.fallback_layouts:
        kept["launch.fallback_layouts"] = ()
    if run.batch.samples != run.config.train_batch_size:
        kept["train_batch_size"] = run.batch.samples
    return kept


def _value(run: ResolvedRun, key: str) -> Any:
    found: Any = run.config
    for part in key.split("."):
        found = getattr(found, part)
    return found
