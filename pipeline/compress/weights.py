"""Rounds linear weights to 8 or 4 bits and packs them with compressed-tensors.

For each group of weights w of one row: scale s = max|w| / ((2^bits - 1) / 2), stored integer
q = clamp(round(w / s), -2^(bits-1), 2^(bits-1) - 1), dequantized as q s; for FP8 s = max|w| / 448, and q is the nearest
e4m3 number. With method gptq q is chosen by `pipeline.compress.gptq`, for the same scales. Activations are rounded to
the nearest, one scale per token, by what serves the model.
Source of the formula: compressed_tensors/quantization/utils/helpers.py, calculate_qparams, symmetric case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor, compress_module
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from rich.console import Console
from rich.progress import track
from torch import nn

from headrace.base.errors import ConfigError
from pipeline.compress.calibration import Method, calibrate, decoder_layers
from pipeline.compress.families import family_of
from pipeline.compress.gptq import e4m3, integers
from pipeline.compress.rotation import Rotation
from pipeline.compress.rules import QuantizationPlan
from pipeline.compress.smoothing import Smoother
from pipeline.data.dataset import choose_windows
from pipeline.evaluation.loading import pick_device

Progress = Callable[[list[str]], Iterable[str]]


def check_modules(model: nn.Module, plan: QuantizationPlan) -> None:
    """Checks that the layers found in the file headers are linear modules of the model.

    Raises:
        ConfigError: one is not a `torch.nn.Linear` (GPT-2's Conv1D, fused experts), and cannot be packed.
    """
    modules = dict(model.named_modules())
    for name in plan.layers:
        if not isinstance(modules.get(name), nn.Linear):
            kind = type(modules[name]).__name__ if name in modules else "part of a module that transformers fuses"
            why = f"{name} is {kind}, and only torch.nn.Linear can be quantized"
            skip = r"re:.*\.experts\..*" if ".experts." in name else name
            raise ConfigError("model", plan.config.model, why=why, remedy=f'add "{skip}", or a "re:" pattern, to skip')


def pack(model: nn.Module, plan: QuantizationPlan, *, dtype: torch.dtype, progress: Progress = iter) -> ModelCompressor:
    """Quantizes and packs the plan's layers in place, and casts all other weights to `dtype`.

    Args:
        model: in float32, so that weights are rounded only once.
        plan: layers, bits and group size.
        dtype: of scales and unquantized weights.
        progress: wraps the iteration over layers.

    Returns:
        The compressor that writes the quantization section of config.json.
    """
    args = weight_args(plan)
    rotation = rotation_of(model, plan)
    if rotation is not None:
        rotation.outside(model)
        for layer in decoder_layers(model):
            rotation.layer(layer)
    scales = _calibrated(model, plan, args, dtype) if plan.calibration else {}
    compressor = apply_scheme(model, plan)
    modules = dict(model.named_modules())
    for name in progress(list(plan.layers)):
        module = modules[name]
        assert isinstance(module, nn.Linear)
        pack_layer(module, scales[name] if name in scales else scale_of(module.weight, args, dtype))
    _cast(model, dtype)
    return compressor


def apply_scheme(model: nn.Module, plan: QuantizationPlan) -> ModelCompressor:
    """Gives the plan's layers what packing needs; the compressor writes the quantization section of config.json."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    groups, ignore = {"group_0": _scheme(plan)}, sorted(linear - plan.layers.keys())
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore), show_progress=False)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    return compressor


def weight_args(plan: QuantizationPlan) -> QuantizationArgs:
    """How the weights of the plan's layers are stored."""
    args = _scheme(plan).weights
    assert args is not None
    return args


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = cast(tensor.data, dtype)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype` if it is floating point, but for e4m3, which is what a weight was quantized to."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


def save(model: Any, compressor: ModelCompressor, folder: Path) -> None:
    """Writes safetensors, config.json with its quantization section, and generation_config.json."""
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _scheme(plan: QuantizationPlan) -> QuantizationScheme:
    what, group = plan.config.what, plan.config.group
    strategy = "channel" if group is None else "group"
    common: dict[str, Any] = {"num_bits": what.bits, "type": what.kind, "symmetric": True}
    activations = QuantizationArgs(**common, strategy="token", dynamic=True) if what.activations else None
    weights = QuantizationArgs(**common, strategy=strategy, group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


def calibration_batches(plan: QuantizationPlan) -> Sequence[torch.Tensor]:
    """Token ids of the calibration windows, int64 [B, T] each, all of one shape."""
    assert plan.calibration is not None
    config, dataset = plan.config, plan.calibration
    rows = torch.from_numpy(dataset.read(choose_windows(dataset.windows, config.calibration.samples))[:, :-1]).long()
    size = next(n for n in range(min(config.data.batch_size, len(rows)), 0, -1) if len(rows) % n == 0)
    return torch.split(rows, size)


def rotation_of(model: nn.Module, plan: QuantizationPlan) -> Rotation | None:
    """What the model is turned by before anything else; None for nothing."""
    if not plan.config.rotation:
        return None
    return Rotation.of(model, family_of(plan.source.config, key="rotation", value=True))


def method_of(plan: QuantizationPlan, args: QuantizationArgs, dtype: torch.dtype) -> Method:
    """What calibration does with a decoder layer."""
    config, what = plan.config, plan.config.what
    rounding = e4m3 if what.kind == "float" else integers(what.bits)
    smoother = None
    if config.smoothing is not None:
        family = family_of(plan.source.config, key="smoothing", value=config.smoothing)
        smoother = Smoother(config.smoothing, family, maximum=what.activations)
    return Method(
        lambda module: scale_of(module.weight, args, dtype), rounding if config.method == "gptq" else None, smoother
    )


def _calibrated(
    model: nn.Module, plan: QuantizationPlan, args: QuantizationArgs, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Smooths the model and rounds weights in place by GPTQ; name -> their scales."""
    console = Console(stderr=True)
    return calibrate(
        model,
        plan.layers,
        calibration_batches(plan),
        method=method_of(plan, args, dtype),
        device=pick_device(),
        progress=lambda layers: track(
            layers, "calibrating", console=console, transient=True, disable=not console.is_terminal
        ),
    )


@torch.no_grad()
def scale_of(weight: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> torch.Tensor:
    """[out, groups] in its stored dtype, by whose values the integers are multiplied."""
    grouped = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    scale: torch.Tensor
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return scale.to(dtype)


@torch.no_grad()
def pack_layer(module: nn.Linear, scale: torch.Tensor) -> None:
    """Replaces weight [out, in] by what the scheme's format stores, and weight_scale [out, groups].

    That is weight_packed int32 [out, in x bits / 32] without quantized activations, else weight int8 or e4m3 [out, in].
    """
    module.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))
    zero_point = torch.zeros(scale.shape, dtype=torch.int8)  # symmetric
    module.register_parameter("weight_zero_point", nn.Parameter(zero_point, requires_grad=False))
    compress_module(module)
