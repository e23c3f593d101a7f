"""Rules of quantization-aware training that hold whatever the model. No torch."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from pipeline.config.sections.run import Config
from pipeline.config.topology import Topology

_FIELD = "quantization_aware"


def check_quantization_aware(config: Config, topology: Topology) -> None:
    """Checks what quantization-aware training combines with.

    Raises:
        ConfigError: fp8 products, tensor parallelism, or a group size where the scheme has none.
    """
    section = config.quantization_aware
    if section is None:
        return
    if config.fp8.enabled:
        why = "both round the operands of the same products"
        raise ConfigError(_FIELD, section.scheme, why=why, remedy="set fp8.enabled to false")
    if topology.tp > 1:
        why = f"a scale is of whole rows and tokens, which tp {topology.tp} shards"
        raise ConfigError(_FIELD, section.scheme, why=why, remedy="use parallel.tp 1, with ZeRO, pp or cp")
    if section.group_size is not None and section.scheme in ("W8A8", "FP8"):
        why = f"{section.scheme} has one scale for each row of weights"
        raise ConfigError(f"{_FIELD}.group_size", section.group_size, why=why, remedy="leave it out")
