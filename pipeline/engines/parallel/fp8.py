"""fp8 mixed precision: selects the linear layers and experts that multiply in fp8, checks support, converts layers.

Weights, gradients, checkpoints and parameter names do not change. A product rounds its two operands to fp8, with scales
computed from the operands each time. Source of formats and per-tensor scaling: Micikevicius et al. 2022
(arXiv:2209.05433). The products are torchao's (`fp8_products`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import ConfigError
from pipeline.config.rules.precision import block_of
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel.experts import attach_exchange, expert_modules
from pipeline.engines.parallel.tensor import RowwiseLinear, check_tp_plan
from pipeline.engines.parallel.tensor_styles import NO_TABLE, SLICED
from pipeline.models.router_names import is_router
from pipeline.models.routers import find_routers, has_experts

_CAPABILITY = {"mxfp8": (10, 0)}
"""CUDA compute capability that a recipe needs; for recipes not listed (8, 9), Ada and Hopper."""

_EXPERTS_CAPABILITY = 9
"""Major compute capability of torch's grouped products with scales per row. These are kernels for Hopper, which fail on
Blackwell (pytorch/pytorch#187095, with compute capability 10.3)."""

_EXPERTS_BLOCK = 16
"""Number that must divide the sizes of an expert's matrices, in every recipe."""

_EXPERTS = "fp8.experts"

_INSTALL = "pip install torchao"


@dataclass(frozen=True)
class Fp8Layers:
    """Linear layers and stacked experts within decoder layers, divided into layers that multiply in fp8 and others.

    Attributes:
        converted: names of the linear layers that multiply in fp8.
        excluded: names of routers, and of linear layers whose sizes fp8 kernels do not support.
        experts: names of the modules of experts whose grouped products are in fp8.
        excluded_experts: names of all other modules of experts; just "experts" if they are not modules.
    """

    converted: tuple[str, ...]
    excluded: tuple[str, ...]
    experts: tuple[str, ...] = ()
    excluded_experts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Describes the layers in one line, with `*` for layer numbers."""
        total = len(self.converted) + len(self.excluded)
        shown = f"{len(self.converted)} of {total} linear layers in decoder layers"
        if self.experts:
            shown += f", and the experts of {len(self.experts)} layers (rowwise, their weight gradients in bf16)"
        names = (*self.excluded, *self.excluded_experts)
        kinds = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})
        return f"{shown}; not {', '.join(kinds)}" if kinds else shown


def fp8_layers(section: Fp8Section, model: nn.Module, *, tp: int, table: Mapping[str, str] = NO_TABLE) -> Fp8Layers:
    """Finds the layers of a full model that multiply in fp8 in a layout.

    Tensor parallelism makes layers smaller, and those of which a rank multiplies with some rows stay in bf16.
    """
    styles = check_tp_plan(model, tp=tp, table=table) if tp > 1 else {}
    divisors = {"colwise": (tp, 1), "rowwise": (1, tp)}
    block, converted, excluded = block_of(section), list[str](), list[str]()
    for name, linear, regular in _linears(model):
        out, inner = divisors.get(styles.get(name, ""), (1, 1))
        fits = (
            regular
            and styles.get(name) not in SLICED
            and _fits(linear.out_features // out, linear.in_features // inner, block)
        )
        (converted if fits else excluded).append(name)
    experts = {name: fits for name, _, fits in _experts(model, section)}
    config: Any = model.config
    if not experts and not any(".experts." in name for name in excluded) and has_experts(config.to_dict()):
        experts = {"experts": False}  # transformers does not call these experts through its interface
    in_fp8, in_bf16 = (tuple(name for name, fits in experts.items() if fits is wanted) for wanted in (True, False))
    return Fp8Layers(tuple(converted), tuple(excluded), in_fp8, in_bf16)


def experts_in_fp8(section: Fp8Section, model: nn.Module) -> bool:
    """Whether grouped products of a model's experts are in fp8."""
    return section.enabled and any(fits for _, _, fits in _experts(model, section))


def torchao_note() -> str | None:
    """Returns a plan's note on fp8 if torchao is not installed; otherwise None."""
    return None if find_spec("torchao") else f"fp8 needs torchao, which is not installed here: {_INSTALL}."


def check_fp8(
    section: Fp8Section, model: nn.Module, *, tp: int, table: Mapping[str, str] = NO_TABLE, packages: bool = True
) -> None:
    """Refuses fp8 that cannot work with the installed packages or with this model, on any machine.

    Args:
        section: the config's `fp8`.
        model: the full model, on meta.
        tp: tensor-parallel ranks.
        table: the config's `parallel.tp_plan`.
        packages: whether torchao has to be installed here.

    Raises:
        ConfigError: torchao is missing, fp8 kernels support no layer's sizes, or experts do not support the recipe.
    """
    if not section.enabled:
        return
    if packages and find_spec("torchao") is None:
        remedy = f"{_INSTALL}, or set it to false"
        raise ConfigError("fp8.enabled", True, why="the package torchao is not installed", remedy=remedy)
    layers = fp8_layers(section, model, tp=tp, table=table)
    if layers.experts and section.recipe == "mxfp8":
        why = f"{layers.experts[0]} and other experts multiply in fp8 with a scale per row, not per 32 elements"
        raise ConfigError("fp8.recipe", section.recipe, why=why, remedy=f"set {_EXPERTS} to false, or use rowwise")
    if not layers.converted and not layers.experts:
        block = block_of(section)
        kind = model.config.model_type  # type: ignore[union-attr]
        why = f"no linear layer in the decoder layers of this {kind} has sizes that are multiples of {block}"
        remedy = f"use sizes that are multiples of {block * tp}, or set it to false"
        raise ConfigError("fp8.enabled", True, why=why, remedy=remedy)


def check_fp8_device(section: Fp8Section, device: torch.device, *, experts: bool = False) -> None:
    """Refuses fp8 on a device without fp8 hardware, before a process group exists.

    Args:
        section: the config's `fp8`.
        device: this rank's device.
        experts: whether grouped products of experts are in fp8.

    Raises:
        ConfigError: the device is not a GPU, is too old for the recipe, or has no kernel for experts.
    """
    if not section.enabled or section.emulate:
        return
    if device.type != "cuda":
        why = "this machine has no GPU, and fp8 is computed by GPUs"
        remedy = "use bf16 alone (fp8.enabled false), or fp8.emulate true to see the numerics (slow)"
        raise ConfigError("fp8.enabled", True, why=why, remedy=remedy)
    found, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    check_fp8_capability(section, found, name=name, experts=experts)


def check_fp8_capability(section: Fp8Section, found: tuple[int, int], *, name: str, experts: bool) -> None:
    """Refuses fp8 on a GPU without fp8 hardware.

    Args:
        section: the config's `fp8`.
        found: CUDA compute capability of the GPU.
        name: the GPU's name.
        experts: whether grouped products of experts are in fp8.

    Raises:
        ConfigError: the GPU is too old for the recipe, or has no kernel for experts.
    """
    if not section.enabled or section.emulate:
        return
    needed = _CAPABILITY.get(section.recipe, (8, 9))
    has = f"{name} has compute capability {found[0]}.{found[1]}"
    if found >= needed:
        if experts and found[0] != _EXPERTS_CAPABILITY:
            why = f"{has}, and torch's grouped products in fp8 need {_EXPERTS_CAPABILITY}.0 (H100, H200)"
            raise ConfigError(_EXPERTS, True, why=why, remedy="set it to false: experts then stay in bf16")
        return
    why = f"{has}, and this needs {needed[0]}.{needed[1]}"
    if found >= (8, 9):
        raise ConfigError("fp8.recipe", section.recipe, why=why, remedy="use tensorwise or rowwise")
    raise ConfigError("fp8.enabled", True, why=why, remedy="use bf16 alone (fp8.enabled false), or fp8.emulate true")


def apply_fp8(model: nn.Module, section: Fp8Section) -> None:
    """Makes the linear layers of a model's decoder layers, and its experts, multiply in fp8, in place.

    Must be called after expert and tensor parallelism, whose shards are multiplied, and before compilation and
    sharding. Experts in fp8 use the function of expert parallelism even without expert parallelism.

    Args:
        model: this rank's part of the model, on any device.
        section: the config's `fp8`.
    """
    if not section.enabled:
        return
    from pipeline.engines.parallel.fp8_products import (  # noqa: PLC0415  torchao takes seconds to import
        GroupedScaling,
        scaling_of,
        to_fp8,
    )

    scaling, block = scaling_of(section), block_of(section)
    for _name, linear, regular in list(_linears(model)):
        if regular and _fits(linear.weight.shape[0], linear.weight.shape[1], block):
            to_fp8(linear, scaling)
    for name, module, fits in _experts(model, section):
        if fits:
            attach_exchange(module, name, None).product = GroupedScaling(section)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear, bool]]:
    """Yields every linear layer within decoder layers once, and whether it gets all tokens and is not a router."""
    routers = {id(part) for router in find_routers(model) for part in router.module.modules()}
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for name, module in layer.named_modules(prefix=prefix):
            if type(module) in (nn.Linear, RowwiseLinear) and id(module) not in seen:
                seen.add(id(module))
                routes = id(module) in routers or is_router(name)
                # experts as separate modules get varying numbers of tokens, not multiples of 16
                yield name, module, not routes and ".experts." not in name


def _fits(out: int, inner: int, block: int) -> bool:
    return out % block == 0 and inner % block == 0


def _experts(model: nn.Module, section: Fp8Section) -> Iterator[tuple[str, Any, bool]]:
    """Yields the modules of stacked experts, with their names, and whether they multiply in fp8."""
    for name, module in expert_modules(model):
        sizes = [size for each in module.parameters() if each.ndim == 3 for size in each.shape[1:]]
        yield name, module, section.experts and not any(size % _EXPERTS_BLOCK for size in sizes)
