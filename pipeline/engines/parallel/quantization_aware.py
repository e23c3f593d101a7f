"""Quantization-aware training: linear layers compute with the weights that a quantization will store.

The forward pass rounds weights (and each token's activations, if the scheme does) to the nearest number that can be
stored. The gradient ignores the rounding (straight-through estimator; Bengio et al. 2013, arXiv:1308.3432). Parameters,
optimizer, checkpoints and their names stay those of the floating-point model. It is quantized afterwards with the same
scheme and group size, by rounding to nearest.

Shapes: O outputs, I inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import ConfigError
from pipeline.config.sections.compression import QuantizationAwareSection
from pipeline.models.rounding import Rounding, e4m3, integers
from pipeline.models.router_names import is_router
from pipeline.models.routers import find_routers
from pipeline.models.unfused_experts import is_fused

_FIELD = "quantization_aware"


@dataclass(frozen=True)
class LayerRounding:
    """Rounding of a linear layer.

    Attributes:
        stored: function that rounds to the numbers that the scheme stores.
        limit: largest stored number; the scale is the largest value divided by it.
        group: number of a row's weights that share a scale; None for the whole row.
        activations: whether each token's activations are rounded, too.
    """

    stored: Rounding
    limit: float
    group: int | None = None
    activations: bool = False

    def weights(self, weight: Tensor) -> Tensor:
        """Rounds weights [O, I] to the numbers that are stored."""
        return self._rounded(weight, self.group)

    def tokens(self, features: Tensor) -> Tensor:
        """Rounds activations [*, I] as at inference, with one scale per token."""
        return self._rounded(features, None)

    def _rounded(self, values: Tensor, group: int | None) -> Tensor:
        # in fp32 for every dtype of the values, as in a quantization
        grouped = values.float().unflatten(-1, (-1, group or values.shape[-1]))
        largest = grouped.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / self.limit, 1.0)
        return self.stored(grouped, scale).flatten(-2).to(values.dtype)


def rounding_of(section: QuantizationAwareSection) -> LayerRounding:
    """Returns the rounding that a section selects."""
    byte = (2**8 - 1) / 2
    return {
        "W4A16": LayerRounding(integers(4), (2**4 - 1) / 2, section.group_size or 32),
        "W8A16": LayerRounding(integers(8), byte, section.group_size),
        "W8A8": LayerRounding(integers(8), byte, activations=True),
        "FP8": LayerRounding(e4m3, torch.finfo(torch.float8_e4m3fn).max, activations=True),
    }[section.scheme]


class QuantizationAwareLinear(nn.Linear):
    """A linear layer that computes with rounded weights, made from a layer in place; its parameters stay."""

    rounding: LayerRounding

    def forward(self, features: Tensor) -> Tensor:
        """Computes [*, I] -> [*, O]."""
        if self.rounding.activations:
            features = _straight_through(features, self.rounding.tokens(features))
        weight = _straight_through(self.weight, self.rounding.weights(self.weight))
        return F.linear(features, weight, self.bias)


def _straight_through(values: Tensor, rounded: Tensor) -> Tensor:
    return values + (rounded - values).detach()


def check_quantization_aware(section: QuantizationAwareSection | None, model: nn.Module) -> None:
    """Refuses a model or group size with which training would not use the weights that are stored.

    Raises:
        ConfigError: experts are fused, there is no linear layer, or the group size does not divide a layer's inputs.
    """
    if section is None:
        return
    fused = next((name for name, module in model.named_modules() if is_fused(module)), None)
    if fused is not None:
        why = f"{fused} has its experts in one tensor, which would be trained without rounding and be quantized with it"
        raise ConfigError(_FIELD, section.scheme, why=why, remedy="leave it out, and quantize with method gptq")
    layers = dict(_linears(model))
    if not layers:
        kind = model.config.model_type  # type: ignore[union-attr]
        why = f"the decoder layers of this {kind} have no torch.nn.Linear to round"
        raise ConfigError(_FIELD, section.scheme, why=why, remedy="leave it out")
    group = rounding_of(section).group
    for name, linear in layers.items():
        if group is not None and linear.in_features % group:
            why = f"{name} has {linear.in_features} inputs, which {group} does not divide"
            remedy = "use a divisor of the inputs of every layer, and the same to quantize"
            raise ConfigError(f"{_FIELD}.group_size", group, why=why, remedy=remedy)


def apply_quantization_aware(model: nn.Module, section: QuantizationAwareSection | None) -> None:
    """Makes the linear layers in a model's decoder layers, except routers, compute with rounded weights, in place.

    Must be called before compilation and sharding.

    Args:
        model: this rank's part of the model, on any device.
        section: the config's `quantization_aware`.
    """
    if section is None:
        return
    for _name, linear in list(_linears(model)):
        linear.__class__ = QuantizationAwareLinear
        assert isinstance(linear, QuantizationAwareLinear)
        linear.rounding = rounding_of(section)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    routers = {id(part) for router in find_routers(model) for part in router.module.modules()}
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for name, module in layer.named_modules(prefix=prefix):
            if type(module) is nn.Linear and id(module) not in routers | seen and not is_router(name):
                seen.add(id(module))
                yield name, module
