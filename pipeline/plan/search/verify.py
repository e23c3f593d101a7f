"""Executes the steps of candidate layouts on fake tensors, to measure their memory; writes the config of the best."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from foundation.configfile import ConfigTree, overridden, set_value
from foundation.shipped import find_shipped
from pipeline.config.load import as_overrides
from pipeline.engines.sizes.memory import peak_memory
from pipeline.plan.answer import ERRORS, published
from pipeline.plan.fake_gpu.case import StepCase, case_process
from pipeline.plan.predict.memory_plan import memory_plan
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.search import Candidate

_PROCESSES = 2
"""Number of processes that execute steps at the same time."""
_ACCUMULATED = 2
"""Number of micro-batches of an executed step."""
_AS_FAST = 1.01
"""Ratio of times up to which two layouts count as equally fast: their intervals are far wider."""


@dataclass(frozen=True)
class Verified:
    """A candidate whose step was executed, or not.

    Attributes:
        candidate: the layout, with its peak and time by the formulas.
        peak: bytes of the executed step plus the formulas' overhead; None where no step was executed.
        why_not: reason why no step was executed; empty where one was, or where none was tried.
    """

    candidate: Candidate
    peak: float | None
    why_not: str = ""

    def fits(self, memory: float) -> bool:
        """Whether the executed peak, or else the formulas' peak, is within `memory` bytes."""
        return (self.candidate.peak if self.peak is None else self.peak) <= memory


def verify(
    candidates: Sequence[Candidate],
    planned: PlannedRun,
    config: str,
    overrides: Sequence[str],
    *,
    budget_s: float = math.inf,
    on_result: Callable[[Verified], None] = lambda _each: None,
) -> list[Verified]:
    """Executes a step of every candidate, in two processes.

    Args:
        candidates: candidates to execute, the most promising first.
        planned: the run of the search.
        config: path of its config.
        overrides: overrides of the config, as texts of `--set`.
        budget_s: seconds of execution, summed over both processes, after which no other step begins.
        on_result: function called after each execution, from one thread at a time.
    """
    found: dict[int, Verified] = {}
    waiting, lock, left = list(range(len(candidates))), Lock(), [budget_s]

    def execute() -> None:
        with case_process() as result_of:
            while True:
                with lock:
                    if not waiting or left[0] <= 0:
                        return
                    number = waiting.pop(0)
                each = candidates[number]
                case = _case(each, planned, config, overrides)
                refused: dict[str, Any] = {"error": case, "seconds": 0.0}
                result = result_of(case) if isinstance(case, StepCase) else refused
                with lock:
                    left[0] -= result["seconds"]
                    rank = case.pp_rank if isinstance(case, StepCase) else 0
                    found[number] = _verified(each, result, rank, planned)
                    on_result(found[number])

    with ThreadPoolExecutor(_PROCESSES) as threads:
        for done in [threads.submit(execute) for _ in range(min(_PROCESSES, len(candidates)))]:
            done.result()
    why = f"the {budget_s:g} s for it were over; --verify N executes N"
    return [found.get(number) or Verified(each, None, why) for number, each in enumerate(candidates)]


def _case(candidate: Candidate, planned: PlannedRun, config: str, overrides: Sequence[str]) -> StepCase | str:
    """The step to execute for a candidate, or the reason why no step is executed.

    Without a pipeline two micro-batches are enough: from the second on memory does not grow (benchmarks/README.md).
    """
    rank = memory_plan(candidate.run, planned.costs, planned.machine).pp_rank
    deepspeed = candidate.run.config.engine == "deepspeed"
    if deepspeed and rank:
        return "later stages of DeepSpeed's pipeline are not executed on fake tensors"
    sets, batch = dict(candidate.sets), candidate.run.batch
    if candidate.run.topology.pp == 1 and batch.accumulation > _ACCUMULATED and batch.shares is None:
        samples = batch.samples * _ACCUMULATED // batch.accumulation
        sets |= {"train_batch_size": samples, "gradient_accumulation_steps": _ACCUMULATED}
    world = candidate.run.topology.world_size
    steps, cpu = 2 if deepspeed else 1, not planned.machine.gpu
    return StepCase(config, world, rank, planned.vocabulary, (*overrides, *as_overrides(sets)), steps, cpu)


def _verified(candidate: Candidate, result: dict[str, object], rank: int, planned: PlannedRun) -> Verified:
    if "error" in result:
        return Verified(candidate, None, str(result["error"]))
    report = result["report"]
    assert isinstance(report, dict)
    footprint = planned.costs.shares(candidate.run).footprint
    formula = peak_memory(candidate.run, footprint, pp_rank=rank, cpu=not planned.machine.gpu).total
    return Verified(candidate, candidate.peak - formula + report["peak"])


def winner_of(verified: Sequence[Verified], *, memory: float, experts: bool = False) -> Verified | None:
    """The layout with the fewest changed settings among those that fit and are within 1 % of the fastest.

    A layout whose kind was compared with published runs goes before one whose kind was not, if it takes at most
    the plans' error longer.

    Layouts in another precision than the config's are not considered: their loss curve differs. Among layouts with
    equally few changes, the one with the smallest peak wins.
    """
    fitting = [each for each in verified if each.fits(memory) and "fp8.enabled" not in each.candidate.sets]
    if not fitting:
        return None
    near = (1 + ERRORS["experts" if experts else "dense"]) * min(each.candidate.step_s for each in fitting)
    known = [each for each in fitting if published(each.candidate.run, experts=experts)]
    fitting = [each for each in known if each.candidate.step_s <= near] or fitting
    fastest = min(each.candidate.step_s for each in fitting)
    equal = [each for each in fitting if each.candidate.step_s <= _AS_FAST * fastest]
    return min(equal, key=lambda each: (_changes(each.candidate), each.candidate.peak))


def write_config(candidate: Candidate, path: Path, *, config: str, overrides: Sequence[str]) -> None:
    """Writes a config that extends the one of the search.

    Args:
        candidate: the layout.
        path: path of the new file.
        config: path of the config of the search.
        overrides: overrides that the search was given, as texts of `--set`.
    """
    source = Path(config) if Path(config).exists() else find_shipped(Path(config)) or Path(config)
    raw: ConfigTree = overridden({}, overrides)
    for key, value in candidate.sets.items():
        set_value(raw, key, list(value) if isinstance(value, tuple) else value)
    raw = {"extends": os.path.relpath(source.resolve(), path.parent.resolve()), **raw}
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _changes(candidate: Candidate) -> int:
    return sum(value is not None for value in candidate.sets.values())
