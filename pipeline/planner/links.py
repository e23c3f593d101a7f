"""Links between the devices of a cluster, as the planner sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Link:
    """A device's connection to others, one direction.

    Attributes:
        bandwidth: bytes per second that one device sends while it receives as many
        latency_s: seconds of one message of no bytes
    """

    bandwidth: float
    latency_s: float

    def seconds(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        return self.latency_s + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes of equal devices: ranks are numbered node by node.

    Attributes:
        devices_per_node: devices that `within` connects
        within: between two devices of a node
        between: between two devices of different nodes, each with its share of the node's network
        operations: kind of collective -> what stands for `within`, where it was measured
    """

    devices_per_node: int
    within: Link
    between: Link
    operations: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def of(self, kind: str) -> Topology:
        """The links as one kind of collective meets them: all_reduce, all_gather, reduce_scatter or all_to_all."""
        own = self.operations.get(kind)
        return self if own is None else replace(self, within=own, operations={})
