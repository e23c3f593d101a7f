"""Loads compressed-tensors folders that transformers cannot load: with quantized experts or several schemes.

transformers 5.23 has the experts of a layer in one tensor, for which it only accepts weights that it can dequantize;
then it applies the scheme of the first group to every dense layer. This loader dequantizes each layer by its own
scheme, keeps experts as separate linear layers, and rounds inputs if the scheme requires it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import compute_dynamic_scales_and_zp, fake_quantize
from compressed_tensors.utils.match import is_match
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from foundation.errors import DataError
from foundation.foreign_json import read_json
from pipeline.models.construction.buffers import keep_in_fp32
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.folder.weight_files import HfFields
from pipeline.models.unfused_experts import folder_names, unfuse_experts

_STORED = ("weight_packed", "weight_scale", "weight_shape", "weight")


def load_compressed(folder: ModelFolder, *, dtype: torch.dtype | str = "auto") -> Any:
    """Loads a folder; dequantizes every weight by the scheme of its layer.

    Args:
        folder: a folder for which `needs_own_loader` of `loading.py` is true.
        dtype: dtype of floating-point parameters; "auto" for the folder's own.

    Raises:
        DataError: the tensors do not match the architecture, or a scheme is not known.
    """
    config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    del config.quantization_config
    wanted = getattr(torch, folder.dtype) if isinstance(dtype, str) else dtype
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=wanted)
    keep_in_fp32(model)
    unfuse_experts(model)
    names = [name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), Tensor)]
    stored = folder_names(model, names)
    section = QuantizationConfig.model_validate(_fields(folder))
    schemes = {stored[name]: _scheme(stored[name], model.get_submodule(name), section) for name in names}
    tensors = _dequantized(_tensors(folder), schemes, str(section.format))
    own = {f"{theirs}.": f"{name}." for name, theirs in stored.items()}
    state = {_renamed(name, own): value for name, value in tensors.items()}
    _load(model, state, folder.path)
    for name in names:
        scheme = schemes[stored[name]]
        if scheme is not None and scheme.input_activations is not None:
            model.get_submodule(name).register_forward_pre_hook(rounds_inputs(scheme.input_activations))
    return model


def _fields(folder: ModelFolder) -> HfFields:
    section: HfFields = read_json(folder.path / "config.json")["quantization_config"]
    return {name: value for name, value in section.items() if name in QuantizationConfig.model_fields}


def _scheme(name: str, module: nn.Module, section: QuantizationConfig) -> QuantizationScheme | None:
    """Finds a layer's scheme: that of the first group that has the layer's name in the folder, or its class."""
    if is_match(name, module, section.ignore or ()):
        return None
    for group in section.config_groups.values():
        assert isinstance(group, QuantizationScheme)
        if is_match(name, module, group.targets):
            return group
    return None


def _dequantized(
    tensors: Mapping[str, Tensor], schemes: Mapping[str, QuantizationScheme | None], format_name: str
) -> dict[str, Tensor]:
    """Converts all weights to floating point, by name in the folder."""
    found = {name: value for name, value in tensors.items() if name.rpartition(".")[2] not in _STORED[:3]}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight_scale":
            continue
        scheme = schemes.get(module)
        if scheme is None:
            raise DataError(f"{module} is quantized, but no group of config.json names it\n  try: quantize it again")
        stored = getattr(scheme.format, "value", scheme.format) or format_name
        compressor = BaseCompressor.get_value_from_registry(str(stored))
        parts = {each: tensors[f"{module}.{each}"] for each in _STORED if f"{module}.{each}" in tensors}
        found[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return found


def _renamed(name: str, own: Mapping[str, str]) -> str:
    module, _, leaf = name.rpartition(".")
    return own.get(f"{module}.", f"{module}.") + leaf


def _load(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        which = f"missing {', '.join(missing[:3]) or '-'}, unexpected {', '.join(unexpected[:3]) or '-'}"
        raise DataError(f"{path} does not match its architecture: {which}\n  try: quantize the model again")
    model.tie_weights()  # type: ignore[operator]


def _tensors(folder: ModelFolder) -> dict[str, Tensor]:
    every = {name: value for file in folder.files for name, value in load_file(file).items()}
    return {name: value for name, value in every.items() if name not in folder.extra}


def rounds_inputs(args: QuantizationArgs) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Makes a forward pre-hook that rounds the inputs of a layer, with a scale for each token.

    Args:
        args: settings of the rounding.
    """

    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (value,) = given
        if not value.numel():
            return given
        scale, zero_point = compute_dynamic_scales_and_zp(value=value, args=args, module=module)
        return (fake_quantize(x=value, scale=scale, zero_point=zero_point, args=args),)

    return hook
