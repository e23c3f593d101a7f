"""Device mesh and process groups of a topology. The default process group must be initialized.

The data axis is dp and cp together: its ranks have the same parameters and different tokens, and gradients are summed
over it. With hybrid sharding (HSDP) it is split in two: parameters are sharded over the `shard` axis and replicated
over the `replicate` axis.

With expert parallelism the ranks of a pipeline stage form a second mesh, (edp, ep), for the experts. The ranks of an ep
group have different experts. The ranks of an edp group have the same experts, which are sharded and replicated over the
group.

An axis of size 1 is left out of the device meshes: `DeviceMesh` would make a group of one rank for it, and NCCL may
take 512 MiB of a GPU's memory for such a group (NVIDIA/nccl#2363).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.topology import AXES, Topology, link_of


class Mesh:
    """This rank's coordinates in a topology, and its process groups. Building it is collective.

    Args:
        topology: sizes of the axes; their product is the number of ranks.
        device_type: cpu or cuda.
        shard_size: number of data ranks over which parameters are sharded (hybrid sharding); None for all data ranks.
        node: number of neighbouring data ranks over which weights stay sharded during a step (hpZ), a divisor of the
            number of data ranks; None without it.

    Attributes:
        rank: global rank.
        coordinates: this rank's coordinate on every axis.
        nodes: the data ranks as a 2-D mesh (across nodes, within a node), for hpZ; None without it.
    """

    def __init__(
        self, topology: Topology, *, device_type: str, shard_size: int | None = None, node: int | None = None
    ) -> None:
        self.topology, self.rank = topology, dist.get_rank()
        self.coordinates = topology.coordinates(self.rank)
        data = topology.dp * topology.cp
        self._shard_size = shard_size or data
        assert data % self._shard_size == 0, (data, shard_size)
        sizes = {"pp": topology.pp, "replicate": data // self._shard_size, "shard": self._shard_size, "tp": topology.tp}
        self._device_mesh = _mesh_of(sizes, device_type, always="shard")
        sharded_alone = self._shard_size == data
        self._data = (
            self._device_mesh["shard"] if sharded_alone else self._device_mesh["replicate", "shard"]._flatten("data")
        )
        self.nodes: DeviceMesh | None = None
        if node is not None:
            self.nodes = self._data._unflatten(0, (data // node, node), ("across_nodes", "within_node"))
        self._experts = self._expert_mesh(device_type) if topology.ep > 1 else None
        # creating a group is collective over all ranks, members or not
        self._cp = _own_group((topology.group(rank, "cp") for rank in range(topology.world_size)), name="cp")

    def size(self, axis: str) -> int:
        """Returns the number of ranks along pp, dp, cp, tp, data, or ep."""
        if axis in ("data", "ep"):
            return self.topology.ep if axis == "ep" else self.topology.dp * self.topology.cp
        return self.topology.sizes[AXES.index(axis)]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns this rank's process group along pp, cp, tp, data or ep; None if the axis has size 1."""
        if self.size(axis) == 1:
            return None
        if axis == "cp":
            return self._cp
        if axis == "ep" and self._experts is not None:
            return self._experts["ep"].get_group()
        return self._data.get_group() if axis == "data" else self._device_mesh[axis].get_group()

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Returns the groups of several ranks that this rank has, by axis; the same axes on all ranks.

        The data axis is called dp without context parallelism. With hybrid sharding there are also shard and replicate,
        with hpZ across_nodes and within_node, with expert parallelism those of ep, edp_shard and edp_replicate that
        have several ranks.
        """
        data = "data" if self.size("cp") > 1 else "dp"
        found = {"pp": self.group("pp"), data: self.group("data"), "cp": self.group("cp"), "tp": self.group("tp")}
        if self._shard_size != self.size("data"):
            found |= {axis: self._device_mesh[axis].get_group() for axis in ("replicate", "shard")}
        if self.nodes is not None:
            found |= {axis: self.nodes[axis].get_group() for axis in ("across_nodes", "within_node")}
        if self._experts is not None:
            axes = set(self._experts.mesh_dim_names or ()) - {"pp"}
            found |= {axis: self._experts[axis].get_group() for axis in sorted(axes)}
        return {axis: group for axis, group in found.items() if group is not None and group.size() > 1}

    def data_mesh(self) -> DeviceMesh:
        """Returns the 1-D device mesh of this rank's data ranks."""
        return self._data

    def stage_group(self) -> dist.ProcessGroup | None:
        """Groups the ranks of this rank's pipeline stage, which together have all of its parameters. Collective."""
        stage = self.topology.world_size // self.topology.pp  # pp varies slowest
        return _own_group(
            (range(first, first + stage) for first in range(0, self.topology.world_size, stage)), name="stage"
        )

    def link_groups(self) -> list[dist.ProcessGroup]:
        """Makes groups of this rank's pipeline ranks, one per number of `link_of`; the first is pp's. Collective.

        Under NCCL a group sends and receives in the order of the calls, one message at a time: groups split from a
        connected group have no communicators for pairs of ranks. With one group, a receive that waits for one neighbor
        would delay messages to the other.
        """
        own, pp = self.group("pp"), self.topology.pp
        assert own is not None
        numbers = {link_of(rank, (rank + 1) % pp, pp=pp) for rank in range(pp)}
        columns = [self.topology.group(rank, "pp") for rank in range(self.topology.world_size)]
        more = [_own_group(columns, name=f"pp_link_{number}") for number in sorted(numbers - {0})]
        return [own, *(each for each in more if each is not None)]

    def sharding_mesh(self) -> DeviceMesh:
        """Returns the device mesh for FSDP2: 1-D, or (replicate, shard) with hybrid sharding."""
        if self._shard_size == self.size("data"):
            return self._data
        return self._device_mesh["replicate", "shard"]

    def expert_sharding_mesh(self) -> DeviceMesh:
        """The device mesh for FSDP2 of the experts: ranks with the same experts, in the form of `sharding_mesh`."""
        assert self._experts is not None
        names = self._experts.mesh_dim_names
        assert names is not None
        return self._experts["edp_replicate", "edp_shard"] if "edp_replicate" in names else self._experts["edp_shard"]

    def expert_groups(self) -> dict[str, dist.ProcessGroup]:
        """Returns this rank's groups along ep and edp, perhaps of one rank; for layouts without replicas of shards."""
        assert self._experts is not None
        assert "edp_replicate" not in (self._experts.mesh_dim_names or ())
        return {"ep": self._experts["ep"].get_group(), "edp": self._experts["edp_shard"].get_group()}

    def _expert_mesh(self, device_type: str) -> DeviceMesh:
        """Makes the mesh (pp, edp_replicate, edp_shard, ep); ep groups lie within replicas if anything is sharded."""
        topology, data = self.topology, self.size("data")
        replicas = topology.edp if self._shard_size == 1 else data // self._shard_size
        shards = topology.edp // replicas
        sizes = {"pp": topology.pp, "edp_replicate": replicas, "edp_shard": shards, "ep": topology.ep}
        return _mesh_of(sizes, device_type, always="edp_shard")


def _mesh_of(sizes: Mapping[str, int], device_type: str, *, always: str) -> DeviceMesh:
    """Makes the device mesh of all ranks with the axes that have several ranks, and `always`, which FSDP2 needs."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name == always}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def build_mesh(topology: Topology, *, device_type: str, shard_size: int | None, node: int | None = None) -> Mesh | None:
    """Builds the mesh of a run; None for one process. Collective. Takes the arguments of `Mesh`."""
    if topology.world_size == 1:
        return None
    return Mesh(topology, device_type=device_type, shard_size=shard_size, node=node)


def tied_weights_group(run: ResolvedRun) -> dist.ProcessGroup | None:
    """Groups the ranks of the first and the last stage of this rank's pipeline, which each have a copy of tied weights.

    Collective. None without pipeline parallelism, on ranks of other stages, and if one rank has both stages.
    """
    topology, last = run.topology, run.rank_of_stage(-1)
    columns = (topology.group(rank, "pp") for rank in range(topology.world_size))
    ends = ([column[0], column[last]] for column in columns if topology.pp > 1 and last)
    return _own_group(ends, name="tied_weights")


def engine_groups(run: ResolvedRun, mesh: Mesh) -> dict[str, dist.ProcessGroup | None]:
    """Makes the groups that an engine makes beside the mesh's, by name; None for one that this rank is not in.

    Collective. The names are the same on all ranks.
    """
    if run.topology.pp == 1:
        return {}
    links = mesh.link_groups()[1:] if run.virtual_stages > 1 else []
    found = {f"link {number} of pp": group for number, group in enumerate(links, 1)}
    return {**found, "tied weights": tied_weights_group(run), "stage": mesh.stage_group()}


def _own_group(groups: Iterable[Sequence[int]], *, name: str) -> dist.ProcessGroup | None:
    """Creates all groups, which are disjoint and have several ranks, and returns this rank's own. Collective.

    Under NCCL all groups are made in one split of all ranks, as in `DeviceMesh`: `new_group` would make every rank
    split once per group, for cp 2 over 8,192 ranks 4,096 times. Under other backends only a group's own ranks make it
    (`use_local_synchronization`). Torch names it by its ranks and by this rank's number of groups, which must be equal
    on all of them; so a rank without a group makes one for itself. MPI has no such groups.

    Fault reports show the name.
    """
    several = [list(ranks) for ranks in dict.fromkeys(map(tuple, groups)) if len(ranks) > 1]
    default = dist.group.WORLD
    assert default is not None
    if several and default.bound_device_id is not None:
        return dist.split_group(split_ranks=several, group_desc=name)
    own: dist.ProcessGroup | None = None
    local, rank = dist.get_backend() != dist.Backend.MPI, dist.get_rank()
    for ranks in several:
        if not local or rank in ranks:
            created = dist.new_group(ranks, use_local_synchronization=local, group_desc=name)
            own = created if rank in ranks else own
    if local and several and own is None:
        dist.new_group([rank], use_local_synchronization=True, group_desc=f"{name}_alone")
    return own
