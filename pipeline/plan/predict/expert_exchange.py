"""Seconds of an exchange of rows between expert-parallel ranks that sends each token once to a node.

A token has k experts on ep ranks of M nodes. If they are drawn evenly, they are on M (1 - (1 - 1/M)^k) nodes and on
ep (1 - (1 - 1/ep)^k) ranks on average. A node gets a token once from the network, and its ranks pass it on over their
own links at the same time: the slower of the two counts. Sources: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2;
DeepEP. Not in the model: node-limited routing, which sends less, and rows sent in fp8 (NVIDIA's recipes send bf16).
"""

from __future__ import annotations

from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.engines.sizes.traffic import TrafficLayout
from pipeline.plan.predict.communication import Transfer
from pipeline.plan.predict.rates import Rates


def is_deduplicated(layout: TrafficLayout, rates: Rates) -> bool:
    """Whether a token is sent once to a node: by the machine's engine, or by the run's kernels (DeepEP, HybridEP)."""
    return rates.deduplicated or expert_exchange(layout.run.config) != "all_to_all"


def deduplicated_s(transfer: Transfer, layout: TrafficLayout, rates: Rates) -> float:
    """Seconds of all exchanges of a transfer, one after the other.

    Args:
        transfer: exchange that counts a row for every chosen expert.
        layout: sizes of the model.
        rates: rates of the machine.
    """
    topology, ranks, chosen = rates.topology.of("all_to_all"), len(transfer.ranks), layout.widths.experts
    nodes = len({rank // topology.devices_per_node for rank in transfer.ranks})
    within = topology.among(ranks // nodes, to_all=True).within
    near = transfer.bytes * _places(ranks, chosen) / chosen * (ranks - 1) / ranks / within.bandwidth
    far = transfer.bytes * _places(nodes, chosen) / chosen * (nodes - 1) / nodes / topology.between.bandwidth
    latency = (within if nodes == 1 else topology.between).latency_s
    return max(near, far) + transfer.count * latency


def _places(number: int, chosen: int) -> float:
    """Mean number of `number` places that have at least one of a token's experts."""
    return number * (1 - (1 - 1 / number) ** chosen)
