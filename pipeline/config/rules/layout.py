"""Divisibility rules of supported layouts: attention heads, sequence, hybrid shards, micro-batches of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from math import gcd, lcm
from typing import Any

from foundation.errors import ConfigError
from pipeline.config.batch import BatchSizes
from pipeline.config.rules.distillation import check_distillation, check_features
from pipeline.config.rules.expert_exchange import check_expert_exchange
from pipeline.config.rules.on_policy import check_on_policy
from pipeline.config.sections.deepspeed import ZeroSection
from pipeline.config.sections.layout import ParallelSection
from pipeline.config.sections.optimizers import ADAMW, OptimizerSection, UpdateScope
from pipeline.config.sections.run import Config, MemorySection
from pipeline.config.topology import Topology, largest_divisor


def topology_of(config: Config, *, world_size: int, elastic: bool = False) -> Topology:
    """Derives the mesh: pp, cp and tp from the config, dp from the number of processes.

    DeepSpeed's keys for an axis mean the same as ours; if both are given, they have to be equal.

    Args:
        config: the config.
        world_size: number of processes.
        elastic: whether to take the largest mesh that fits the processes; the other processes are spare.

    Raises:
        ConfigError: two keys contradict each other, or pp x cp x tp does not divide the number of processes.
    """
    sizes = _sizes(config)
    model_ranks = math.prod(sizes.values())
    if elastic and config.launch.backend != "mpi":  # mpirun's world cannot be shrunk
        dp_unit = _dp_unit(config, sizes)
        if dp := world_size // (model_ranks * dp_unit) * dp_unit:
            return _with_experts(config, Topology(dp=dp, **sizes))
    if world_size % model_ranks:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        near = max(1, world_size // model_ranks) * model_ranks
        why = f"{world_size} processes are not a multiple of {model_ranks} ({product})"
        remedy = f"start {near} or {near + model_ranks} processes (check: --processes {near}), or change the section"
        raise ConfigError("parallel", why=why, remedy=remedy)
    return _with_experts(config, Topology(dp=world_size // model_ranks, **sizes))


def fewest_processes(config: Config) -> int:
    """Returns the smallest number of processes for an elastic run in the configured layout.

    Raises:
        ConfigError: two keys contradict each other.
    """
    sizes = _sizes(config)
    return math.prod(sizes.values()) * _dp_unit(config, sizes)


def _sizes(config: Config) -> dict[str, int]:
    """Returns the sizes of the axes pp, tp and cp."""
    deepspeed_keys = {
        "pp": ("pipeline.stages", config.pipeline.stages),
        "tp": ("tensor_parallel.autotp_size", config.tensor_parallel.autotp_size),
        "cp": ("sequence_parallel_size", config.sequence_parallel_size),
    }
    return {axis: _size(config, axis, *theirs) for axis, theirs in deepspeed_keys.items()}


def _expert_size(config: Config) -> int:
    """Returns the size of the axis ep."""
    return _size(config, "ep", "expert_parallel.autoep_size", config.expert_parallel.size)


def _size(config: Config, axis: str, key: str, value: int | None) -> int:
    """Returns the size of an axis, from our key or DeepSpeed's."""
    own: int | None = getattr(config.parallel, axis)
    if own is not None and value is not None and own != value:
        raise ConfigError(f"parallel.{axis}", own, why=f"{key} is {value}", remedy="give one of the two")
    return own or value or 1


def _dp_unit(config: Config, sizes: Mapping[str, int]) -> int:
    """Returns a divisor that dp must have: dp x cp is a multiple of a hybrid shard group, dp x cp x tp of ep."""
    shard, ep = config.parallel.hybrid_shard_size or 1, _expert_size(config)
    return lcm(shard // gcd(shard, sizes["cp"]), ep // gcd(ep, sizes["cp"] * sizes["tp"]))


def _with_experts(config: Config, topology: Topology) -> Topology:
    """Adds the ep axis to the mesh."""
    ep, ranks = _expert_size(config), topology.stage_ranks
    if ranks % ep:
        why = f"it does not divide the {ranks} ranks of a pipeline stage (dp {topology.dp} x cp {topology.cp} x tp"
        experts = _experts(config) or ranks * ep  # if the number of experts is unknown, any size divides it
        near = f"use {largest_divisor(gcd(ranks, experts), most=ep)}"
        if experts % ep == 0:
            near += f", or start {topology.pp * -(-ranks // ep) * ep} processes"
        raise ConfigError("parallel.ep", ep, why=f"{why} {topology.tp})", remedy=near)
    return replace(topology, ep=ep)


def _experts(config: Config) -> int | None:
    """Returns the number of experts of a layer; None where `model.config` does not give it."""
    given = config.model.config or {}
    counts = (given.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def check_layout(config: Config, topology: Topology) -> None:
    """Checks divisibility by the mesh, and combinations of sections.

    Raises:
        ConfigError: a number does not divide; the error names the nearest valid one.
    """
    _check_sequence(config, topology)
    if config.model.config is not None:
        check_heads(config.model.config, topology, cp_method=config.parallel.cp_method)
    _check_attention(config, topology)
    _check_hybrid_shard(config.parallel, topology)
    _check_expert_parallel(config, topology)
    _check_offload(config.zero_optimization, config.optimizer)
    _check_moments(config, topology)
    check_distillation(config.distill, config.data)
    check_features(
        config.distill,
        attn_implementation=config.model.attn_implementation,
        engine=config.engine,
        compiled=bool(config.compile.enabled),
    )
    check_on_policy(config.distill, topology, sequence_length=config.data.sequence_length, fp8=config.fp8)


def check_heads(model: Mapping[str, Any], topology: Topology, *, cp_method: str, trained: bool = False) -> None:
    """Checks that attention heads and the vocabulary divide over tp ranks, and heads over cp ranks with ulysses.

    Args:
        model: a Hugging Face config; keys it does not have are not checked.
        topology: the mesh.
        cp_method: `parallel.cp_method`.
        trained: whether the sizes belong to existing weights and cannot be changed.

    Raises:
        ConfigError: a size does not divide; the error names the largest valid number of ranks.
    """
    tp, cp = topology.tp, topology.cp
    heads = model.get("num_attention_heads")
    head_ranks = cp if cp_method == "ulysses" else 1
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        if (name, model.get(name)) != ("num_key_value_heads", 1):  # a single one is whole on every rank
            _check_divides("parallel.tp", tp, model.get(name), name, trained=trained)
    if heads and (heads // tp) % head_ranks:
        near = largest_divisor(heads // tp, most=cp)
        why = f"ulysses splits {heads // tp} heads ({heads} / tp {tp}) over cp ranks, and {cp} does not divide them"
        raise ConfigError("parallel.cp", cp, why=why, remedy=f"use {near}, or parallel.cp_method ring")


def _check_divides(field: str, ranks: int, count: int | None, name: str, *, trained: bool) -> None:
    if count and count % ranks:
        near = largest_divisor(count, most=ranks)
        above = -(-count // ranks) * ranks
        remedy = f"use {near}" + ("" if trained else f", or model.config.{name} {above}")
        raise ConfigError(field, ranks, why=f"it does not divide model.config.{name} ({count})", remedy=remedy)


def _check_sequence(config: Config, topology: Topology) -> None:
    length, cp, tp = config.data.sequence_length, topology.cp, topology.tp
    ring = cp > 1 and config.parallel.cp_method == "ring"
    unit = cp * (lcm(2, tp) if ring else tp)
    if length % unit:
        why = f"the cp {cp} x tp {tp} ranks divide a sequence into equal parts"
        if ring:
            why += f", and ring attention needs {2 * cp} equal chunks, two for each cp rank"
        below = length // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        raise ConfigError("data.sequence_length", length, why=why, remedy=f"use {near}")


def _check_attention(config: Config, topology: Topology) -> None:
    given = config.model.attn_implementation
    if given == "sdpa":
        return
    for needs, what in (
        (topology.cp > 1, "parallel.cp"),
        (topology.tp > 1, "parallel.tp"),
        (config.data.mask_documents, "data.mask_documents"),
        (config.optimizer.params.qk_clip is not None, "optimizer.params.qk_clip"),
    ):
        if needs:
            why = f"{what} needs headrace's own attention, which attn_implementation sdpa selects"
            raise ConfigError("model.attn_implementation", given, why=why, remedy="use sdpa")
    if given.startswith("flash_attention") and not (config.bf16.enabled or config.fp16.enabled):
        why = "FlashAttention's kernels take 16-bit numbers, and this run is in fp32"
        raise ConfigError("model.attn_implementation", given, why=why, remedy="use sdpa, or bf16.enabled true")


def _check_hybrid_shard(parallel: ParallelSection, topology: Topology) -> None:
    shard, data = parallel.hybrid_shard_size, topology.dp * topology.cp
    if shard is not None and data % shard:
        fits = [n for n in range(1, data + 1) if data % n == 0]
        near = min(fits, key=lambda n: abs(n - shard))
        why = f"it does not divide the {data} data ranks (dp {topology.dp} x cp {topology.cp})"
        remedy = f"use {near}, or leave it out to shard over all"
        raise ConfigError("parallel.hybrid_shard_size", shard, why=why, remedy=remedy)


def _check_expert_parallel(config: Config, topology: Topology) -> None:
    parallel, ep = config.parallel, topology.ep
    if ep == 1:
        return
    check_expert_exchange(config)
    if parallel.hybrid_shard_size is not None and parallel.hybrid_shard_size * topology.tp % ep:
        ranks = parallel.hybrid_shard_size * topology.tp
        why = f"experts are split within a replica of {ranks} ranks (hybrid_shard_size x tp), which it does not divide"
        near = largest_divisor(ranks, most=ep)
        raise ConfigError("parallel.ep", ep, why=why, remedy=f"use {near}, or hybrid_shard_size {ep}")
    if parallel.shares is not None and topology.cp * topology.tp % ep:
        why = "ranks with uneven shares run different numbers of micro-batches, and an ep group runs them"
        raise ConfigError("parallel.ep", ep, why=f"{why} together", remedy="remove parallel.shares, or parallel.ep")
    if config.engine == "deepspeed":
        _check_zero_of_experts(config.zero_optimization)


def _check_zero_of_experts(zero: ZeroSection) -> None:
    """Refuses ZeRO options that DeepSpeed would fail on with experts, by an assertion after the start."""
    at, of = "zero_optimization.", "with expert parallelism (parallel.ep) DeepSpeed's ZeRO"
    if zero.stage == 3 and (zero.zero_hpz_partition_size or 1) > 1:
        why = f"{of} has no second copy of the weights within a node"
        remedy = "remove it, or use engine torch with parallel.hybrid_shard_size"
        raise ConfigError(f"{at}zero_hpz_partition_size", zero.zero_hpz_partition_size, why=why, remedy=remedy)
    needed = {"reduce_scatter": zero.stage in (1, 2), "contiguous_gradients": zero.stage == 2}
    for name, is_needed in needed.items():
        if is_needed and getattr(zero, name) is False:
            raise ConfigError(f"{at}{name}", False, why=f"{of} needs true", remedy="remove it")


def _check_offload(zero: ZeroSection, optimizer: OptimizerSection) -> None:
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section.device == "nvme" and section.nvme_path is None:
            field = f"zero_optimization.{name}.nvme_path"
            raise ConfigError(
                field, why="it is required with device nvme", remedy="name a directory on a local NVMe disk"
            )
    offload, stage = zero.offload_optimizer, zero.stage
    for name, device in (("offload_optimizer", offload.device), ("offload_param", zero.offload_param.device)):
        if device != "none" and optimizer.kind.scope is UpdateScope.MATRIX:
            why = f"{optimizer.type}'s iterations on whole matrices would run on the host"
            remedy = "remove it, or use optimizer.type AdamW"
            raise ConfigError(f"zero_optimization.{name}.device", device, why=why, remedy=remedy)
    if offload.device == "nvme" and stage != 3:
        why = f"DeepSpeed's ZeRO stage {stage} offloads the optimizer to host memory only"
        raise ConfigError("zero_optimization.offload_optimizer.device", "nvme", why=why, remedy="use cpu, or stage 3")
    if offload.device == "nvme" and optimizer.kind != ADAMW:
        why = f"DeepSpeed's swapping to NVMe was tried with the states of AdamW alone, not {optimizer.kind}"
        remedy = "use cpu, or optimizer.type AdamW"
        raise ConfigError("zero_optimization.offload_optimizer.device", "nvme", why=why, remedy=remedy)
    if offload.device != "none" and offload.ratio not in (None, 1.0):
        why = "an update split between CPU and GPU needs DeepSpeed's own Adam, and headrace runs torch's"
        raise ConfigError("zero_optimization.offload_optimizer.ratio", offload.ratio, why=why, remedy="remove it")


def _check_moments(config: Config, topology: Topology) -> None:
    if config.optimizer.moments_bytes != 4 and (config.engine != "torch" or topology.world_size > 1):
        why = "small moments are rounded by an element's index in its parameter, so that parameters have to be whole"
        remedy = 'use "engine": "torch" in one process, or fp32'
        given = config.optimizer.params.moments_dtype
        raise ConfigError("optimizer.params.moments_dtype", given, why=why, remedy=remedy)


def micro_batch_constraints(parallel: ParallelSection, topology: Topology) -> tuple[int, int]:
    """Returns the smallest number of micro-batches for the pipeline schedule, and a divisor that it must have."""
    if topology.pp == 1 or parallel.schedule_kind.any_number:
        return 1, 1
    if parallel.schedule_kind.v_shaped:
        return 2 * topology.pp, 1
    return topology.pp, topology.pp if parallel.schedule_kind.virtual_stages else 1


def check_schedule(parallel: ParallelSection, topology: Topology, batch: BatchSizes, *, memory: MemorySection) -> None:
    """Checks the number of micro-batches and of virtual stages against the pipeline schedule.

    Raises:
        ConfigError: a number does not fit; the error names the nearest valid batch sizes.
    """
    pp = topology.pp
    chunks = parallel.virtual_stages
    if chunks is not None and chunks > 1 and pp == 1:
        why = "there is no pipeline: parallel.pp is 1"
        raise ConfigError("parallel.virtual_stages", chunks, why=why, remedy="remove it, or set parallel.pp")
    if pp == 1:
        return
    name, several = parallel.schedule, parallel.schedule_kind.virtual_stages
    min_micro_batches, multiple_of = micro_batch_constraints(parallel, topology)
    if chunks is not None and several != (chunks > 1):
        why = f"{name} runs {'several virtual stages' if several else 'one virtual stage'} per rank"
        remedy = "use 2" if several else "remove it, or use parallel.schedule interleaved_1f1b"
        raise ConfigError("parallel.virtual_stages", chunks, why=why, remedy=remedy)
    if parallel.schedule_kind.v_shaped and chunks not in (None, 2):
        why = f"{name} runs two virtual stages per rank"
        raise ConfigError("parallel.virtual_stages", chunks, why=why, remedy="remove it")
    if parallel.schedule_kind.splits_backward and memory.activation_checkpointing == "selective":
        why = f"{name} splits the backward pass in two, and torch's selective checkpointing recomputes only once"
        remedy = "use full, or schedule interleaved_1f1b"
        raise ConfigError("memory.activation_checkpointing", "selective", why=why, remedy=remedy)
    if batch.accumulation % multiple_of:
        raise _micro_batches(batch, pp, why=f"{name} needs a multiple of pp {pp} micro-batches")
    if batch.accumulation < min_micro_batches:
        least = f"pp {pp}" if min_micro_batches == pp else f"2 pp, {min_micro_batches},"
        raise _micro_batches(batch, min_micro_batches, why=f"{name} needs at least {least} micro-batches")


def _micro_batches(batch: BatchSizes, of: int, *, why: str) -> ConfigError:
    """Makes the error that names the nearest numbers of micro-batches that are multiples of `of`."""
    each = batch.dp * batch.micro
    below, above = (n // of * of * each for n in (batch.accumulation, batch.accumulation + of))
    near = f"{below} or {above}" if below else str(above)
    why += f", and a step has {batch.accumulation} ({batch.samples} samples / micro {batch.micro} / dp {batch.dp})"
    return ConfigError(
        "train_batch_size", batch.samples, why=why, remedy=f"use {near}, or a smaller train_micro_batch_size_per_gpu"
    )
