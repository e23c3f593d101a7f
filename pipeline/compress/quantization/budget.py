"""The byte budget of mixed bits: choices of each unit of a model, and the bytes of each choice. No torch.

A unit is a set of layers that have to share a scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from foundation.errors import ConfigError
from pipeline.compress.quantization.assignment import LayerScheme, units_of
from pipeline.compress.quantization.config import MIXED, SCHEMES, QuantizeConfig
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.gguf import libllama
from pipeline.models.gguf.header import header_bytes
from pipeline.models.gguf.plan import GgufPlan
from pipeline.models.gguf.types import BY_GGUF, FLOATING_POINT, fitting

UNCHANGED = "unchanged"
"""Choice that leaves a unit in the floating-point dtype of the folder or file."""
_ENTRY_BYTES = 120
"""Largest header entry of a tensor in safetensors, in bytes, without its name: JSON of dtype, shape, offsets."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class QuantizedUnit:
    """Layers that share a scheme.

    Attributes:
        layers: names of the layers in a Hugging Face folder; for a GGUF file, the sources of one tensor.
        bytes: choice -> bytes in the file.
    """

    layers: tuple[str, ...]
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Budget:
    """A checked byte budget.

    Attributes:
        limit: largest size of the weight files, in bytes.
        fixed: bytes of the weight files that no choice changes.
        units: name -> unit; in a GGUF file, names are those of its tensors.
    """

    limit: int
    fixed: int
    units: Mapping[str, QuantizedUnit]

    def total(self, chosen: Mapping[str, str]) -> int:
        """Upper bound of the bytes of the weight files, given unit -> choice."""
        return self.fixed + sum(self.units[name].bytes[choice] for name, choice in chosen.items())

    def smallest(self) -> dict[str, str]:
        """The smallest choice of every unit."""
        return {name: min(unit.bytes, key=lambda each: unit.bytes[each]) for name, unit in self.units.items()}


def plan_budget(
    config: QuantizeConfig, source: ModelFolder, layers: Mapping[str, tuple[int, int]], gguf: GgufPlan | None
) -> Budget | None:
    """Plans the budget of scheme mixed; None for other schemes.

    Raises:
        ConfigError: the budget is below the smallest possible size, or the unchanged model meets it.
    """
    if config.budget is None:
        return None
    limit = config.budget.bytes or int(config.budget.bits_per_weight * source.parameters / 8)  # type: ignore[operator]
    fixed, units = _folder_units(config, source, layers) if gguf is None else _file_units(config, gguf)
    budget = Budget(limit, fixed, units)
    least = budget.total(budget.smallest())
    if least > limit:
        key = "bytes" if config.budget.bytes else "bits_per_weight"
        why = f"the smallest choice of every layer takes {least:,} bytes, not {limit:,}; {fixed:,} stay unquantized"
        least_given = f"{least:,}" if key == "bytes" else f"{ceil(8000 * least / source.parameters) / 1000:.3f}"
        remedy = f"use {least_given} or more, or smaller candidates"
        if gguf is None and "lm_head" not in layers and not source.tied:
            remedy += ', or quantize the head, too ("skip": [])'
        raise ConfigError(f"budget.{key}", getattr(config.budget, key), why=why, remedy=remedy)
    whole = budget.total(dict.fromkeys(budget.units, UNCHANGED))
    if whole <= limit:
        why = f"the model as it is takes {whole:,} bytes, which the {limit:,} allow"
        raise ConfigError("budget", config.budget.model_dump(), why=why, remedy="use less, or leave the model as it is")
    return budget


def check_keys(config: QuantizeConfig) -> None:
    """Checks the budget's keys, before the model is read.

    Raises:
        ConfigError: mixed without a budget or the reverse; two limits or none; candidates of two formats; duplicates.
    """
    if (config.scheme == MIXED) != (config.budget is not None):
        if config.budget is None:
            remedy = 'add "budget": {"bytes": N}, or use another scheme'
            raise ConfigError("scheme", config.scheme, why="it needs a budget", remedy=remedy)
        why = f"scheme {config.scheme} gives every layer the same"
        raise ConfigError("budget", config.budget.model_dump(), why=why, remedy='use "scheme": "mixed"')
    if config.budget is None:
        return
    if (config.budget.bytes is None) == (config.budget.bits_per_weight is None):
        why = "it has both bytes and bits_per_weight, or none of them"
        raise ConfigError("budget", config.budget.model_dump(), why=why, remedy="give one of them")
    folder = [name in SCHEMES for name in config.budget.candidates]
    if any(folder) and not all(folder):
        why = "some are schemes of Hugging Face folders, and some are types of GGUF files"
        raise ConfigError("budget.candidates", config.budget.candidates, why=why, remedy=f"use {', '.join(SCHEMES)}")
    if len(set(config.budget.candidates)) < len(folder):
        raise ConfigError("budget.candidates", config.budget.candidates, why="one is given twice", remedy="remove it")


def _folder_units(
    config: QuantizeConfig, source: ModelFolder, layers: Mapping[str, tuple[int, int]]
) -> tuple[int, dict[str, QuantizedUnit]]:
    assert config.budget is not None
    size = _DTYPE_BYTES[config.dtype or source.dtype]
    given = {name: scheme for name, scheme in _given(config, layers).items() if scheme is not None}
    free = [name for name in layers if name not in given]
    kept = source.fp32_beside
    untouched = {name: info for name, info in source.tensors.items() if name.rpartition(".")[0] not in layers}
    fixed = sum(prod(info.shape) * (4 if name in kept else size) for name, info in untouched.items()) + 4096
    fixed += sum(_ENTRY_BYTES + len(name) for name in source.every) + sum(info.bytes for info in source.extra.values())
    fixed += sum(3 * (_ENTRY_BYTES + len(name)) for name in layers)
    for name, scheme in given.items():
        fixed += LayerScheme(scheme, SCHEMES[scheme].group).stored_bytes(layers[name], scale_bytes=size)
    units = {}
    for unit, names in units_of(free).items():
        choices = {
            each: sum(scheme_of(each).stored_bytes(layers[name], scale_bytes=size) for name in names)
            for each in config.budget.candidates
        }
        units[unit] = QuantizedUnit(
            tuple(names), choices | {UNCHANGED: sum(size * prod(layers[name]) for name in names)}
        )
    return fixed, units


def _given(config: QuantizeConfig, layers: Iterable[str]) -> dict[str, str | None]:
    """Layer -> scheme that the config fixes; None for the other layers."""
    return {name: config.head if name == "lm_head" else None for name in layers}


def scheme_of(choice: str) -> LayerScheme:
    """The scheme of a choice in a Hugging Face folder."""
    return LayerScheme(choice, SCHEMES[choice].group)


def _file_units(config: QuantizeConfig, plan: GgufPlan) -> tuple[int, dict[str, QuantizedUnit]]:
    assert config.budget is not None
    types = [GGMLQuantizationType[name] for name in config.budget.candidates]
    if not set(types) <= BY_GGUF and not libllama.installed():
        why = "K-quants are computed by llama.cpp's library, which is not installed"
        remedy = f"pip install {libllama.PACKAGE}, or use Q8_0 and Q4_0"
        raise ConfigError("budget.candidates", config.budget.candidates, why=why, remedy=remedy)
    fixed = header_bytes(plan) + 32 * len(plan.tensors)  # every tensor begins at a multiple of 32
    units = {}
    for tensor in plan.tensors:
        fitted = {fitting(kind, tensor.shape[-1]) for kind in types} - FLOATING_POINT
        if tensor.type == GGMLQuantizationType.F32 or not fitted:  # rows that no block divides stay unchanged
            fixed += tensor.stored_bytes
            continue
        choices = {kind.name: replace(tensor, type=kind).stored_bytes for kind in sorted(fitted, key=_bits)}
        units[tensor.name] = QuantizedUnit(tensor.sources, choices | {UNCHANGED: tensor.stored_bytes})
    return fixed, units


def _bits(kind: GGMLQuantizationType) -> float:
    elements, size = GGML_QUANT_SIZES[kind]
    return float(8 * size / elements)
