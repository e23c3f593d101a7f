"""Connects all ranks and every process group of the config's layout; names a rank that does not come, and its host.

The groups are the mesh's, as the training makes them, and those that its engine adds (messages between pipeline stages,
tied weights, ranks of a stage). The first all-reduce over each opens its connections, as in the pre-flight check.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from foundation.errors import ConfigError
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import config_of, device_here, gathered, machine_here, rendezvous_here
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.topology import Topology
from pipeline.engines.parallel.mesh import Mesh, engine_groups
from pipeline.run.preflight import preflight


def run(context: Context) -> Iterable[Finding]:
    """Runs the check; rank 0 reports.

    Raises:
        LostError: a rank did not come; the error names it and its host.
        TrainingError: an all-reduce gave a wrong sum.
    """
    world, device = dist.get_world_size(), device_here()
    if world == 1:
        yield Finding(None, "There is one rank, and no connection to check.")
        return
    resolved, reason = _layout(context, world)
    if reason and dist.get_rank() == 0:
        yield Finding(None, f"The groups of the config's layout are not checked: {reason}.")
    before, make = _used_mib(device), partial(_mesh, resolved, world, device)
    more = {"make_more": partial(engine_groups, resolved)} if resolved else {}
    summary = preflight(rendezvous_here(context), make, device=device, **more)[1]
    used = gathered((before, _used_mib(device)))
    if dist.get_rank() == 0:
        grown = max(after - first for first, after in used)
        figures = {"ranks": world, "memory_before_mib": max(used)[0], "connections_mib": grown}
        if machine := machine_here():
            figures["planned_context_and_nccl_mib"] = round(machine.overhead.bytes[1] / 2**20)
        text = f"All {world} ranks are connected ({summary.removeprefix('preflight: ')}); the connections take up to"
        yield Finding(True, f"{text} {grown} MiB per rank.", figures=figures)


def _layout(context: Context, world: int) -> tuple[ResolvedRun | None, str]:
    """The config resolved for the ranks that are here; None and the reason if they cannot form its layout."""
    try:
        resolved = resolve(config_of(context), world_size=world)
    except ConfigError as error:
        return None, f"{world} ranks cannot form it ({str(error).splitlines()[0]})"
    if resolved.topology.world_size != world:
        return None, f"it takes {resolved.topology.world_size} of the {world} ranks"
    return resolved, ""


def _mesh(resolved: ResolvedRun | None, world: int, device: torch.device) -> Mesh:
    if resolved is None:
        return Mesh(Topology(dp=world), device_type=device.type)
    sizes = {"shard_size": resolved.shard_size, "node": resolved.node_size}
    return Mesh(resolved.topology, device_type=device.type, **sizes)


def _used_mib(device: torch.device) -> int:
    """MiB of the GPU's memory in use beside torch's allocator; without a GPU, this process's resident memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free - torch.cuda.memory_reserved(device)) >> 20
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
