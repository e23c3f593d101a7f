"""Seconds of collectives over a topology: ring, tree and hierarchical.

Alpha-beta model: a message of s bytes takes a + s / b, with a the latency and b the bandwidth of a link. Time per rank,
for n bytes and p ranks, g on each of m nodes:

| collective | ring | tree | hierarchical |
|---|---|---|---|
| reduce-scatter, all-gather | L + (p - 1) n / (p B) | - | H |
| all-reduce | twice that | 2 ((g - 1) a_in + ceil(log2 m) a_out + n / B) | 2 H |
| all-to-all | every message by itself | - | within nodes, then between peers |

H = (g - 1) (a_in + n / (g b_in)) + (m - 1) (a_out + n / (p b_out)).
L = (p - m) a_in + (m - 1) a_out is the latency of a chunk on its way around the ring. B = min(b_in, g b_out): as in
NCCL, each network card has a ring with its share of the bytes, so that a node's whole network is used. Where devices of
a node are linked one to one, g of them have g - 1 links each, and b_in is their sum.

Sources: ring, pairwise exchange and the alpha-beta model: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of
Collective Communication Operations in MPICH, IJHPCA 19 (2005) 49-66. Tree: the double binary tree of P. Sanders,
J. Speck, J. L. Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35
(2009) 581-594; its latency and two passes at full bandwidth are those by which NCCL chooses (`src/graph/tuning.cc`).
NCCL takes the algorithm that its model says is the fastest, and so does `fastest`.

Not in the model: NCCL's protocols (LL, LL128) and their lower bandwidth, in-network reduction (SHARP), congestion.
n is the size of the whole tensor: the input of a reduce-scatter, the output of an all-gather, or all that one rank
sends in an all-to-all, its own share included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.plan.predict.links import Link, LinkTopology
from pipeline.runtime.machines.machine import Operation

Algorithm = Literal["ring", "tree", "hierarchical"]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a collective.

    Attributes:
        size: number of ranks.
        nodes: number of nodes, with equally many ranks on each.
        stride: distance of two ranks.
    """

    size: int
    nodes: int
    stride: int = 1

    @property
    def per_node(self) -> int:
        """Ranks on each node; the largest number where nodes differ."""
        return math.ceil(self.size / self.nodes)


def group_of(topology: LinkTopology, *, size: int, stride: int = 1) -> RankGroup:
    """The group of `size` ranks, `stride` ranks apart, from the first rank of a node on.

    Args:
        topology: links of the nodes; ranks are numbered node by node.
        size: number of ranks.
        stride: distance of the ranks, e.g. tp for a data-parallel group, whose members are tp ranks apart.
    """
    nodes = {rank * stride // topology.devices_per_node for rank in range(size)}
    return RankGroup(size, len(nodes), stride)


def collective_s(
    operation: Operation, algorithm: Algorithm, group: RankGroup, topology: LinkTopology, *, size: float
) -> float:
    """Seconds of a collective.

    Args:
        operation: kind of collective.
        algorithm: ring for all collectives; tree for all-reduce only; hierarchical: within nodes, then between them.
        group: ranks of the collective.
        topology: links between them.
        size: bytes of the whole tensor.

    Raises:
        ValueError: the operation has no such algorithm.
    """
    if (operation, algorithm) not in _ALGORITHMS:
        raise ValueError(f"{operation} has no algorithm {algorithm}")
    if group.size == 1:
        return 0.0
    links = topology.of(operation).among(group.per_node, stride=group.stride, to_all=operation == "all_to_all")
    return _ALGORITHMS[operation, algorithm](group, links, size)


def fastest(operation: Operation, group: RankGroup, topology: LinkTopology, *, size: float) -> tuple[Algorithm, float]:
    """The algorithm that takes the fewest seconds, and its seconds."""
    found = [
        (algorithm, collective_s(operation, algorithm, group, topology, size=size))
        for of, algorithm in _ALGORITHMS
        if of == operation
    ]
    return min(found, key=lambda each: each[1])


def send_s(topology: LinkTopology, *, size: float, same_node: bool) -> float:
    """Seconds of a message between two ranks."""
    return (topology.among(2).within if same_node else topology.between).seconds(size)


def _bandwidth(group: RankGroup, topology: LinkTopology) -> float:
    """Bytes per second that a ring or tree over the group moves: B above."""
    if group.nodes == 1:
        return topology.within.bandwidth
    network = group.per_node * topology.between.bandwidth
    return network if group.per_node == 1 else min(topology.within.bandwidth, network)


def _shares(ranks: int, link: Link, size: float) -> float:
    """Seconds of p - 1 messages of n / p bytes."""
    return (ranks - 1) * link.seconds(size / ranks)


def _ring(times: int) -> Callable[[RankGroup, LinkTopology, float], float]:
    def seconds(group: RankGroup, topology: LinkTopology, size: float) -> float:
        near = (group.size - group.nodes) * topology.within.latency_s
        latency = near + (group.nodes - 1) * topology.between.latency_s
        return times * (latency + (group.size - 1) * size / (group.size * _bandwidth(group, topology)))

    return seconds


def _tree(group: RankGroup, topology: LinkTopology, size: float) -> float:
    """Seconds of a chain within each node and a double binary tree over the nodes: reduction, then broadcast."""
    near = (group.per_node - 1) * topology.within.latency_s
    latency = near + math.ceil(math.log2(group.nodes)) * topology.between.latency_s
    return 2 * (latency + size / _bandwidth(group, topology))


def _hierarchical_all_reduce(group: RankGroup, topology: LinkTopology, size: float) -> float:
    """Seconds of a reduce-scatter within nodes, an all-reduce of the shares between nodes, an all-gather within."""
    return 2 * _hierarchical_half(group, topology, size)


def _hierarchical_half(group: RankGroup, topology: LinkTopology, size: float) -> float:
    """Seconds of a reduce-scatter within nodes, then of the shares between nodes; an all-gather is the reverse."""
    within = _shares(group.per_node, topology.within, size)
    return within + _shares(group.nodes, topology.between, size / group.per_node)


def _pairwise(group: RankGroup, topology: LinkTopology, size: float) -> float:
    """Seconds in which each rank sends its shares to all others; ranks of one node use the links within."""
    share = size / group.size
    near, far = group.per_node - 1, group.size - group.per_node
    return near * topology.within.seconds(share) + far * topology.between.seconds(share)


def _hierarchical_all_to_all(group: RankGroup, topology: LinkTopology, size: float) -> float:
    """Seconds of messages within nodes, which collect a node's data for each peer, then of one to each node."""
    return _shares(group.per_node, topology.within, size) + _shares(group.nodes, topology.between, size)


_ALGORITHMS: dict[tuple[Operation, Algorithm], Callable[[RankGroup, LinkTopology, float], float]] = {
    ("all_reduce", "ring"): _ring(2),
    ("all_reduce", "tree"): _tree,
    ("all_reduce", "hierarchical"): _hierarchical_all_reduce,
    ("reduce_scatter", "ring"): _ring(1),
    ("reduce_scatter", "hierarchical"): _hierarchical_half,
    ("all_gather", "ring"): _ring(1),
    ("all_gather", "hierarchical"): _hierarchical_half,
    ("all_to_all", "ring"): _pairwise,
    ("all_to_all", "hierarchical"): _hierarchical_all_to_all,
}
