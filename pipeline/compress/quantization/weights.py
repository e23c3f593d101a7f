"""Rounds linear weights to 8 or 4 bits and packs them with compressed-tensors.

For each group of weights w of one row: scale s = max|w| / ((2^bits - 1) / 2), stored integer q = clamp(round(w / s),
-2^(bits-1), 2^(bits-1) - 1), dequantized as q s. For FP8 s = max|w| / 448, and q is the nearest e4m3 number. With
method gptq, `pipeline.compress.quantization.gptq` chooses q for the same scales. The program that serves the model
rounds activations to nearest, with one scale per token.
Source of the formula: compressed_tensors/quantization/utils/helpers.py, calculate_qparams, symmetric case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor, compress_module
from compressed_tensors.compressors.format import infer_module_format
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

from foundation.errors import ConfigError
from pipeline.compress.quantization.assignment import LayerScheme, groups_of
from pipeline.compress.quantization.calibration import Method, calibrate, decoder_layers
from pipeline.compress.quantization.families import family_of
from pipeline.compress.quantization.gptq import Rounding, e4m3, integers
from pipeline.compress.quantization.rotation import Rotation
from pipeline.compress.quantization.rules import QuantizationPlan
from pipeline.compress.quantization.signround import SignRound
from pipeline.compress.quantization.smoothing import Smoother
from pipeline.data.dataset import choose_windows
from pipeline.models.construction.buffers import declared_fp32
from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.folder.loading import pick_device
from pipeline.models.unfused_experts import folder_names, unfuse_experts

Progress = Callable[[list[str]], Iterable[str]]


def check_modules(model: nn.Module, plan: QuantizationPlan) -> None:
    """Checks that the layers found in the file headers are linear modules of the model; unfuses its experts.

    Raises:
        ConfigError: a module is not a linear layer (GPT-2's Conv1D, whose weights are transposed) and cannot be packed.
        DataError: the form of the experts is unknown.
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
    """Linear layers and embeddings by their name in the model's folder; experts are unfused."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Embedding)}
    return {stored: found[name] for name, stored in folder_names(model, list(found)).items()}


def matrices_of(model: Any) -> dict[str, nn.Module]:
    """Linear layers, embeddings and GPT-2's Conv1D by their name in the model's folder; experts are unfused.

    GPT-2's folders on the Hub were saved without a head and their names lack the prefix: both names are keys.
    """
    conv = {name: each for name, each in model.named_modules() if type(each).__name__ == "Conv1D"}
    found: dict[str, nn.Module] = {**modules_of(model), **conv}
    return {name.removeprefix(f"{model.base_model_prefix}."): each for name, each in found.items()} | found


def pack(model: nn.Module, plan: QuantizationPlan, *, dtype: torch.dtype, progress: Progress = iter) -> ModelCompressor:
    """Quantizes and packs the plan's layers in place, and casts other weights to `dtype`, except `kept_in_fp32`.

    Args:
        model: model in float32, to round weights only once; its experts are unfused in place.
        plan: plan with the layers and their schemes.
        dtype: dtype of scales and unquantized weights.
        progress: wraps the iteration over layers.

    Returns:
        The compressor that writes the quantization section of config.json.
    """
    unfuse_experts(model)
    if plan.config.untie:
        _untie(model)
    rotation = rotation_of(model, plan)
    if rotation is not None:
        rotation.outside(model)
        for layer in decoder_layers(model):
            rotation.layer(layer)
    modules, kept = modules_of(model), kept_in_fp32(model, plan)
    scales = _calibrated(model, plan, modules, dtype) if plan.calibration else {}
    compressor = apply_scheme(model, plan)
    for name in progress(list(plan.layers)):
        weight = modules[name].weight
        pack_layer(modules[name], scales[name] if name in scales else scale_of(weight, weight_args(plan, name), dtype))
    _cast(model, dtype, kept=kept)
    return compressor


def apply_scheme(model: nn.Module, plan: QuantizationPlan) -> ModelCompressor:
    """Sets the schemes of the plan's layers; returns the compressor that writes config.json's quantization section."""
    modules = modules_of(model)
    schemes = {name: compression_scheme(each) for name, each in plan.schemes.items()}
    for name, scheme in schemes.items():
        modules[name].quantization_scheme = scheme
    return ModelCompressor(quantization_config=_section(modules, plan, schemes))


def weight_args(plan: QuantizationPlan, name: str) -> QuantizationArgs:
    """Storage format of a layer's weights."""
    args = compression_scheme(plan.schemes[name]).weights
    assert args is not None
    return args


def _untie(model: Any) -> None:
    model.config.tie_word_embeddings = False
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model._tied_weights_keys, model.all_tied_weights_keys = {}, {}


def kept_in_fp32(model: Any, plan: QuantizationPlan) -> set[str]:
    """Parameters and buffers of a model that stay in fp32 whatever dtype the others get.

    The source has them in fp32 beside weights of 16 bits, or the architecture declares them: in bf16, the 238 different
    biases of a router became 8.

    Args:
        model: model with unfused experts, not yet packed.
        plan: plan with the source folder.
    """
    beside = plan.source.fp32_beside
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    stored = {name: group.key for group in groups_of_model(model, names) for name in group.names} if beside else {}
    return {name for name in names if name in beside or stored.get(name) in beside or declared_fp32(model, name)}


def _cast(model: nn.Module, dtype: torch.dtype, *, kept: Collection[str]) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in kept:
            tensor.data = cast(tensor.data, dtype)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts a floating-point tensor to `dtype`, unless it is quantized to e4m3."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


def save(model: Any, compressor: ModelCompressor, folder: Path) -> None:
    """Writes safetensors, config.json with its quantization section, and generation_config.json."""
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def compression_scheme(layer: LayerScheme) -> QuantizationScheme:
    """The scheme of a layer as compressed-tensors describes it, without its targets."""
    strategy = "channel" if layer.group is None else "group"
    common: dict[str, Any] = {"num_bits": layer.what.bits, "type": layer.what.kind, "symmetric": True}
    activations = QuantizationArgs(**common, strategy="token", dynamic=True) if layer.what.activations else None
    weights = QuantizationArgs(**common, strategy=strategy, group_size=layer.group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    scheme.format = infer_module_format(nn.Linear, scheme)
    return scheme


def _section(
    modules: Mapping[str, nn.Module], plan: QuantizationPlan, schemes: dict[str, QuantizationScheme]
) -> QuantizationConfig:
    """The quantization section: names the layers as in the folder, or all linear layers if one scheme is enough.

    Routers are named, too: they are linear layers in vLLM, but not in transformers.
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
    linear |= {name.removesuffix(".weight") for name, info in plan.source.extra.items() if len(info.shape) == 2}
    return QuantizationConfig(
        config_groups=found,
        ignore=sorted((linear | set(plan.routers)) - plan.layers.keys()),
        format=formats.pop() if len(formats) == 1 else CompressionFormat.mixed_precision.value,
        quantization_status=QuantizationStatus.COMPRESSED,
    )


def _targets(names: list[str]) -> list[str]:
    """Targets of a scheme: layer names, with the experts of a layer as one pattern."""
    experts = {name.partition(".experts.")[0] for name in names if ".experts." in name}
    patterns = [f"re:^{re.escape(each)}\\.experts\\..*" for each in sorted(experts)]
    return [*(name for name in names if ".experts." not in name), *patterns]


def calibration_batches(plan: QuantizationPlan) -> Sequence[torch.Tensor]:
    """Token ids of the calibration windows, int64 [B, T] each, all of one shape."""
    assert plan.calibration is not None
    config, dataset = plan.config, plan.calibration
    rows = torch.from_numpy(dataset.read(choose_windows(dataset.windows, config.calibration.samples))[:, :-1]).long()
    size = next(n for n in range(min(config.data.batch_size, len(rows)), 0, -1) if len(rows) % n == 0)
    return torch.split(rows, size)


def rotation_of(model: nn.Module, plan: QuantizationPlan) -> Rotation | None:
    """Rotation to apply before everything else; None if the plan has none."""
    if not plan.config.rotation:
        return None
    return Rotation.of(model, family_of(plan.source.config, key="rotation", value=True))


def method_of(plan: QuantizationPlan, modules: Mapping[str, nn.Module], dtype: torch.dtype) -> Method:
    """Calibration steps of a plan.

    Args:
        plan: plan with the schemes of its layers.
        modules: name of a layer in the plan -> module to calibrate.
        dtype: dtype of the scales.
    """
    config = plan.config
    smoother = None
    if config.smoothing is not None:
        family = family_of(plan.source.config, key="smoothing", value=config.smoothing)
        activations = any(scheme.what.activations for scheme in plan.schemes.values())
        smoother = Smoother(config.smoothing, family, maximum=activations)
    names = {id(modules[name]): name for name in plan.layers}
    rounding = {name: rounding_of(scheme) for name, scheme in plan.schemes.items()}

    def scale(module: nn.Linear) -> torch.Tensor:
        return scale_of(module.weight, weight_args(plan, names[id(module)]), dtype)

    def bits(module: nn.Linear) -> int:
        return plan.schemes[names[id(module)]].what.bits

    sign_round = SignRound(bits, config.calibration.iterations) if config.method == "auto-round" else None
    return Method(scale, rounding if config.method == "gptq" else None, smoother, sign_round)


def _calibrated(
    model: nn.Module, plan: QuantizationPlan, modules: Mapping[str, nn.Module], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Smooths the model and rounds its weights in place; returns name in the folder -> scales."""
    console = Console(stderr=True)
    own = {id(module): name for name, module in model.named_modules()}
    stored = {own[id(modules[name])]: name for name in plan.layers}
    method = method_of(plan, modules, dtype)
    if isinstance(method.rounding, Mapping):
        method = replace(method, rounding={name: method.rounding[each] for name, each in stored.items()})
    found = calibrate(
        model,
        stored,
        calibration_batches(plan),
        method=method,
        device=pick_device(),
        progress=lambda layers: track(
            layers, "calibrating", console=console, transient=True, disable=not console.is_terminal
        ),
    )
    return {stored[name]: each for name, each in found.items()}


def rounding_of(layer: LayerScheme) -> Rounding:
    """Rounding to the numbers that a layer's scheme stores."""
    return e4m3 if layer.what.kind == "float" else integers(layer.what.bits)


@torch.no_grad()
def scale_of(weight: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> torch.Tensor:
    """Scales of a weight, [out, groups], by which integers are multiplied, in their stored dtype."""
    grouped = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    scale: torch.Tensor
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return scale.to(dtype)


@torch.no_grad()
def pack_layer(module: nn.Module, scale: torch.Tensor) -> None:
    """Replaces weight [out, in] by its packed form and weight_scale [out, groups].

    The packed form is weight_packed int32 [out, in x bits / 32] if activations are not quantized, else weight int8 or
    e4m3 [out, in].
    """
    module.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))
    zero_point = torch.zeros(scale.shape, dtype=torch.int8)  # symmetric
    module.register_parameter("weight_zero_point", nn.Parameter(zero_point, requires_grad=False))
    compress_module(module)
