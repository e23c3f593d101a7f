"""Rules of `loss.mtp` (multi-token prediction) that need neither torch nor the model."""

from __future__ import annotations

from foundation.errors import ConfigError
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology

FIELD = "loss.mtp"


def check_multi_token(config: Config, topology: Topology) -> None:
    """Checks that the sections of a config allow `loss.mtp`.

    Raises:
        ConfigError: the modules reach past the sequence, or a section or the pipeline schedule does not know them.
    """
    section = config.loss.mtp
    if section is None:
        return
    length = config.data.sequence_length
    if section.depth >= length:
        why = f"a sequence has {length} tokens, and the modules predict one further token each"
        raise ConfigError(f"{FIELD}.depth", section.depth, why=why, remedy=f"use less than {length}")
    for without, (present, why) in {
        "distill": (config.distill is not None, "a teacher's logits are of the next token"),
        "quantization_aware": (config.quantization_aware is not None, "no scheme covers the modules"),
        "fp8.enabled": (config.fp8.enabled, "the modules were never trained in fp8"),
        "model.parametrization": (
            config.model.parametrization != "standard",
            "its rules for initialization and learning rates do not cover the modules",
        ),
    }.items():
        if present:
            raise ConfigError(FIELD, section.depth, why=f"{without} is given, and {why}", remedy=f"remove {without}")
    schedule = config.parallel.schedule
    if topology.pp > 1 and config.parallel.schedule_kind.splits_backward:
        why = f"the schedule {schedule} computes the gradients of weights by themselves, and embeddings have no others"
        raise ConfigError("parallel.schedule", schedule, why=why, remedy="use 1f1b or interleaved_1f1b")
