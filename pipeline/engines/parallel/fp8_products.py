"""Linear layers whose three matrix products (output, input gradient, weight gradient) are computed in fp8 by torchao.

A layer changes its class in place, so that its name, its parameters and its hooks stay. Imports torchao: only
`parallel.fp8` imports this module, where a config enables fp8.

Shapes: features [..., D_in], weight [D_out, D_in], output [..., D_out].
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel.tensor import RowwiseLinear


@torch._dynamo.allow_in_graph
class _ScaledProduct(torch.autograd.Function):
    """torchao's products, with the weight itself saved for the backward pass.

    torchao saves its transpose, a view: under ZeRO-3 that keeps the storage of the gathered weight, which DeepSpeed
    replaces when it frees a weight, until the backward pass has used it.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, products: Any, config: Any) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.products, ctx.config = products, config
        unsaved = SimpleNamespace(save_for_backward=lambda *_tensors: None)
        output: Tensor = matmul_with_hp_or_float8_args.forward(unsaved, features, weight.t(), products, config)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        features, weight = ctx.saved_tensors
        saved = SimpleNamespace(saved_tensors=(features, weight.t()), linear_mm_config=ctx.products, config=ctx.config)
        to_features, to_transposed, *_ = matmul_with_hp_or_float8_args.backward(saved, gradient)
        return to_features, to_transposed.t(), None, None


class Float8Scaling:
    """One scale per tensor or per row: `tensorwise`, `rowwise`, `rowwise_with_gw_hp`."""

    def __init__(self, section: Fp8Section) -> None:
        recipe = Float8LinearConfig.from_recipe_name(section.recipe)
        self._config = dataclasses.replace(recipe, emulate=section.emulate)
        # what torchao makes of the recipe; its conversion also corrects a fault of inductor's fp8 kernels
        template = nn.Sequential(nn.Linear(16, 16, device="meta"))
        self._products = convert_to_float8_training(template, config=self._config)[0].linear_mm_config

    def __call__(self, features: Tensor, weight: Tensor) -> Tensor:
        """Their product; differentiable."""
        output: Tensor = _ScaledProduct.apply(features, weight, self._products, self._config)
        return output

    def gathered_in_fp8(self, shard: Tensor) -> Tensor:
        """A shard of a weight that FSDP2 gathers in fp8; it holds the same memory."""
        dtype = self._config.cast_config_weight.target_dtype
        wrapped: Tensor = WeightWithDynamicFloat8CastTensor(shard, self._products, dtype)
        return wrapped


class MxScaling:
    """One power of two per 32 elements (OCP Microscaling): `mxfp8`."""

    def __init__(self, section: Fp8Section) -> None:
        self._preference = KernelPreference.EMULATED if section.emulate else KernelPreference.AUTO
        self._dim1 = MXFP8Dim1CastKernelChoice.TORCH if section.emulate else MXFP8Dim1CastKernelChoice.CUDA

    def __call__(self, features: Tensor, weight: Tensor) -> Tensor:
        """Their product; differentiable. All operands are e4m3."""
        dtypes = (torch.float8_e4m3fn,) * 3
        kernels = (self._preference, MXFP8Dim0CastKernelChoice.TRITON, self._dim1)
        output: Tensor = mx_mm.apply(features, weight, *dtypes, 32, *kernels, ScaleCalculationMode.RCEIL, False)
        return output


class Fp8Linear(nn.Linear):
    """A linear layer with fp8 products; what a layer becomes, in place."""

    scaling: Float8Scaling | MxScaling

    def forward(self, features: Tensor) -> Tensor:
        """The product in the dtype of the features, and the bias in that dtype."""
        out = self.scaling(features, self.weight)
        return out if self.bias is None else out + self.bias


class Fp8RowwiseLinear(RowwiseLinear):
    """A tensor-parallel rowwise layer with fp8 products; its sum over ranks stays in the dtype of the features."""

    scaling: Float8Scaling | MxScaling

    def product(self, features: Tensor) -> Tensor:
        """See `RowwiseLinear.product`."""
        return self.scaling(features, self.weight)


def to_fp8(linear: nn.Linear, scaling: Float8Scaling | MxScaling) -> None:
    """Changes a layer in place."""
    linear.__class__ = Fp8RowwiseLinear if isinstance(linear, RowwiseLinear) else Fp8Linear
    linear.scaling = scaling  # type: ignore[assignment]


def scaling_of(section: Fp8Section) -> Float8Scaling | MxScaling:
    """The scaling that a config selects; one object for all layers, so that they share a compiled graph."""
    return MxScaling(section) if section.recipe == "mxfp8" else Float8Scaling(section)
