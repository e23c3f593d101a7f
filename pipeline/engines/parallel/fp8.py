"""fp8 mixed precision: which linear layers multiply in fp8, whether that can work here, and their conversion.

Weights, gradients, checkpoints and parameter names do not change: a product rounds its two operands to fp8, with
scales that are computed from the operands themselves each time. Source of formats and per-tensor scaling: Micikevicius
et al. 2022 (arXiv:2209.05433). The products are torchao's (`fp8_products`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.base.errors import ConfigError
from pipeline.config.rules.precision import block_of
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel.experts import expert_modules
from pipeline.engines.parallel.tensor import RowwiseLinear, check_tp_plan
from pipeline.models.router_names import is_router
from pipeline.models.routers import find_routers

_CAPABILITY = {"mxfp8": (10, 0)}
"""CUDA compute capability that a recipe needs; (8, 9), Ada and Hopper, where it is not listed."""

_INSTALL = "pip install torchao (or headrace[fp8])"


@dataclass(frozen=True)
class Fp8Layers:
    """The linear layers within decoder layers.

    Attributes:
        converted: names of those that multiply in fp8.
        excluded: names of those whose sizes fp8 kernels do not take, and routers; numbers of layers are `*`.
        experts: whether there are stacked experts, whose grouped products stay in bf16.
    """

    converted: tuple[str, ...]
    excluded: tuple[str, ...]
    experts: bool = False

    @property
    def text(self) -> str:
        """One line."""
        total = len(self.converted) + len(self.excluded)
        shown = f"{len(self.converted)} of {total} linear layers in decoder layers"
        kinds = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in self.excluded})
        kinds += ["experts, whose grouped products stay in bf16"] * self.experts
        return f"{shown}; not {', '.join(kinds)}" if kinds else shown


def fp8_layers(section: Fp8Section, model: nn.Module, *, tp: int) -> Fp8Layers:
    """Which layers of a full model multiply in fp8 in a layout. Tensor parallelism makes their sizes smaller."""
    styles = check_tp_plan(model, tp=tp) if tp > 1 else {}
    divisors = {"colwise": (tp, 1), "rowwise": (1, tp)}
    block, converted, excluded = block_of(section), list[str](), list[str]()
    for name, linear, regular in _linears(model):
        out, inner = divisors.get(styles.get(name, ""), (1, 1))
        fits = regular and _fits(linear.out_features // out, linear.in_features // inner, block)
        (converted if fits else excluded).append(name)
    return Fp8Layers(tuple(converted), tuple(excluded), any(True for _ in expert_modules(model)))


def torchao_note() -> str | None:
    """What a plan says of fp8 where torchao is not installed; None where it is."""
    return None if find_spec("torchao") else f"fp8 needs torchao, which is not installed here: {_INSTALL}."


def check_fp8(section: Fp8Section, model: nn.Module, *, tp: int, packages: bool = True) -> None:
    """Refuses fp8 that cannot work with the installed packages or with this model, on whatever machine.

    Args:
        section: the config's `fp8`.
        model: on meta.
        tp: tensor-parallel ranks.
        packages: whether torchao has to be installed here.

    Raises:
        ConfigError: torchao is missing, or no layer has sizes that fp8 kernels take.
    """
    if not section.enabled:
        return
    if packages and find_spec("torchao") is None:
        remedy = f"{_INSTALL}, or set it to false"
        raise ConfigError("fp8.enabled", True, why="the package torchao is not installed", remedy=remedy)
    layers = fp8_layers(section, model, tp=tp)
    if not layers.converted:
        block = block_of(section)
        kind = model.config.model_type  # type: ignore[union-attr]
        why = f"no linear layer in the decoder layers of this {kind} has sizes that are multiples of {block}"
        remedy = f"use sizes that are multiples of {block * tp}, or set it to false"
        raise ConfigError("fp8.enabled", True, why=why, remedy=remedy)


def check_fp8_device(section: Fp8Section, device: torch.device) -> None:
    """Refuses fp8 on a device whose hardware does not have it, before a process group exists.

    Raises:
        ConfigError: the device is no GPU, or too old for the recipe.
    """
    if not section.enabled or section.emulate:
        return
    needed = _CAPABILITY.get(section.recipe, (8, 9))
    if device.type != "cuda":
        why = "this machine has no GPU, and fp8 is computed by GPUs"
        remedy = "use bf16 alone (fp8.enabled false), or fp8.emulate true to see the numerics (slow)"
        raise ConfigError("fp8.enabled", True, why=why, remedy=remedy)
    found = torch.cuda.get_device_capability(device)
    if found >= needed:
        return
    name = torch.cuda.get_device_name(device)
    why = f"{name} has compute capability {found[0]}.{found[1]}, and this needs {needed[0]}.{needed[1]}"
    if found >= (8, 9):
        raise ConfigError("fp8.recipe", section.recipe, why=why, remedy="use tensorwise or rowwise")
    raise ConfigError("fp8.enabled", True, why=why, remedy="use bf16 alone (fp8.enabled false), or fp8.emulate true")


def apply_fp8(model: nn.Module, section: Fp8Section) -> None:
    """Makes the linear layers of a model's decoder layers multiply in fp8, in place.

    Call it after tensor parallelism, whose shards are what is multiplied, and before compilation and sharding.

    Args:
        model: this rank's part, on any device.
        section: the config's `fp8`.
    """
    if not section.enabled:
        return
    from pipeline.engines.parallel.fp8_products import scaling_of, to_fp8  # noqa: PLC0415  torchao takes seconds to import

    scaling, block = scaling_of(section), block_of(section)
    for _name, linear, regular in list(_linears(model)):
        if regular and _fits(linear.weight.shape[0], linear.weight.shape[1], block):
            to_fp8(linear, scaling)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear, bool]]:
    """Every linear layer within decoder layers, once, and whether it sees all tokens and chooses no experts."""
    routers = {id(part) for router in find_routers(model) for part in router.module.modules()}
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for name, module in layer.named_modules(prefix=prefix):
            if type(module) in (nn.Linear, RowwiseLinear) and id(module) not in seen:
                seen.add(id(module))
                routes = id(module) in routers or is_router(name)
                # experts as single modules see another number of tokens each time, not a multiple of 16
                yield name, module, not routes and ".experts." not in name


def _fits(out: int, inner: int, block: int) -> bool:
    return out % block == 0 and inner % block == 0
