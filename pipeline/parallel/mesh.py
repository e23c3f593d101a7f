"""The process groups of a topology. The default process group is open.

`data` is dp and cp together: the ranks that hold the same parameters and see different tokens, over which gradients
are summed. With hybrid sharding it is cut in two: `shard` ranks share a parameter's parts, `replicate` of them are
copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config.rules import ResolvedRun
from pipeline.topology import AXES, Topology


class Mesh:
    """This rank's place in a topology, and the groups it talks to. Building it is collective.

    Args:
        topology: sizes of the axes; their product is the number of ranks.
        device_type: cpu or cuda.
        shard: data ranks that share a parameter's parts (hybrid sharding); all data ranks when None.

    Attributes:
        rank: global rank.
        place: coordinate on every axis.
    """

    def __init__(self, topology: Topology, *, device_type: str, shard: int | None = None) -> None:
        self.topology, self.rank = topology, dist.get_rank()
        self.place = topology.coordinates(self.rank)
        data = topology.dp * topology.cp
        self._shard = shard or data
        assert data % self._shard == 0, (data, shard)
        sizes = (topology.pp, data // self._shard, self._shard, topology.tp)
        names = ("pp", "replicate", "shard", "tp")
        self._device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        self._data = self._device_mesh["replicate", "shard"]._flatten("data")
        # every rank takes part in making every group, its own or not
        self._cp = _own_group(topology.group(rank, "cp") for rank in range(topology.world_size))

    def size(self, axis: str) -> int:
        """Ranks along pp, dp, cp, tp, or data."""
        if axis == "data":
            return self.topology.dp * self.topology.cp
        return self.topology.sizes[AXES.index(axis)]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of pp, cp, tp or data that this rank is in; None where it would be alone."""
        if self.size(axis) == 1:
            return None
        if axis == "cp":
            return self._cp
        return self._data.get_group() if axis == "data" else self._device_mesh[axis].get_group()

    def sharding(self) -> DeviceMesh:
        """What FSDP2 shards over: 1-D, or (replicate, shard) with hybrid sharding."""
        if self._shard == self.size("data"):
            return self._data
        return self._device_mesh["replicate", "shard"]


def mesh_of(run: ResolvedRun, device_type: str) -> Mesh | None:
    """The mesh of a run; None for one process. Collective."""
    if run.topology.world_size == 1:
        return None
    whole = run.config.engine == "torch" and run.config.zero_optimization.stage == 0
    return Mesh(run.topology, device_type=device_type, shard=1 if whole else run.config.parallel.hybrid_shard_size)


def ends_group(topology: Topology) -> dist.ProcessGroup | None:
    """The first and the last pipeline rank at this rank's place, which both hold a head that is the embedding.

    Collective. None where there is no pipeline, and on the ranks in the middle.
    """
    columns = (topology.group(rank, "pp") for rank in range(topology.world_size))
    return _own_group([column[0], column[-1]] for column in columns if topology.pp > 1)


def _own_group(groups: Iterable[list[int]]) -> dist.ProcessGroup | None:
    """Makes every group of several ranks once, on all ranks in the same order, and gives the one this rank is in."""
    own: dist.ProcessGroup | None = None
    for ranks in dict.fromkeys(tuple(group) for group in groups):
        if len(ranks) > 1:
            made = dist.new_group(list(ranks))
            own = made if dist.get_rank() in ranks else own
    return own
