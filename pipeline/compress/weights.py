"""Rounds linear weights to 8 or 4 bits and packs them with compressed-tensors.

For each group of weights w of one row: scale s = max|w| / ((2^bits - 1) / 2), stored integer
q = clamp(round(w / s), -2^(bits-1), 2^(bits-1) - 1), dequantized as q s; for FP8 s = max|w| / 448, and q is the nearest
e4m3 number. With method gptq q is chosen by `pipeline.compress.gptq`, for the same scales. Activations are rounded to
the nearest, one scale per token, by what serves the model.
Source of the formula: compressed_tensors/quantization/utils/helpers.py, calculate_qparams, symmetric case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor, compress_module
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.utils import calculate_qparams
from rich.console import Console
from rich.progress import track
from torch import nn

from headrace.base.errors import ConfigError
from pipeline.compress.assignment import LayerScheme, groups_of
from pipeline.compress.calibration import calibrate
from pipeline.compress.gptq import Rounding, e4m3, integers
from pipeline.compress.rules import QuantizationPlan
from pipeline.data.dataset import choose_windows
from pipeline.evaluation.loading import pick_device
from pipeline.models.unfused_experts import folder_names, unfuse_experts

Progress = Callable[[list[str]], Iterable[str]]


def check_modules(model: nn.Module, plan: QuantizationPlan) -> None:
    """Checks that the layers found in the file headers are linear modules of the model; its experts are unfused.

    Raises:
        ConfigError: one is no linear layer (GPT-2's Conv1D, whose weights are transposed), and cannot be packed.
        DataError: experts of a form that is not known.
    """
    unfuse_experts(model)
    modules = modules_of(model)
    for name in plan.layers:
        if name not in modules:
            kind = type(dict(model.named_modules()).get(name)).__name__
            why = f"{name} is {kind}, and only torch.nn.Linear can be quantized in a Hugging Face folder"
            remedy = "use a GGUF type (Q8_0, Q4_K_M), which llama.cpp serves, or name it in skip"
            raise ConfigError("model", plan.config.model, why=why, remedy=remedy)


def modules_of(model: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Name in the model's folder -> its linear layers and embeddings; experts are unfused."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Embedding)}
    return {stored: found[name] for name, stored in folder_names(model, list(found)).items()}


def pack(model: nn.Module, plan: QuantizationPlan, *, dtype: torch.dtype, progress: Progress = iter) -> ModelCompressor:
    """Quantizes and packs the plan's layers in place, and casts all other weights to `dtype`.

    Args:
        model: in float32, so that weights are rounded only once. Its experts are unfused.
        plan: layers and their schemes.
        dtype: of scales and unquantized weights.
        progress: wraps the iteration over layers.

    Returns:
        The compressor that writes the quantization section of config.json.
    """
    unfuse_experts(model)
    if plan.config.untie:
        _untie(model)
    modules = modules_of(model)
    schemes = {name: compression_scheme(each) for name, each in plan.schemes.items()}
    scales = _calibrated(model, plan, modules, dtype) if plan.calibration else {}
    for name in progress(list(plan.layers)):
        args = schemes[name].weights
        assert args is not None
        scale = scales[name] if name in scales else scale_of(modules[name].weight, args, dtype)
        _pack_layer(modules[name], schemes[name], scale)
    _cast(model, dtype)
    return ModelCompressor(quantization_config=_section(modules, plan, schemes))


def _untie(model: Any) -> None:
    model.config.tie_word_embeddings = False
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model._tied_weights_keys, model.all_tied_weights_keys = {}, {}


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point tensors in place, but for e4m3, which is what a weight was quantized to."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.data = tensor.data.to(dtype)


def save(model: Any, compressor: ModelCompressor, folder: Path) -> None:
    """Writes safetensors, config.json with its quantization section, and generation_config.json."""
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def compression_scheme(layer: LayerScheme) -> QuantizationScheme:
    """The scheme of a layer as compressed-tensors writes it; without its targets."""
    strategy = "channel" if layer.group is None else "group"
    common: dict[str, Any] = {"num_bits": layer.what.bits, "type": layer.what.kind, "symmetric": True}
    activations = QuantizationArgs(**common, strategy="token", dynamic=True) if layer.what.activations else None
    weights = QuantizationArgs(**common, strategy=strategy, group_size=layer.group)
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


def _section(
    modules: Mapping[str, nn.Module], plan: QuantizationPlan, schemes: dict[str, QuantizationScheme]
) -> QuantizationConfig:
    """The quantization section: layers by their names in the folder, or all linear layers where one scheme is enough.

    Routers are named, too: they are no linear layers in transformers, but are in vLLM.
    """
    groups = groups_of(plan.schemes)
    whole = len(groups) == 1 and all(isinstance(modules[name], nn.Linear) for name in plan.layers)
    found = {}
    for number, names in enumerate(groups.values()):
        scheme = schemes[names[0]].model_copy()
        scheme.targets = ["Linear"] if whole else _targets(names)
        found[f"group_{number}"] = scheme
    formats = {str(scheme.format.value) for scheme in found.values() if scheme.format is not None}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    return QuantizationConfig(
        config_groups=found,
        ignore=sorted((linear | set(plan.routers)) - plan.layers.keys()),
        format=formats.pop() if len(formats) == 1 else CompressionFormat.mixed_precision.value,
        quantization_status=QuantizationStatus.COMPRESSED,
    )


def _targets(names: list[str]) -> list[str]:
    """Names; experts by one pattern for each layer."""
    experts = {name.partition(".experts.")[0] for name in names if ".experts." in name}
    patterns = [f"re:^{re.escape(each)}\\.experts\\..*" for each in sorted(experts)]
    return [*(name for name in names if ".experts." not in name), *patterns]


def _calibrated(
    model: nn.Module, plan: QuantizationPlan, modules: Mapping[str, nn.Module], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Rounds weights in place by GPTQ; name in the folder -> their scales."""
    assert plan.calibration is not None
    config, dataset, device = plan.config, plan.calibration, pick_device()
    rows = torch.from_numpy(dataset.read(choose_windows(dataset.windows, config.calibration.samples))[:, :-1]).long()
    batch = next(n for n in range(min(config.data.batch_size, len(rows)), 0, -1) if len(rows) % n == 0)
    console = Console(stderr=True)
    own = {id(module): name for name, module in model.named_modules()}
    linear = {own[id(modules[name])]: name for name in plan.layers if isinstance(modules[name], nn.Linear)}

    def scale(module: nn.Linear) -> torch.Tensor:
        args = compression_scheme(plan.schemes[linear[own[id(module)]]]).weights
        assert args is not None
        return scale_of(module.weight, args, dtype)

    found = calibrate(
        model,
        linear,
        rows.split(batch),
        scale=scale,
        rounding={name: rounding_of(plan.schemes[stored]) for name, stored in linear.items()},
        device=device,
        progress=lambda layers: track(layers, "GPTQ", console=console, transient=True, disable=not console.is_terminal),
    )
    return {linear[name]: each for name, each in found.items()}


def rounding_of(layer: LayerScheme) -> Rounding:
    """To the numbers that the scheme of a layer stores."""
    return e4m3 if layer.what.kind == "float" else integers(layer.what.bits)


@torch.no_grad()
def scale_of(weight: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> torch.Tensor:
    """[out, groups] in its stored dtype, by whose values the integers are multiplied."""
    grouped = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    scale: torch.Tensor
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return scale.to(dtype)


@torch.no_grad()
def _pack_layer(module: nn.Module, scheme: QuantizationScheme, scale: torch.Tensor) -> None:
    """Replaces weight [out, in] by what the scheme's format stores, and weight_scale [out, groups].

    That is weight_packed int32 [out, in x bits / 32] without quantized activations, else weight int8 or e4m3 [out, in].
    """
    module.quantization_scheme = scheme
    module.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))
    zero_point = torch.zeros(scale.shape, dtype=torch.int8)  # symmetric
    module.register_parameter("weight_zero_point", nn.Parameter(zero_point, requires_grad=False))
    compress_module(module)
