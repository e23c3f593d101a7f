"""Simulates a step's communication and pipeline: the engine's own program and links, layers beside collectives.

One replica of the pipeline is simulated, that of rank 0, and one rank per stage of each data-parallel group: the ranks
of a group do the same at the same time.

Collectives are those of the library. NCCL: rings, and for an all-reduce a double binary tree where NCCL's model finds
it faster (its hierarchical algorithms need in-network reduction). gloo, on CPUs: rings.

Simplified: exposed data-parallel communication comes after the pipeline's passes, instead of making each pass longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.plan.predict.closed_form_times import PipelineTime
from pipeline.plan.predict.collectives import Algorithm, RankGroup, collective_s, send_s
from pipeline.plan.predict.communication import Transfer
from pipeline.plan.predict.overlap import LayerCosts, overlapped
from pipeline.plan.predict.pipeline_simulation import StageTimes, Timeline, simulate_pipeline
from pipeline.plan.predict.rank_time import RankTime
from pipeline.plan.predict.rates import Rates
from pipeline.plan.predict.schedule_programs import program_of
from pipeline.plan.predict.step_model import StepModel, data_parallel
from pipeline.runtime.machines.machine import Operation


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """A unit of sharded weights.

    Attributes:
        name: "embedding", "layer 0" (the first of the rank), ..., "head".
        elements: number of its weights on this rank, before sharding; experts that no other rank holds are not counted.
        forward_s, backward_s: seconds of a micro-batch's passes, with the communication for which the passes wait.
    """

    name: str
    elements: int
    forward_s: float
    backward_s: float


def units_of(rank: RankTime) -> list[GatheredUnit]:
    """The units of a rank in the order of the forward pass.

    The layers of a stage take equally long. A final norm counts with the head; a tied head with the embedding.
    """
    layout = rank.work.layout
    model = layout.rank if layout.run.topology.edp > 1 else layout.apart()[0].rank
    head = model.rest if not model.first else model.head if model.last and model.separate else 0
    embedding = [GatheredUnit("embedding", model.rest - head, 0.0, 0.0)] if model.first else []
    each = rank.inside / max(1, len(model.layers))
    seconds = [
        (stage.decoder.forward / stage.layers + each / 3, stage.decoder.backward / stage.layers + each * 2 / 3)
        for stage in rank.stages
        for _ in range(stage.layers)
    ]
    layers = [
        GatheredUnit(f"layer {number}", elements, *passes)
        for number, (elements, passes) in enumerate(zip(model.layers, seconds, strict=True))
    ]
    last = [stage.head for stage in rank.stages if stage.head.forward]
    heads = [GatheredUnit("head", head, part.forward, part.backward) for part in last]
    return [*embedding, *layers, *heads]


def algorithms(operation: Operation, *, gpu: bool) -> tuple[Algorithm, ...]:
    """The algorithms among which NCCL (gloo on CPUs) chooses."""
    return ("ring", "tree") if gpu and operation == "all_reduce" else ("ring",)


class SimulatedStep:
    """Step model by simulation: every rank has its own times."""

    def collective(self, transfer: Transfer, rates: Rates) -> float:
        """Seconds of equal collectives by the library's fastest algorithm, or of messages over the slowest link."""
        per_node = rates.topology.devices_per_node
        nodes = len({rank // per_node for rank in transfer.ranks})
        size = transfer.bytes / transfer.count
        if transfer.kind == "send":
            return transfer.count * send_s(rates.topology, size=size, same_node=nodes == 1)
        group = RankGroup(len(transfer.ranks), nodes, transfer.ranks[1] - transfer.ranks[0])
        return transfer.count * min(
            collective_s(transfer.kind, algorithm, group, rates.topology, size=size)
            for algorithm in algorithms(transfer.kind, gpu=rates.gpu)
        )

    def pipeline(self, run: ResolvedRun, ranks: Sequence[RankTime], rates: Rates) -> PipelineTime:
        """Time of the engine's program, executed with every stage's own times."""
        busy = run.batch.accumulation * max(rank.busy for rank in ranks)
        if run.topology.pp == 1:
            return PipelineTime(busy, 0.0)
        seconds = pipeline_timeline(run, ranks, rates).seconds
        return PipelineTime(seconds, max(0.0, seconds - busy))

    def exposed(self, run: ResolvedRun, rank: RankTime, rates: Rates) -> float:
        """Exposed seconds of gathers and reductions by layer: at least the share that cannot run beside kernels."""
        how, count = data_parallel(run, rates), run.batch.accumulation
        units = units_of(rank)
        if how.every_pass:
            layers = layer_costs(units, gather_s=rank.weights / count, reduce_s=rank.gradients / count, regather=True)
            whole = rank.weights + rank.gradients
            return _limited(count * overlapped(layers).exposed_s, whole, share=how.gather_share)
        # weights that are gathered once arrive before the forward pass ends: gathers and reductions do not meet
        gathers = layer_costs(units, gather_s=rank.weights, reduce_s=0.0, regather=False)
        reductions = layer_costs(units, gather_s=0.0, reduce_s=rank.gradients / how.reductions, regather=False)
        reduced = how.reductions * overlapped(reductions, regather=False).exposed_s
        gathered = overlapped(gathers, regather=False).exposed_s
        return _limited(reduced, rank.gradients, share=how.reduce_share) + _limited(
            gathered, rank.weights, share=how.gather_share
        )


def _limited(exposed_s: float, whole_s: float, *, share: float) -> float:
    """Exposed seconds, where at most `share` of the communication runs beside kernels."""
    return max(exposed_s, (1 - share) * whole_s)


def pipeline_timeline(run: ResolvedRun, ranks: Sequence[RankTime], rates: Rates) -> Timeline:
    """Simulates the passes of a step of a pipeline.

    Args:
        run: run with pp of 2 or more.
        ranks: times of every pipeline rank.
        rates: rates of the machine.
    """
    program = program_of(run)
    times = [_stage_times(ranks[program.rank_of(stage)], stage // len(ranks)) for stage in range(program.stages)]
    layout = ranks[0].work.layout
    size = layout.hidden / run.topology.tp
    nodes = [run.topology.rank(pp=rank) // rates.topology.devices_per_node for rank in range(len(ranks))]
    borders = list(pairwise(program.placed))
    transfers = [
        send_s(rates.topology, size=size, same_node=nodes[a] == nodes[b]) if a != b else 0.0 for a, b in borders
    ]
    return simulate_pipeline(program, times, transfers=transfers, in_order=rates.gpu)


def _stage_times(rank: RankTime, number: int) -> StageTimes:
    """Times of a rank's stage; communication for which layers wait is spread over the stages by number of layers."""
    stage = rank.stages[number]
    layers = sum(each.layers for each in rank.stages)
    inside = rank.inside * (stage.layers / layers if layers else 1 / len(rank.stages))
    return StageTimes(
        forward_s=stage.forward + inside / 3,
        input_backward_s=stage.backward - stage.weights + inside * 2 / 3,
        weight_backward_s=stage.weights,
    )


def layer_costs(units: Sequence[GatheredUnit], *, gather_s: float, reduce_s: float, regather: bool) -> list[LayerCosts]:
    """Spreads the communication of a micro-batch over a rank's units, by their elements.

    Args:
        units: units of the rank, in the order of the forward pass.
        gather_s: seconds of all gathers of the micro-batch.
        reduce_s: seconds of all reductions of the micro-batch.
        regather: whether the backward pass gathers all but the last unit again.
    """
    elements = [unit.elements for unit in units]
    gathered = sum(elements) + (sum(elements[:-1]) if regather else 0)
    whole = sum(elements)
    return [
        LayerCosts(
            unit.forward_s, unit.backward_s, gather_s * unit.elements / gathered, reduce_s * unit.elements / whole
        )
        for unit in units
    ]


SIMULATED: StepModel = SimulatedStep()
