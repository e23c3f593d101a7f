"""Executes the steps of candidate layouts on fake tensors: the engine itself says what memory they need."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.config.load import as_overrides
from pipeline.engines.sizes.memory import peak_memory
from pipeline.plan.fake_gpu.case import StepCase, run_cases
from pipeline.plan.predict.memory_plan import memory_plan
from pipeline.plan.predict.planned_run import PlannedRun
from pipeline.plan.search.search import Candidate

_PROCESSES = 2
"""That execute steps at a time."""


@dataclass(frozen=True)
class Verified:
    """A candidate whose step was executed, or not.

    Attributes:
        candidate: by the formulas.
        peak: bytes of the executed step, with the overhead that the formulas add; None where it was not executed.
        why_not: the reason.
    """

    candidate: Candidate
    peak: float | None
    why_not: str = ""

    def fits(self, memory: float) -> bool:
        """Whether the executed peak, or else that of the formulas, is within so many bytes."""
        return (self.candidate.peak if self.peak is None else self.peak) <= memory


def verify(
    candidates: Sequence[Candidate], planned: PlannedRun, config: str, overrides: Sequence[str]
) -> list[Verified]:
    """Executes a step of every candidate, in two processes.

    Args:
        candidates: to execute.
        planned: the run of the search.
        config: path of its config.
        overrides: as of `--set`.
    """
    cases: dict[int, StepCase] = {}
    found: dict[int, Verified] = {}
    for number, each in enumerate(candidates):
        rank = memory_plan(each.run, planned.costs, planned.machine).pp_rank
        deepspeed = each.run.config.engine == "deepspeed"
        if deepspeed and rank:
            found[number] = Verified(
                each, None, "later stages of DeepSpeed's pipeline are not executed on fake tensors"
            )
            continue
        sets = (*overrides, *as_overrides(each.sets))
        world = each.run.topology.world_size
        cpu = not planned.machine.gpu
        cases[number] = StepCase(config, world, rank, planned.vocabulary, sets, 2 if deepspeed else 1, cpu)
    numbers = list(cases)
    shares = [numbers[first::_PROCESSES] for first in range(_PROCESSES)]
    with ThreadPoolExecutor(_PROCESSES) as threads:
        for share, results in zip(
            shares, threads.map(lambda share: run_cases([cases[n] for n in share]), shares), strict=True
        ):
            for number, result in zip(share, results, strict=True):
                found[number] = _verified(candidates[number], result, cases[number].pp_rank, planned)
    return [found[number] for number in range(len(candidates))]


def _verified(candidate: Candidate, result: dict[str, object], rank: int, planned: PlannedRun) -> Verified:
    if "error" in result:
        return Verified(candidate, None, str(result["error"]))
    report = result["report"]
    assert isinstance(report, dict)
    footprint = planned.costs.shares(candidate.run).footprint
    formula = peak_memory(candidate.run, footprint, pp_rank=rank, cpu=not planned.machine.gpu).total
    return Verified(candidate, candidate.peak - formula + report["peak"])
