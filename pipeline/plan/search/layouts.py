"""The layouts that a search compares: products of the settings in `config.rules`' table, not yet checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foundation.configfile import ConfigTree
from pipeline.config.rules.expert_exchange import expert_exchange
from pipeline.config.rules.resolve import FEATURES, LAYOUTS, ResolvedRun
from pipeline.config.sections.layout import SCHEDULES
from pipeline.runtime.machines.machine import Machine

_DEEPSPEED_ONLY: ConfigTree = {
    "data_types.grad_accum_dtype": None,
    "zero_optimization.reduce_bucket_size": None,
    "zero_optimization.overlap_comm": None,
    "zero_optimization.contiguous_gradients": None,
    "zero_optimization.stage3_prefetch_bucket_size": None,
    "zero_optimization.stage3_param_persistence_threshold": None,
    "zero_optimization.stage3_max_live_parameters": None,
    "zero_optimization.stage3_max_reuse_distance": None,
}
"""Keys without a meaning for FSDP2, with the values that leave them out."""

_OF_RANKS = ("stage_speeds", "stage_memory_gb")
"""Keys of `parallel` with a number for each pipeline rank: layouts are planned for equal devices."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MODES = ("full", "selective", "none")
"""Activation checkpointing, in the order of the memory that it leaves to activations."""
MOST_CP, MOST_PP, MOST_EP = 16, 16, 64
_CHUNK = 2048
"""Fewest positions on a context-parallel rank: with fewer, its products are too small."""


@dataclass(frozen=True)
class Axes:
    """Sizes of the mesh."""

    pp: int
    tp: int
    cp: int


def layouts(
    run: ResolvedRun, machine: Machine, *, experts: int = 0, fp8: Mapping[str, Any] | None = None
) -> Iterator[ConfigTree]:
    """Settings of layouts for the processes of a run, as dotted keys with values.

    Layouts that differ only in micro-batch and activation checkpointing follow each other, from the smallest
    micro-batch on, and among equal ones in the order of `MODES`.

    Args:
        run: run whose model, batch and precision are kept.
        machine: machine of the nodes; tensor parallelism stays within a node.
        experts: number of experts in a layer of the model; 0 for a dense model.
        fp8: settings that turn on fp8; each layout is also yielded with them. None for the run's precision alone.
    """
    axes = list(_axes(run, machine))
    for (engine, stage), mesh in itertools.product(_stages(), axes):
        if engine == "torch" and stage == 1 and mesh.pp > 1:
            continue  # the same as stage 2 in a pipeline
        features = [row.features for row in LAYOUTS if (row.engine, row.stage) == (engine, stage)]
        sizes = _expert_parallel(run, machine, mesh, experts) if "ep" in frozenset().union(*features) else [1]
        options = itertools.product(_options(run, machine, features, mesh), sizes)
        overlaps = partial(_overlaps, run, known=frozenset().union(*features))
        for (schedule, shard, offload), ep in options:
            own = (
                run.config.parallel.virtual_stages
                if schedule == "interleaved_1f1b" and run.virtual_stages > 2
                else None
            )
            virtual = dict.fromkeys((None, own))  # besides the default those of the config
            for stages, micro, mode in itertools.product(virtual, _micro_batches(run, mesh), MODES):
                sets = {
                    "engine": engine,
                    "zero_optimization.stage": stage,
                    "parallel.pp": mesh.pp,
                    "parallel.tp": mesh.tp,
                    "parallel.cp": mesh.cp,
                    **(
                        {"parallel.ep": ep, "parallel.ep_overlap": overlaps(mesh, schedule, ep=ep, micro=micro)}
                        if experts
                        else {}
                    ),
                    "parallel.schedule": schedule,
                    "parallel.virtual_stages": stages,
                    "parallel.hybrid_shard_size": shard,
                    "zero_optimization.offload_optimizer.device": offload,
                    "train_micro_batch_size_per_gpu": micro,
                    "gradient_accumulation_steps": None,
                    "memory.activation_checkpointing": mode,
                }
                sets |= _DEEPSPEED_ONLY if engine == "torch" else {}
                sets |= {f"parallel.{key}": None for key in _OF_RANKS if getattr(run.config.parallel, key) is not None}
                yield sets
                if fp8:
                    yield {**sets, **fp8}


def _stages() -> Sequence[tuple[str, int]]:
    return sorted({(row.engine, row.stage) for row in LAYOUTS}, reverse=True)


def _axes(run: ResolvedRun, machine: Machine) -> Iterator[Axes]:
    world = run.topology.world_size
    powers = [1 << power for power in range(world.bit_length())]
    tensor = [each for each in powers if each <= machine.devices_per_node]
    context = [each for each in powers if each == 1 or (each <= MOST_CP and run.batch.sequence_length >= each * _CHUNK)]
    pipelines = [each for each in powers if each <= MOST_PP]
    for pp, tp, cp in itertools.product(pipelines, tensor, context):
        if world % (pp * tp * cp) == 0 and run.batch.samples >= world // (pp * tp * cp):
            yield Axes(pp, tp, cp)


def _options(
    run: ResolvedRun, machine: Machine, features: Sequence[frozenset[str]], mesh: Axes
) -> Iterator[tuple[str, int | None, str]]:
    """Yields each (schedule, hybrid shard size, device of optimizer states) that a row of the table allows."""
    known = frozenset().union(*features)
    assert known <= FEATURES.keys()
    searched = [name for name, kind in SCHEDULES.items() if kind.searched]
    schedules = [name for name in searched if name == "1f1b" or (mesh.pp > 1 and name in known)]
    data = run.topology.world_size // (mesh.pp * mesh.tp)
    shards = [None, machine.devices_per_node] if "shard" in known and data > machine.devices_per_node else [None]
    offloads = ["none", "cpu"] if "offload_optimizer" in known and mesh.pp == 1 else ["none"]
    yield from itertools.product(schedules, shards, offloads)


def _expert_parallel(run: ResolvedRun, machine: Machine, mesh: Axes, experts: int) -> list[int]:
    """Sizes of expert parallelism: 1, and half a node to 8 nodes, if they divide the experts and a stage's ranks."""
    node, ranks = machine.devices_per_node, run.topology.world_size // mesh.pp
    sizes = [node // 2, *(node << power for power in range(4))]
    return [1, *(each for each in sizes if 1 < each <= MOST_EP and experts % each == 0 == ranks % each and experts)]


def _overlaps(run: ResolvedRun, mesh: Axes, schedule: str, *, ep: int, micro: int, known: frozenset[str]) -> bool:
    """Whether experts exchange beside another micro-batch, which is faster wherever the rules allow it."""
    several = micro < _samples_of_a_rank(run, mesh)
    several = several and (mesh.pp == 1 or SCHEDULES[schedule].overlaps)
    return "ep_overlap" in known and ep > 1 and several and expert_exchange(run.config) == "all_to_all"


def _micro_batches(run: ResolvedRun, mesh: Axes) -> list[int]:
    each = _samples_of_a_rank(run, mesh)
    return [size for size in MICRO_BATCHES if each % size == 0]


def _samples_of_a_rank(run: ResolvedRun, mesh: Axes) -> int:
    return run.batch.samples * mesh.pp * mesh.tp * mesh.cp // run.topology.world_size
