"""Calibrated quantization of a folder in the memory of one decoder layer; resumes after an interruption.

A layer is read from the safetensors files, calibrated on the outputs of the quantized layers before it, packed, written
to the work directory and freed. The modules outside of the decoder layers (embedding, last norm, head) are read for the
first hidden states, and again at the end. The tensors equal those of `calibrate` and `pack` on the whole model bit for
bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.checkpoint.export.write_safetensors import METADATA
from pipeline.compress.quantization.calibration import calibrate_layer, decoder_layers, layer_inputs
from pipeline.compress.quantization.rules import QuantizationPlan
from pipeline.compress.quantization.weights import (
    apply_scheme,
    calibration_batches,
    cast,
    kept_in_fp32,
    method_of,
    pack_layer,
    rotation_of,
    scale_of,
    weight_args,
)
from pipeline.compress.quantization.work import CalibrationWork
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.loading import empty_model, pick_device
from pipeline.models.folder.weight_files import INDEX, read_header

Say = Callable[[str], None]
Progress = Callable[[range, int], Iterable[int]]
"""Function of (indices of the remaining layers, number of all layers): returns the indices, with a progress bar."""


def streamable(model: nn.Module, plan: QuantizationPlan) -> bool:
    """Whether the files hold the model's own tensors by layer: transformers fuses and renames none.

    Args:
        model: model of the plan, on the meta device.
        plan: plan of the quantization.
    """
    modules = dict(model.named_modules())
    plain = all(isinstance(modules.get(name), nn.Linear) for name in plan.layers)
    known = model.state_dict().keys()
    possible = plan.calibration is not None and not plan.config.untie and plain and bool(decoder_layers(model))
    return possible and plan.source.tensors.keys() <= known


@torch.no_grad()
def stream(
    plan: QuantizationPlan,
    staging: Path,
    *,
    dtype: torch.dtype,
    say: Say = lambda _line: None,
    progress: Progress = lambda left, _all: left,
) -> None:
    """Writes packed weights in shards, their index, and config.json with its quantization section.

    Args:
        plan: plan that is `streamable`.
        staging: an empty directory on the file system of the output.
        dtype: dtype of scales and unquantized weights.
        say: function called with lines for people.
        progress: wraps the iteration over decoder layers.
    """
    work = CalibrationWork.open(plan)
    parts = _PartwiseModel(plan, dtype)
    count = len(parts.layers)
    if work.done:
        say(f"resuming at layer {work.done + 1} of {count}" if work.done < count else f"all {count} layers are there")
    if work.done < count:
        _calibrate(parts, work, progress)
    files = [work.layer(number) for number in range(count)]
    _write_shards(staging, files, parts.outside_tensors())
    parts.write_config(staging)


def _calibrate(parts: _PartwiseModel, work: CalibrationWork, progress: Progress) -> None:
    """Calibrates the remaining layers."""
    begin, count = work.done, len(parts.layers)
    hidden, arguments = parts.inputs()
    if begin:
        hidden = work.hidden(begin)
    for number in progress(range(begin, count), count):
        with parts.loaded(parts.layers[number]) as layer:
            linear = {name: each for name, each in parts.linear.items() if any(each is m for m in layer.modules())}
            how: dict[str, Any] = {"method": parts.method, "device": parts.device, "last": number + 1 == count}
            scales, hidden = calibrate_layer(layer, linear, hidden, arguments[number], **how)
            work.finish(number, parts.packed(layer, scales), hidden)


class _PartwiseModel:
    """The model, with the weights of one part at a time."""

    def __init__(self, plan: QuantizationPlan, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self.model: Any = empty_model(plan.source.path).float().eval()
        self._values = FromSafetensors(plan.source.path, model=self.model)
        fill_buffers(self.model, torch.device("cpu"), self._values)
        self.layers = decoder_layers(self.model)
        self.linear = {name: module for name, module in self.model.named_modules() if name in plan.layers}
        self.method, self.device = method_of(plan, self.linear, dtype), pick_device()
        self._kept = kept_in_fp32(self.model, plan)
        self._rotation = rotation_of(self.model, plan)
        self._modules = {id(module): name for name, module in self.model.named_modules()}
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        # packing replaces the layers' weights: in `model`, a quantized layer's forward pass would round again
        self._packer = empty_model(plan.source.path)
        self._compressor: ModelCompressor = apply_scheme(self._packer, plan)

    def inputs(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Inputs of the layers, as `layer_inputs` returns them."""
        head = self.model.get_output_embeddings()
        outside = [module for module in self._outside() if module is not head]
        with self._loaded(outside), _passing(self.layers):
            self._turn_outside()
            return layer_inputs(self.model, self.layers, calibration_batches(self._plan))

    @contextmanager
    def loaded(self, layer: nn.Module) -> Iterator[nn.Module]:
        """Loads the weights of a layer, in fp32 on the CPU, until the block ends."""
        with self._loaded(list(layer.modules())):
            if self._rotation is not None:
                self._rotation.layer(layer)
            yield layer

    def packed(self, layer: nn.Module, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Packed tensors of a loaded layer: name -> tensor."""
        found: dict[str, Tensor] = {}
        for module in layer.modules():
            found |= self._module_tensors(module, scales)
        return found

    def outside_tensors(self) -> dict[str, Tensor]:
        """Packed tensors outside of the decoder layers: name -> tensor."""
        outside = self._outside()
        found: dict[str, Tensor] = {}
        with self._loaded(outside):
            self._turn_outside()
            seen: set[int] = set()
            for module in outside:
                first = {id(p) for p in module.parameters(recurse=False)} - seen
                found |= self._module_tensors(module, {}) if first else {}  # a tied head is stored once
                seen |= first
        buffers = {name: self._values.buffer(name) for name, _ in self.model.named_buffers()}
        return found | {name: self._cast(name, value) for name, value in buffers.items() if value is not None}

    def write_config(self, staging: Path) -> None:
        """Writes config.json with its quantization section."""
        config = self.model.config
        config.dtype, config.architectures = self._dtype, [type(self.model).__name__]
        config.save_pretrained(staging)
        self._compressor.update_config(str(staging))

    def _turn_outside(self) -> None:
        if self._rotation is not None:
            self._rotation.outside(self.model)

    def _outside(self) -> list[nn.Module]:
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        return [module for module in self.model.modules() if id(module) not in inside]

    @contextmanager
    def _loaded(self, modules: list[nn.Module]) -> Iterator[None]:
        """Loads the values of modules' own parameters (not their submodules'), until the block ends."""
        owned = [(module, key, p) for module in modules for key, p in module._parameters.items() if p is not None]
        values: dict[int, nn.Parameter] = {}
        for module, key, empty in owned:
            if id(empty) not in values:
                values[id(empty)] = nn.Parameter(self._values.value(self._names[id(empty)]), requires_grad=False)
            module._parameters[key] = values[id(empty)]
        try:
            yield
        finally:
            for module, key, empty in owned:
                module._parameters[key] = empty

    def _cast(self, name: str, value: Tensor) -> Tensor:
        return value if name in self._kept else cast(value, self._dtype)

    def _module_tensors(self, module: nn.Module, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name = self._modules[id(module)]
        if name not in self._plan.layers:
            own = ((f"{name}.{key}", p) for key, p in module._parameters.items() if p is not None)
            return {full: self._cast(full, p) for full, p in own}
        assert isinstance(module, nn.Linear)
        packer = self._packer.get_submodule(name)
        packer._parameters |= {key: p for key, p in module._parameters.items() if p is not None}
        args = weight_args(self._plan, name)
        pack_layer(packer, scales[name] if name in scales else scale_of(module.weight, args, self._dtype))
        found = {f"{name}.{key}": self._cast(f"{name}.{key}", p) for key, p in packer.state_dict().items()}
        packer.to("meta")
        return found


@contextmanager
def _passing(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Makes layers return their hidden states unchanged, until the block ends."""

    def forward(hidden_states: Tensor, *_others: Any, **_named: Any) -> Tensor:
        assert hidden_states.ndim == 3, "the decoder takes a part of what a layer returns"
        return hidden_states

    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _write_shards(staging: Path, layers: list[Path], outside: dict[str, Tensor]) -> None:
    """Writes one file per decoder layer, one for the other tensors, and the index."""
    count = len(layers) + 1
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    save_file({name: tensor.contiguous() for name, tensor in outside.items()}, staging / names[0], metadata=METADATA)
    for source, name in zip(layers, names[1:], strict=True):
        _link(source, staging / name)
    tensors = {name: read_header(staging / name) for name in names}
    weight_map = {tensor: name for name, found in tensors.items() for tensor in found}
    total = sum(info.bytes for found in tensors.values() for info in found.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (staging / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))


def _link(source: Path, target: Path) -> None:
    """Hard-links or copies a file; the work directory keeps its own until the output is committed."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
