"""Linear layers whose three matrix products (output, input gradient, weight gradient) are computed in fp8 by torchao,
and the grouped products of experts.

A layer changes its class in place, so that its name, its parameters and its hooks stay. The module imports torchao;
only `parallel.fp8` imports it, if a config enables fp8.

torchao 0.18's own grouped product (prototype.moe_training) requires that experts' rows are multiples of 16, and has no
emulation. So scales and rounding are torchao's, and the product is torch's.

Shapes: features [..., D_in], weight [D_out, D_in], output [..., D_out]; M rows of L experts with weights [L, O, I].
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_utils import tensor_to_scale
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
from pipeline.models.grouped_products import weight_gradient


@torch._dynamo.allow_in_graph
class _ScaledProduct(torch.autograd.Function):
    """torchao's products, with the weight itself saved for the backward pass.

    torchao saves the weight's transpose, a view. Under ZeRO-3, where DeepSpeed frees a weight by replacing its storage,
    the view would keep the gathered weight's storage until the backward pass.
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
        # torchao's form of the recipe; its conversion also corrects a fault of inductor's fp8 kernels
        template = nn.Sequential(nn.Linear(16, 16, device="meta"))
        self._products = convert_to_float8_training(template, config=self._config)[0].linear_mm_config

    def __call__(self, features: Tensor, weight: Tensor) -> Tensor:
        """Multiplies features by a weight; differentiable."""
        output: Tensor = _ScaledProduct.apply(features, weight, self._products, self._config)
        return output

    def gathered_in_fp8(self, shard: Tensor) -> Tensor:
        """Wraps a shard of a weight, in the same memory, so that FSDP2 gathers it in fp8."""
        dtype = self._config.cast_config_weight.target_dtype
        wrapped: Tensor = WeightWithDynamicFloat8CastTensor(shard, self._products, dtype)
        return wrapped


class MxScaling:
    """One power of two per 32 elements (OCP Microscaling): `mxfp8`."""

    def __init__(self, section: Fp8Section) -> None:
        self._preference = KernelPreference.EMULATED if section.emulate else KernelPreference.AUTO
        self._dim1 = MXFP8Dim1CastKernelChoice.TORCH if section.emulate else MXFP8Dim1CastKernelChoice.CUDA

    def __call__(self, features: Tensor, weight: Tensor) -> Tensor:
        """Multiplies features by a weight; differentiable. All operands are e4m3."""
        dtypes = (torch.float8_e4m3fn,) * 3
        kernels = (self._preference, MXFP8Dim0CastKernelChoice.TRITON, self._dim1)
        output: Tensor = mx_mm.apply(features, weight, *dtypes, 32, *kernels, ScaleCalculationMode.RCEIL, False)
        return output


class GroupedScaling:
    """Grouped products of experts, with one scale per row of either operand, a power of two.

    The products for the output and the rows' gradient are in fp8 (e4m3). The product for the weights' gradient is in
    bf16: for fp8, tensor cores need the summed dim contiguous, here an expert's rows, which would have to begin at a
    multiple of 16.
    """

    def __init__(self, section: Fp8Section) -> None:
        self._emulate = section.emulate

    def __call__(self, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """Computes `experts.grouped_product`; differentiable."""
        output: Tensor = _GroupedProduct.apply(rows, weight, ends, transposed, self._emulate)
        return output


class _GroupedProduct(torch.autograd.Function):
    """Implements `GroupedScaling`; saves the weight itself, as `_ScaledProduct` does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, emulate: bool) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.transposed, ctx.emulate = transposed, emulate
        return _scaled(rows, weight.mT if transposed else weight, ends, emulate=emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient, to_rows, to_weight = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            matrices = weight if ctx.transposed else weight.mT
            to_rows = _scaled(gradient, matrices, ends, emulate=ctx.emulate, fast=False)
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(rows, gradient, ends, ctx.transposed)
        return to_rows, to_weight, None, None, None


def _scaled(rows: Tensor, weight: Tensor, ends: Tensor, *, emulate: bool, fast: bool) -> Tensor:
    """Multiplies rows [M, I] by matrices [L, O, I], both in fp8 with a scale per row -> [M, O]. `fast` accumulates
    faster but less exactly, as torchao does for outputs, not for gradients."""
    (left, left_scale), (right, right_scale) = _rounded(rows), _rounded(weight)
    if emulate:
        values = F.grouped_mm(left.float() * left_scale, (right.float() * right_scale).mT, offs=ends)
        return values.to(rows.dtype)
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    scales = left_scale.squeeze(-1), right_scale.squeeze(-1)
    # the public F.scaled_grouped_mm has no kernel for fake tensors in torch 2.13
    return torch._scaled_grouped_mm(left, right.mT, *scales, ends, out_dtype=rows.dtype, use_fast_accum=fast)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds values [..., I] to e4m3, row-major; returns them and the factor of each row, fp32 [..., 1]."""
    scale = tensor_to_scale(
        values,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    # a power of two changes no digit, so the product does not need fp32; the largest value stays below e4m3's limit
    return (values * scale.to(values.dtype)).to(torch.float8_e4m3fn).contiguous(), scale.reciprocal()


class Fp8Linear(nn.Linear):
    """A linear layer with fp8 products, made from a layer in place."""

    scaling: Float8Scaling | MxScaling

    def forward(self, features: Tensor) -> Tensor:
        """Computes outputs [..., O] from features [..., I], in the features' dtype, bias included."""
        out = self.scaling(features, self.weight)
        return out if self.bias is None else out + self.bias


class Fp8RowwiseLinear(RowwiseLinear):
    """A tensor-parallel rowwise layer with fp8 products; its sum over ranks stays in the dtype of the features."""

    scaling: Float8Scaling | MxScaling

    def product(self, features: Tensor) -> Tensor:
        """Implements `RowwiseLinear.product`."""
        return self.scaling(features, self.weight)


def to_fp8(linear: nn.Linear, scaling: Float8Scaling | MxScaling) -> None:
    """Makes a layer compute its products in fp8, in place."""
    linear.__class__ = Fp8RowwiseLinear if isinstance(linear, RowwiseLinear) else Fp8Linear
    linear.scaling = scaling  # type: ignore[assignment]


def scaling_of(section: Fp8Section) -> Float8Scaling | MxScaling:
    """Returns the scaling that a config selects; one object for all layers, so that they share a compiled graph."""
    return MxScaling(section) if section.recipe == "mxfp8" else Float8Scaling(section)
