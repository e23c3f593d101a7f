"""Rules of the keys that choose how weights are gathered and gradients reduced. No torch."""

from __future__ import annotations

from foundation.errors import ConfigError
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology


def check_gradient_dtype(config: Config, topology: Topology, batch: BatchSizes) -> None:
    """Checks that bf16 gradient reduction rounds gradients only once per micro-batch, and accumulates in fp32.

    Raises:
        ConfigError: the run is not bf16, or the layout would also accumulate in bf16, or would not send bf16.
    """
    field, given = "communication_data_type", config.communication_data_type
    if given == "fp32":
        return
    remedy, stage = "remove it", config.zero_optimization.stage
    if not config.bf16.enabled:
        raise ConfigError(field, given, why="the run is not bf16", remedy=f"{remedy}, or enable bf16")
    if config.engine == "reference" or topology.world_size == 1:
        raise ConfigError(field, given, why="one process reduces no gradients over ranks", remedy=remedy)
    if config.engine == "deepspeed":
        if stage < 2:
            why = f"at ZeRO stage {stage} gradients are accumulated in fp32, and reduced in it"
            raise ConfigError(field, given, why=why, remedy=f"{remedy}, or use zero_optimization.stage 2 or 3")
        return
    once = stage < 2 or config.parallel.hybrid_shard_size is not None or (topology.pp > 1 and stage < 3)
    if once and (batch.accumulation > 1 or config.parallel.shares == "auto"):
        more = " (or more, with parallel.shares auto)" if config.parallel.shares == "auto" else ""
        why = (
            f"gradients of the {batch.accumulation} micro-batches of a step{more} are summed before they are reduced,"
            " and FSDP2 sums them in the dtype of its reduction"
        )
        others = "zero_optimization.stage 3 without hybrid_shard_size" if topology.pp > 1 else "stage 2 or 3"
        raise ConfigError(field, given, why=why, remedy=f"{remedy}, or use {others}, or one micro-batch per step")


def check_secondary_shards(config: Config, topology: Topology) -> None:
    """Checks `zero_hpz_partition_size`: the ranks of a node over which gathered weights are sharded again.

    Raises:
        ConfigError: the size does not fit the mesh, or other features that gather weights.
    """
    field, size = "zero_optimization.zero_hpz_partition_size", config.zero_optimization.zero_hpz_partition_size
    if size is None:
        return
    remedy, data = "remove it", topology.dp * topology.cp
    if config.zero_optimization.stage != 3:
        why = f"weights are not gathered for the backward pass at ZeRO stage {config.zero_optimization.stage}"
        raise ConfigError(field, size, why=why, remedy=f"{remedy}, or use zero_optimization.stage 3")
    if not 1 < size < data or data % size:
        fits = [n for n in range(2, data) if data % n == 0]
        near = f"use {min(fits, key=lambda n: abs(n - size))}, or " if fits else ""
        why = f"the {data} data ranks (dp {topology.dp} x cp {topology.cp}) are not several groups of {size}"
        raise ConfigError(field, size, why=why, remedy=f"{near}{remedy}")
    for other, given in (
        ("parallel.hybrid_shard_size", config.parallel.hybrid_shard_size),
        ("fp8.fsdp_all_gather", config.fp8.enabled and config.fp8.fsdp_all_gather),
    ):
        if given:
            why = f"{other} gathers weights in another way, and the two do not combine"
            raise ConfigError(field, size, why=why, remedy=f"{remedy}, or {other}")
    if config.engine == "deepspeed" and topology.tp > 1:
        why = "DeepSpeed 0.19 groups neighbouring global ranks, and tp ranks among them hold different weights"
        raise ConfigError(field, size, why=why, remedy=f"{remedy}, or use engine torch")
