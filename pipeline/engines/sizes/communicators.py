"""Memory of NCCL's communicators: one per process group of a rank, with channels and their buffers.

The context's figure of a machine (`overhead` in its file) includes one communicator, that of all ranks. Nothing here
was measured with this code; `headrace doctor` measures it on a node.
"""

from __future__ import annotations

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.optimizers import UpdateScope
from pipeline.config.topology import link_of

BYTES = (0.1e9, 0.6e9, 1.0e9)
"""Low, typical and high bytes of a communicator. Typical: 544 MB for 2 ranks and 688 MB for more, on four A100
(NVIDIA/nccl#964). High: pytorch/pytorch#153302. Low is assumed: since 2.22, NCCL connects the channels of an algorithm
at its first use."""

PEER_BYTES = (0.0, 0.47e9, 0.47e9)
"""Bytes of an all-to-all for every other rank of the node: 3.28 GB for the seven of an H100 node (NVIDIA/nccl#1685).
Low is assumed, for few channels."""


def communicator_bytes(run: ResolvedRun, *, per_node: int, end: int) -> float:
    """Returns a rank's bytes beside the communicator of all ranks.

    Args:
        run: the resolved config.
        per_node: number of a node's devices.
        end: 0 for the low, 1 for the typical, 2 for the high value.
    """
    topology, peers = run.topology, 0
    if topology.ep > 1:
        peers += min(topology.ep, per_node) - 1
    if topology.cp > 1 and run.config.parallel.cp_method == "ulysses":
        peers += max(0, min(topology.cp, per_node // topology.tp) - 1)
    return communicators(run) * BYTES[end] + peers * PEER_BYTES[end]


def communicators(run: ResolvedRun) -> int:
    """Counts a rank's process groups on NCCL beside that of all ranks, as `Mesh` and its methods make them.

    Not counted: the group of tied weights, on the first and last stage of a pipeline, and groups that DeepSpeed makes.
    """
    topology = run.topology
    world, data = topology.world_size, topology.dp * topology.cp
    shard = run.shard_size or data
    axes = [size for size in (topology.pp, data // shard, topology.tp) if size > 1] + [shard]
    if shard < data:
        axes.append(data)
    if topology.ep > 1:
        replicas = topology.edp if shard == 1 else data // shard
        axes += [size for size in (topology.pp, replicas) if size > 1] + [topology.edp // replicas, topology.ep]
    more = int(topology.cp > 1) + 2 * bool(run.config.zero_optimization.zero_hpz_partition_size)
    if run.virtual_stages > 1 and topology.pp > 1:
        more += len({link_of(rank, (rank + 1) % topology.pp, pp=topology.pp) for rank in range(topology.pp)}) - 1
    if run.config.optimizer.kind.scope is UpdateScope.MATRIX and world > topology.pp:
        more += 1
    return 0 if world == 1 else sum(size != world for size in axes) + more
