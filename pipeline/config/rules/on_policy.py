"""Rules of on-policy distillation that hold for any data and models. No torch."""

from __future__ import annotations

from foundation.errors import ConfigError
from pipeline.config.sections.compression import DistillSection, OnPolicySection
from pipeline.config.sections.run import Fp8Section
from pipeline.config.topology import Topology


def check_on_policy(
    distill: DistillSection | None, topology: Topology, *, sequence_length: int, fp8: Fp8Section
) -> None:
    """Refuses samples that do not fit into a window, and layouts in which the student cannot generate.

    Raises:
        ConfigError: on-policy distillation cannot run; the error names the field and what works.
    """
    if distill is None or distill.on_policy is None:
        return
    _check_lengths(distill.on_policy, sequence_length)
    _check_engine(topology, fp8)
    for name in ("hidden_states", "attentions"):
        if getattr(distill, name) is not None:
            why = f"features are matched on the data's text, and {_KEY} replaces it in some samples"
            raise ConfigError(f"distill.{name}", why=why, remedy=f"remove it, or {_KEY}")


def _check_lengths(section: OnPolicySection, length: int) -> None:
    if section.prompt_tokens > length:
        why = f"a sample has {length} tokens (data.sequence_length), and one at least is the student's"
        remedy = f"use at most {length}, or a longer data.sequence_length"
        raise ConfigError("distill.on_policy.prompt_tokens", section.prompt_tokens, why=why, remedy=remedy)
    room = length + 1 - section.prompt_tokens
    if section.new_tokens is not None and section.new_tokens > room:
        why = f"after a prompt of {section.prompt_tokens} tokens a sample of {length} has room for {room}"
        remedy = f"use at most {room}, or leave it out"
        raise ConfigError("distill.on_policy.new_tokens", section.new_tokens, why=why, remedy=remedy)


def _check_engine(topology: Topology, fp8: Fp8Section) -> None:
    others = f"use data or tensor parallelism, ZeRO, FSDP (parallel.{{axis}} 1), or remove {_KEY}"
    for axis, size, why in (
        ("pp", topology.pp, "a new token would wait for all stages of the pipeline, one after another"),
        ("cp", topology.cp, "the next token follows the last, which one of the ranks of a sequence holds"),
    ):
        if size > 1:
            raise ConfigError(
                f"parallel.{axis}", size, why=f"{why}: {_KEY} does not support it", remedy=others.format(axis=axis)
            )
    if fp8.enabled:
        why = "fp8 rounds with scales over the tokens of a pass: the student would sample from another distribution"
        raise ConfigError("fp8.enabled", True, why=why, remedy=f"use bf16 alone, or remove {_KEY}")


_KEY = "distill.on_policy"
