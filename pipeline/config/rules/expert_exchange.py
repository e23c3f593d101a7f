"""Rules of the token exchange between expert-parallel ranks: its key, and features that the kernels support."""

from __future__ import annotations

from foundation.errors import ConfigError
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology

_KEY = "parallel.ep_exchange"
_OVERLAP = "parallel.ep_overlap"


def expert_exchange(config: Config) -> str:
    """Returns `parallel.ep_exchange`, or the value of DeepSpeed's key for it; all_to_all without either.

    Raises:
        ConfigError: the two keys contradict each other.
    """
    own, section = config.parallel.ep_exchange, config.expert_parallel
    theirs = section.comm_backend if section.enabled else None
    other = "all_to_all" if theirs == "comm" else theirs
    if own is not None and other is not None and own != other:
        why = f"expert_parallel.comm_backend is {theirs}"
        raise ConfigError(_KEY, own, why=why, remedy="give one of the two")
    return own or other or "all_to_all"


def check_expert_exchange(config: Config) -> None:
    """Refuses features that the kernels of DeepEP and HybridEP do not support, in a run with expert parallelism.

    Raises:
        ConfigError: a feature is unsupported; the error names the field and what works.
    """
    name = expert_exchange(config)
    if name == "all_to_all":
        return
    if not config.bf16.enabled:
        given = "fp16" if config.fp16.enabled else "fp32"
        remedy = "use bf16.enabled true, or all_to_all"
        raise ConfigError(_KEY, name, why=f"its kernels take bf16, and this run is in {given}", remedy=remedy)
    if config.memory.activation_checkpointing == "selective":
        why = "selective activation checkpointing keeps results of torch's operators, not of these kernels"
        raise ConfigError(_KEY, name, why=why, remedy="use memory.activation_checkpointing full or none, or all_to_all")
    if config.distill is not None and config.distill.on_policy is not None:
        why = "its buffers have the size of a micro-batch, and a sampling student needs other sizes"
        raise ConfigError(_KEY, name, why=why, remedy="use all_to_all, or remove distill.on_policy")


def check_overlap(config: Config, topology: Topology, batch: BatchSizes, *, elastic: bool) -> None:
    """Refuses overlap of the exchange with another micro-batch if there is no exchange or only one micro-batch.

    Args:
        config: the config.
        topology: the mesh.
        batch: batch sizes on the mesh.
        elastic: whether the run may have any number of processes; the key then has no effect if each has only one
            micro-batch.

    Raises:
        ConfigError: overlap is impossible; the error names what works.
    """
    if not config.parallel.ep_overlap:
        return
    if topology.ep == 1:
        raise ConfigError(_OVERLAP, True, why="there is no expert parallelism: parallel.ep is 1", remedy="remove it")
    if config.parallel.shares is not None:
        why = "ranks with uneven shares run different numbers of micro-batches, and the overlap needs pairs"
        raise ConfigError(_OVERLAP, True, why=why, remedy="remove it, or parallel.shares")
    if (name := expert_exchange(config)) != "all_to_all":
        why = f"layers wait for the kernels of parallel.ep_exchange {name}"
        raise ConfigError(_OVERLAP, True, why=why, remedy="remove it, or use parallel.ep_exchange all_to_all")
    if topology.pp > 1 and not config.parallel.schedule_kind.overlaps:
        why = f"schedule {config.parallel.schedule} runs no forward pass beside a backward pass"
        remedy = "use parallel.schedule dualpipev, or parallel.ep_overlap false"
        raise ConfigError(_OVERLAP, True, why=why, remedy=remedy)
    if batch.accumulation == 1 and not elastic:
        why = f"a step has one micro-batch, of {batch.micro} samples, and none to run beside it"
        smaller = f"use a train_micro_batch_size_per_gpu of {batch.micro // 2} or less, or "
        remedy = (smaller if batch.micro > 1 else "") + f"a train_batch_size of {2 * batch.samples}, or remove it"
        raise ConfigError(_OVERLAP, True, why=why, remedy=remedy if batch.micro > 1 else f"use {remedy}")
