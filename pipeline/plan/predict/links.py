"""Links between the devices of a cluster, as the planner sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Link:
    """A device's connection to other devices, in one direction.

    Attributes:
        bandwidth: bytes per second that one device sends while it receives as many
        latency_s: seconds of a message without data
    """

    bandwidth: float
    latency_s: float

    def seconds(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        return self.latency_s + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class LinkTopology:
    """Nodes of equal devices: ranks are numbered node by node.

    Attributes:
        devices_per_node: number of devices that `within` connects
        within: link between two devices of a node
        between: link between two devices of different nodes, each with its share of the node's network
        operations: kind of collective -> measured link that replaces `within`
        within_links: number of links whose sum is `within`, one to each other device of the node; 1 for a switch
        bridge_devices: number of devices of a node that share a host bridge; 0 without bridges
        between_bridges: bytes per second from one bridge to the next, all devices together
    """

    devices_per_node: int
    within: Link
    between: Link
    operations: Mapping[str, Link] = field(default_factory=dict, hash=False)
    within_links: int = 1
    bridge_devices: int = 0
    between_bridges: float = 0.0

    def of(self, kind: str) -> LinkTopology:
        """The links for one kind of collective: all_reduce, all_gather, reduce_scatter or all_to_all."""
        own = self.operations.get(kind)
        return self if own is None else replace(self, within=own, operations={})

    def among(self, devices: int, *, stride: int = 1, to_all: bool = False) -> LinkTopology:
        """The links among some devices of a node: if every two devices have a link, only the links between these.

        A ring over several host bridges crosses from one to the next once in each direction. Groups with a stride lie
        between one another, so as many cross at once. In an all-to-all each device sends to every other: with g devices
        on two bridges g / 4 times the bytes of a ring cross.

        Args:
            devices: number of devices of the group.
            stride: distance of the devices.
            to_all: whether every device sends to all others at once.
        """
        if self.bridge_devices and devices > 1 and (devices - 1) * stride >= self.bridge_devices:
            crossing = self.between_bridges / (stride * max(1.0, devices / 4 if to_all else 1.0))
            return replace(self, within=replace(self.within, bandwidth=min(self.within.bandwidth, crossing)))
        if self.within_links == 1 or devices < 2:
            return self
        share = min(1.0, (devices - 1) / self.within_links)
        within = replace(self.within, bandwidth=self.within.bandwidth * share)
        return replace(self, within=within, within_links=1)
