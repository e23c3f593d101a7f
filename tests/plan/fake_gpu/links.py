"""The time that a step's collectives take on the links between GPUs: what NVLink and the network carry at most.

A ring moves (n - 1) / n of the whole tensor of an all-gather, a reduce-scatter or an all-to-all through each of its n
ranks, and twice that of an all-reduce (Thakur et al. 2005, section 4). A group within a node has NVLink. The ring of a
group that spans nodes leaves every node once, by the adapters of its g ranks there: min(NVLink, g x network). A message
has the link between its two ranks; received ones travel at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config.topology import AXES, Topology
from pipeline.runtime.machines.known import load_machine

NODE = 8
"""GPUs of a node: HGX H100, H200 and B200."""

MACHINES = {"H100 SXM": load_machine("h100"), "H200": load_machine("h200"), "B200": load_machine("b200")}

LINKS = {name: (each.links.within.bytes_per_s, each.links.between.bytes_per_s) for name, each in MACHINES.items()}
"""Bytes/s that a GPU sends by NVLink, and by its network adapter; the machines' files have the sources."""

Rows = Iterable[tuple[str, str, int]]
"""(kind, axes, bytes of the whole tensors) of the collectives of a step."""


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a step.

    Attributes:
        bytes: along these axes.
        per_node: ranks of the group in a node; all of them of a group within one.
        within: whether the group is within a node.
        exposed: whether layers wait for it: between the shards of a layer (tp) or of a sequence (cp).
    """

    bytes: float
    per_node: int
    within: bool
    exposed: bool

    def seconds(self, gpu: str) -> float:
        """On the links of such a GPU, of `LINKS`."""
        nvlink, network = LINKS[gpu]
        return self.bytes / (nvlink if self.within else min(nvlink, self.per_node * network))


def sent(topology: Topology, rows: Rows) -> list[Sent]:
    """What one rank of a layout sends, for every collective."""
    found = []
    for kind, axes, size in rows:
        group = _group(topology, axes)
        if kind == "recv" or len(group) == 1:
            continue
        per_node = sum(rank // NODE == 0 for rank in (group[:2] if kind == "send" else group))
        n = len(group)
        times = {"send": 1.0, "broadcast": 1.0, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
        within = per_node == (2 if kind == "send" else n)
        found.append(Sent(times * size, per_node, within, axes in ("tp", "cp") and kind != "send"))
    return found


def _group(topology: Topology, axes: str) -> list[int]:
    """The ranks of rank 0's group along axes; see `step.axes_of`."""
    if axes in ("ep", "edp"):
        return list(range(topology.ep) if axes == "ep" else range(0, topology.stage_ranks, topology.ep))
    along = AXES if axes == "world" else axes.split(" x ")
    varied = {axis: range(size if axis in along else 1) for axis, size in zip(AXES, topology.sizes, strict=True)}
    return [
        topology.rank(pp=pp, dp=dp, cp=cp, tp=tp)
        for pp in varied["pp"]
        for dp in varied["dp"]
        for cp in varied["cp"]
        for tp in varied["tp"]
    ]
