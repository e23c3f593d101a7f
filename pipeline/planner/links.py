"""Links between the devices of a cluster, as the planner sees them."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    devices_per_node: int
    within: Link
    between: Link
