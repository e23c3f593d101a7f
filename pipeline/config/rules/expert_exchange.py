"""How expert-parallel ranks exchange tokens: the key that says it, and what a package's kernels combine with."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from pipeline.config.sections.run import Config

_KEY = "parallel.ep_exchange"


def expert_exchange(config: Config) -> str:
    """`parallel.ep_exchange`, or what DeepSpeed's key says of it; all_to_all where neither is given.

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
    """Refuses what the kernels of DeepEP and HybridEP do not combine with, in a run with expert parallelism.

    Raises:
        ConfigError: names the field and what works.
    """
    name = expert_exchange(config)
    if name == "all_to_all":
        return
    if not config.bf16.enabled:
        given = "fp16" if config.fp16.enabled else "fp32"
        remedy = "use bf16.enabled true, or all_to_all"
        raise ConfigError(_KEY, name, why=f"its kernels take bf16, and this run is in {given}", remedy=remedy)
    if config.memory.activation_checkpointing == "selective":
        why = "selective activation checkpointing keeps results of torch's operators, and its kernels are none"
        raise ConfigError(_KEY, name, why=why, remedy="use memory.activation_checkpointing full or none, or all_to_all")
    if config.distill is not None and config.distill.on_policy is not None:
        why = "its buffers are for the tokens of a micro-batch, and a student that samples has other numbers of them"
        raise ConfigError(_KEY, name, why=why, remedy="use all_to_all, or remove distill.on_policy")
