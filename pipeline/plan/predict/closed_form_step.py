"""A step's communication and pipeline by closed forms: ring collectives, the papers' bubbles, overlapped sums.

The search uses them, because it computes a thousand layouts; displayed layouts are simulated (`simulated_step`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.closed_form_times import PipelineTime, collective_seconds, pipeline_step
from pipeline.plan.predict.communication import Transfer
from pipeline.plan.predict.rank_time import RankTime
from pipeline.plan.predict.rates import Rates
from pipeline.plan.predict.step_model import StepModel, data_parallel


class ClosedForms:
    """Step model by closed forms: the slowest rank's times stand for all ranks."""

    def collective(self, transfer: Transfer, rates: Rates) -> float:
        """Seconds of a ring over the slowest link, with the latency of a tree."""
        return collective_seconds(transfer.kind, transfer.bytes, transfer.ranks, rates.topology, transfer.count)

    def pipeline(self, run: ResolvedRun, ranks: Sequence[RankTime], rates: Rates) -> PipelineTime:  # noqa: ARG002
        """Time of a pipeline whose ranks are all as slow as the busiest one."""
        slowest = max(ranks, key=lambda rank: rank.busy)
        return pipeline_step(
            run.config.parallel.schedule,
            run.topology.pp,
            run.batch.accumulation,
            slowest.forward + slowest.inside / 3,
            slowest.backward + slowest.inside * 2 / 3,
            slowest.message,
            virtual_stages=run.virtual_stages,
        )

    def exposed(self, run: ResolvedRun, rank: RankTime, rates: Rates) -> float:
        """Seconds of communication that outlasts the passes beside it, or cannot run beside them."""
        how, count = data_parallel(run, rates), run.batch.accumulation
        if how.every_pass:
            return _unhidden(rank.weights + rank.gradients, beside=count * rank.busy, share=how.gather_share)
        reduced = _unhidden(rank.gradients, beside=how.reductions * rank.backward, share=how.reduce_share)
        return reduced + _unhidden(rank.weights, beside=rank.forward, share=how.gather_share)


def _unhidden(seconds: float, *, beside: float, share: float) -> float:
    """Seconds left of some communication when `share` of it is hidden behind at most `beside` seconds of kernels."""
    return seconds - min(seconds * share, beside)


CLOSED: StepModel = ClosedForms()
