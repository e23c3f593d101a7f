"""The part of a step's time that has two models: collectives, the pipeline, and exposed communication.

`closed_form_step.CLOSED` is for the search over a thousand layouts. `simulated_step.SIMULATED` is for display: the
plan, the score, the best layouts of a search. `step_time` computes the rest of a step, the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.closed_form_times import PipelineTime
from pipeline.plan.predict.communication import Transfer
from pipeline.plan.predict.rank_time import RankTime
from pipeline.plan.predict.rates import Rates


class StepModel(Protocol):
    """Collectives, pipeline and overlap of a step."""

    def collective(self, transfer: Transfer, rates: Rates) -> float:
        """Seconds of all collectives of a transfer, one after the other, hidden or not."""
        ...

    def pipeline(self, run: ResolvedRun, ranks: Sequence[RankTime], rates: Rates) -> PipelineTime:
        """Seconds of all passes of a step; the bubble is the busiest rank's waiting time."""
        ...

    def exposed(self, run: ResolvedRun, rank: RankTime, rates: Rates) -> float:
        """Seconds of a step's data-parallel communication in which a rank computes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Data-parallel communication of an engine: how often it gathers weights and reduces gradients.

    Attributes:
        every_pass: whether weights are gathered for each pass of each micro-batch (stage 3); else once per step.
        reductions: number of micro-batches after which gradients are reduced.
        gather_share: share of the gathers that can run beside kernels.
        reduce_share: share of the reductions that can run beside kernels.
    """

    every_pass: bool
    reductions: int
    gather_share: float
    reduce_share: float


def data_parallel(run: ResolvedRun, rates: Rates) -> DataParallel:
    """The data-parallel communication of a run's engine.

    Stage 3 gathers and reduces in all passes. The other stages gather weights beside the first forward pass (FSDP2) or
    after the update (DeepSpeed). They reduce gradients beside the last micro-batch's backward pass, and stage 2 without
    a pipeline beside every one. DeepSpeed without `overlap_comm` overlaps nothing below stage 3.
    """
    stage, deepspeed = run.config.zero_optimization.stage, run.config.engine == "deepspeed"
    given = run.config.zero_optimization.overlap_comm
    overlaps = not deepspeed or (stage == 3 if given is None else given)
    share = rates.overlap if overlaps else 0.0
    every = stage == 3 or (stage == 2 and run.topology.pp == 1)
    return DataParallel(
        every_pass=stage == 3,
        reductions=run.batch.accumulation if every else 1,
        gather_share=0.0 if deepspeed and stage < 3 else share,
        reduce_share=share,
    )
