"""Seconds of collectives and of a pipeline's step, by the simplest closed forms.

Ring collectives over the slowest link (Thakur et al. 2005, section 4), and the bubble of a schedule. The search uses
closed forms (`closed_form_step`); displayed layouts are simulated (`simulated_step`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.sections.layout import SCHEDULES
from pipeline.plan.predict.links import LinkTopology


def collective_seconds(
    kind: str, size_bytes: float, ranks: Sequence[int], topology: LinkTopology, count: int = 1
) -> float:
    """Seconds of collectives one after the other.

    A ring moves (n - 1) / n of the whole tensor of an all-gather, a reduce-scatter or an all-to-all through each of its
    n ranks, and twice as much for an all-reduce. A group within a node has the node's links. The ring of a group that
    spans nodes leaves every node once, by the network of its g ranks there: min(within, g x between).

    Args:
        kind: all_gather, reduce_scatter, all_to_all, all_reduce or send.
        size_bytes: bytes of the whole tensors of all collectives.
        ranks: global ranks of the group.
        topology: the links.
        count: number of collectives that the bytes are spread over.
    """
    n = len(ranks)
    if n < 2:
        return 0.0
    topology = topology.of(kind)
    first = ranks[0] // topology.devices_per_node
    per_node = sum(rank // topology.devices_per_node == first for rank in ranks)
    within = per_node == n
    links = topology.among(per_node, stride=ranks[1] - ranks[0], to_all=kind == "all_to_all")
    bandwidth = links.within.bandwidth
    if not within:
        bandwidth = min(bandwidth, per_node * topology.between.bandwidth)
    share = {"send": 1.0, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
    latency = (topology.within if within else topology.between).latency_s
    return size_bytes * share / bandwidth + count * latency * math.ceil(math.log2(n))


@dataclass(frozen=True)
class PipelineTime:
    """Time of a step's passes.

    Attributes:
        seconds: seconds of all micro-batches, with the bubble.
        bubble: seconds for which a rank waits for the others.
    """

    seconds: float
    bubble: float


def pipeline_step(
    schedule: str,
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float,
    *,
    virtual_stages: int = 1,
) -> PipelineTime:
    """Seconds of all forward and backward passes of the slowest rank.

    The bubble of gpipe and 1F1B is (p - 1) micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2); with v
    virtual stages it is a v-th of that. Messages take time in the bubble alone: elsewhere a pass of another micro-batch
    hides them.

    Args:
        schedule: name of the schedule, as in `parallel.schedule`.
        stages: number of pipeline ranks.
        micro_batches: number of micro-batches in a step.
        forward_s: seconds of a micro-batch's forward pass on the slowest rank, over all its virtual stages.
        backward_s: seconds of its backward pass on that rank.
        transfer_s: seconds of a message between two stages.
        virtual_stages: number of virtual stages per rank.
    """
    computing = micro_batches * (forward_s + backward_s)
    bubble = (stages - 1) * (SCHEDULES[schedule].bubble * (forward_s + backward_s) / virtual_stages + 2 * transfer_s)
    return PipelineTime(computing + bubble, bubble)
