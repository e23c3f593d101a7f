"""Rules of mixed precision, fp8 and quantization-aware training that hold on any machine. No torch."""

from __future__ import annotations

from foundation.errors import ConfigError
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.compression import QuantizationAwareSection
from pipeline.config.sections.deepspeed import Bf16Section, DataTypesSection, Fp16Section
from pipeline.config.sections.run import Fp8Section
from pipeline.config.topology import Topology

_QUANTIZATION_AWARE = "quantization_aware"


def check_precision(bf16: Bf16Section, fp16: Fp16Section, data_types: DataTypesSection) -> None:
    """Checks that one precision is selected, and that the dtype of gradient accumulation fits it.

    Raises:
        ConfigError: bf16 and fp16 are both selected, or gradients are accumulated in bf16 in a run that is not bf16.
    """
    if bf16.enabled and fp16.enabled:
        why = "bf16.enabled is true, too, and weights have one dtype"
        raise ConfigError("fp16.enabled", True, why=why, remedy="keep bf16 (it needs no loss scaling), or only fp16")
    if data_types.grad_accum_dtype == "bf16" and not bf16.enabled:
        why = f"gradients of an {'fp16' if fp16.enabled else 'fp32'} run are accumulated in fp32"
        raise ConfigError("data_types.grad_accum_dtype", "bf16", why=why, remedy="remove it, or enable bf16")


def block_of(section: Fp8Section) -> int:
    """Returns the number that must divide a matrix product's sizes: 16 (bytes), or 32 (elements of an mxfp8 block)."""
    return 32 if section.recipe == "mxfp8" else 16


def check_fp8_precision(section: Fp8Section, *, bf16: Bf16Section, engine: str, stage: int) -> None:
    """Checks that bf16 is on with fp8, and that weights can be gathered in fp8 if the config asks for it.

    Raises:
        ConfigError: bf16 is off, or weights cannot be gathered in fp8 with this recipe, engine or ZeRO stage.
    """
    if not section.enabled:
        return
    if not bf16.enabled:
        why = "everything but matrix products needs a 16-bit type, and bf16 is off"
        raise ConfigError("fp8.enabled", True, why=why, remedy='add "bf16": {"enabled": true}')
    if not section.fsdp_all_gather:
        return
    field, remedy = "fp8.fsdp_all_gather", "set it to false"
    if section.recipe != "tensorwise":
        why = f"with recipe {section.recipe} a weight's shard has no scale of its own"
        raise ConfigError(field, True, why=why, remedy=f"{remedy}, or use fp8.recipe tensorwise")
    if engine != "torch" or stage not in (2, 3):
        why = f"engine {engine} at ZeRO stage {stage} does not gather weights by FSDP2"
        raise ConfigError(field, True, why=why, remedy=f"{remedy}, or use engine torch with ZeRO stage 2 or 3")


def check_fp8_tokens(section: Fp8Section, topology: Topology, batch: BatchSizes) -> None:
    """Checks the tokens of a micro-batch, over which the matrix product of a weight gradient sums.

    Raises:
        ConfigError: the number of tokens is not a multiple of the block of fp8 kernels.
    """
    # this recipe computes weight gradients in bf16
    if not section.enabled or section.recipe == "rowwise_with_gw_hp":
        return
    block, length = block_of(section), batch.sequence_length
    tokens = batch.micro * length // topology.cp
    if tokens % block == 0:
        return
    multiple = block * topology.cp
    near = max(multiple, length // multiple * multiple)
    why = f"a micro-batch has {tokens:,} tokens on a rank, and fp8 kernels take multiples of {block}"
    remedy = f"use a sequence length of {near}, or fp8.recipe rowwise_with_gw_hp"
    raise ConfigError("data.sequence_length", length, why=why, remedy=remedy)


def check_quantization_aware(section: QuantizationAwareSection | None, topology: Topology, *, fp8: Fp8Section) -> None:
    """Checks the features used beside quantization-aware training.

    Raises:
        ConfigError: the run has fp8 products, tensor parallelism, or a group size that the scheme does not use.
    """
    if section is None:
        return
    if fp8.enabled:
        why = "both round the operands of the same products"
        raise ConfigError(_QUANTIZATION_AWARE, section.scheme, why=why, remedy="set fp8.enabled to false")
    if topology.tp > 1:
        why = f"a scale covers a whole row or token, and tp {topology.tp} shards these"
        raise ConfigError(_QUANTIZATION_AWARE, section.scheme, why=why, remedy="use parallel.tp 1, with ZeRO, pp or cp")
    if section.group_size is not None and section.scheme in ("W8A8", "FP8"):
        why = f"{section.scheme} has one scale for each row of weights"
        raise ConfigError(f"{_QUANTIZATION_AWARE}.group_size", section.group_size, why=why, remedy="leave it out")
