"""Communication of a rank in a step: the minimum by `engines.sizes.traffic`, and what engines add.

`tests/plan/test_work.py` compares it with the collectives of steps executed on fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.config.topology import AXES, Topology
from pipeline.engines.sizes import traffic
from pipeline.engines.sizes.expert_load import expert_load
from pipeline.engines.sizes.traffic import TrafficLayout
from pipeline.runtime.machines.machine import Operation

MATRIX_BYTES = 2
"""Bytes per element of a matrix that is orthogonalized on a GPU."""

_GRADIENT_BYTES = 4
"""Bytes per element of reduced gradients: in fp32, unless communication_data_type says bf16."""


@dataclass(frozen=True)
class Transfer:
    """Collectives of one purpose.

    Attributes:
        purpose: weights, gradients, tensor, context, experts, pipeline or matrices.
        kind: all_gather, reduce_scatter, all_reduce, all_to_all or send.
        bytes: bytes of the whole tensors, in a step.
        count: number of collectives, in a step.
        ranks: global ranks of rank 0's group.
    """

    purpose: str
    kind: Operation | Literal["send"]
    bytes: float
    count: int
    ranks: tuple[int, ...]


def transfers(layout: TrafficLayout) -> list[Transfer]:
    """Collectives and messages of a step, by purpose, without groups of one rank and collectives of a few numbers."""
    found = [*_data_parallel(layout), *_within_layers(layout), *_pipeline(layout), *_matrices(layout)]
    return [each for each in found if len(each.ranks) > 1 and each.bytes]


def _data_parallel(layout: TrafficLayout) -> Iterator[Transfer]:
    """Collectives of all data ranks; with expert parallelism, also of the ranks that hold the same experts."""
    run, (rest, experts) = layout.run, layout.apart()
    data = group_of(run.topology, ("dp", "cp"))
    shard = run.config.parallel.hybrid_shard_size or len(data)
    yield from _sharded(rest, data, shard=shard, units=len(layout.rank.layers) + 2)
    if sparse := sum(each > 0 for each in layout.rank.experts):
        same = tuple(range(0, run.topology.stage_ranks, run.topology.ep))
        shard = run.expert_shards if layout.stage else len(same)
        yield from _sharded(experts, same, shard=shard, units=sparse)


def _sharded(layout: TrafficLayout, data: tuple[int, ...], *, shard: int, units: int) -> Iterator[Transfer]:
    """Gathers and reductions of `units` units over data ranks, sharded in groups of `shard`."""
    run, stage, micro_batches = layout.run, layout.stage, layout.micro_batches
    weights = _weights(layout) * (0.5 if run.config.fp8.enabled and run.config.fp8.fsdp_all_gather else 1.0)
    gathers = units * (2 * micro_batches if stage == 3 else 1)
    yield Transfer("weights", "all_gather", weights, gathers, data[:shard])
    size = 2 if run.config.communication_data_type == "bf16" else _GRADIENT_BYTES
    gradients = traffic.reduced(layout) * size / layout.size
    reductions = units * (micro_batches if stage >= 2 else 1)
    scattered = stage == 3 or (stage > 0 and run.config.engine == "torch")
    yield Transfer("gradients", "reduce_scatter" if scattered else "all_reduce", gradients, reductions, data[:shard])
    if shard < len(data):  # HSDP sums the shards over the replicas
        yield Transfer("gradients", "all_reduce", gradients / shard, reductions, data[::shard])


def _weights(layout: TrafficLayout) -> float:
    """Bytes of all-gathers: FSDP2 also gathers the last layer a second time."""
    least, rank, run = traffic.gathered(layout), layout.rank, layout.run
    if layout.stage < 3:
        return least
    whole = layout.micro_batches * layout.size * rank.parameters
    if run.config.engine != "deepspeed":
        return least + layout.micro_batches * layout.size * rank.layers[-1]
    live = run.config.zero_optimization.stage3_max_live_parameters or int(1e9)
    # gathered weights stay between the passes, up to the limit. From the second step on, a layer that is recomputed
    # stays for its backward pass, by `stage3_max_reuse_distance`
    again = max(0, rank.parameters - live) / rank.parameters
    return whole * (1 + again)


def _within_layers(layout: TrafficLayout) -> Iterator[Transfer]:
    run, layers = layout.run, len(layout.rank.layers) * layout.micro_batches
    mode, every = run.config.memory.activation_checkpointing, run.config.memory.every_n_layers
    repeated = 1 / every if mode == "full" else 0.0
    # selective checkpointing keeps neither gathers of tensor parallelism nor messages of ring attention
    sent_again = 0.0 if mode == "none" else 1 / every
    if run.topology.tp > 1:
        ranks = group_of(run.topology, ("tp",))
        inside = layout.micro_batches * layout.hidden * 2 * len(layout.rank.layers)
        sizes: dict[Operation, float] = {
            "all_gather": traffic.tensor_gathers(layout),
            "reduce_scatter": traffic.tensor_scatters(layout),
        }
        for kind, size in sizes.items():
            again = sent_again if kind == "all_gather" else repeated
            yield Transfer("tensor", kind, size + again * inside, round(layers * (4 + 2 * again)), ranks)
    if run.topology.cp > 1:
        ranks = group_of(run.topology, ("cp",))
        exchanged = traffic.attention_exchanges(layout) * (1 + (sent_again if run.zigzag else repeated) / 2)
        if run.zigzag:
            gradients = traffic.attention_gradients(layout) * _GRADIENT_BYTES / layout.size
            yield Transfer("context", "send", exchanged + gradients, 3 * layers * run.topology.cp, ranks)
        else:
            yield Transfer("context", "all_to_all", exchanged, round(layers * 8 * (1 + repeated / 2)), ranks)

    if run.topology.ep > 1:
        # the fullest rank's links carry the rows that it gets, which are more than the rows that it sends
        load, passes = expert_load(run, layout.widths).factor, 1 + repeated / 2
        exchanged = traffic.expert_exchanges(layout) * load * passes
        sparse = sum(each > 0 for each in layout.rank.experts) * layout.micro_batches
        yield Transfer("experts", "all_to_all", exchanged, round(4 * sparse * passes), tuple(range(run.topology.ep)))
        counts = traffic.expert_counts(layout) * (1 + repeated)
        yield Transfer("experts", "all_to_all", counts, round(sparse * (1 + repeated)), tuple(range(run.topology.ep)))


def _matrices(layout: TrafficLayout) -> Iterator[Transfer]:
    """Shards of hidden matrices, sent to the ranks that orthogonalize them and back, in bf16 on GPUs (`optim.muon`)."""
    run, elements = layout.run, layout.rank.apart()[0].matrices  # experts are whole on their ranks
    data = run.topology.dp * run.topology.cp
    sharded = layout.stage > 0 or run.topology.tp > 1  # else every rank has every matrix, and only results are sent
    shards = (run.config.parallel.hybrid_shard_size or data) if layout.stage else 1
    moved = (elements / data if sharded else 0.0) + elements / shards
    ranks = group_of(run.topology, ("dp", "cp", "tp"))
    yield Transfer("matrices", "all_to_all", MATRIX_BYTES * moved, 2 if sharded else 1, ranks)


def _pipeline(layout: TrafficLayout) -> Iterator[Transfer]:
    run, rank = layout.run, layout.rank
    borders = 2 * rank.stages - int(rank.first) - int(rank.last)
    ranks = group_of(run.topology, ("pp",))
    yield Transfer("pipeline", "send", traffic.stage_messages(layout), borders * layout.micro_batches, ranks[:2])


@functools.cache
def group_of(topology: Topology, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from rank 0 along the given axes only, in order."""
    found = [0]
    for axis in AXES:
        if axis in axes:
            others = topology.group(0, axis)
            found = [rank + other for rank in found for other in others]
    return tuple(sorted(found))
