"""The process groups of a topology. The default process group is open.

`data` is dp and cp together: the ranks that hold the same parameters and see different tokens, over which gradients
are summed. With hybrid sharding it is cut in two: `shard` ranks share a parameter's parts, `replicate` of them are
copies.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config.rules import ResolvedRun
from pipeline.topology import Topology


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
        self._cp = _own_group(topology, self.rank, "cp")

    def size(self, axis: str) -> int:
        """Ranks along pp, dp, cp, tp, or data."""
        if axis == "data":
            return self.topology.dp * self.topology.cp
        return {"pp": self.topology.pp, "dp": self.topology.dp, "cp": self.topology.cp, "tp": self.topology.tp}[axis]

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
    return Mesh(run.topology, device_type=device_type, shard=1 if whole else run.config.parallel.shard)


def _own_group(topology: Topology, rank: int, axis: str) -> dist.ProcessGroup | None:
    own: dist.ProcessGroup | None = None
    made: set[tuple[int, ...]] = set()
    for each in range(topology.world_size):
        ranks = tuple(topology.group(each, axis))
        if len(ranks) > 1 and ranks not in made:
            made.add(ranks)
            group = dist.new_group(list(ranks))
            own = group if rank in ranks else own
    return own
