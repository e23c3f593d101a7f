"""Persistent buffers: tensors of a model's state dict that no optimizer updates and that shapes alone do not determine.

Examples are the bias that the routers of DeepSeek-V3 and GLM-4-MoE add to an expert's score, and MiniMax's decays. Like
parameters, they are initialized, loaded, saved in checkpoints and exported under their Hugging Face names. Every rank
that has the module has the whole buffer (tensor parallelism does not shard it). A buffer that a module registers with
`persistent=False` (a rotary table) is computed whenever a model is built.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.own_init import Constructors, init_weights, seeded


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Maps Hugging Face name to buffer, for this rank's part of a model; the buffers may be changed in place."""
    return {name: module._buffers[key] for name, module, key in _persistent(model)}  # type: ignore[misc]


def buffer_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns the shape of every persistent buffer, by Hugging Face name."""
    return {name: buffer.shape for name, buffer in persistent_buffers(model).items()}


def fill_buffers(model: nn.Module, device: torch.device, values: ParameterValues | None = None) -> None:
    """Fills every buffer of a model on meta, from `values` or by the model's own `_init_weights`.

    Must be called while the parameters are on meta, where `_init_weights` does nothing to them.

    Args:
        model: model on meta, changed in place; dtypes stay.
        device: device of the filled buffers.
        values: values of persistent buffers; buffers absent from it are computed, all if it is None.
    """
    constructors = Constructors(model)
    on_meta = [
        (name, module, key)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    for _name, module, key in on_meta:
        module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
    first, second = _computed(model, on_meta, 0), _computed(model, on_meta, 1)
    for at, (name, module, key) in enumerate(on_meta):
        if not _same(first[at], second[at]):  # `_init_weights` does not set the buffer
            value = constructors.value(name, key, seed=0)
            _fill(module, key, 0 if value is None or value.shape != first[at].shape else value)
    if on_meta:
        _init_all(model, {name for name, _module, _key in on_meta})
    if values is not None:
        load_buffers(model, values)


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second)


def _computed(model: nn.Module, where: list[tuple[str, nn.Module, str]], before: int) -> list[Tensor]:
    """Returns buffers after `_init_weights`, on the CPU; before it, all elements have the value `before`. NaN is 0."""
    for _name, module, key in where:
        _fill(module, key, before)
    _init_all(model, {name for name, _module, _key in where})
    return [_buffer(module, key).detach().cpu().nan_to_num().clone() for _name, module, key in where]


def _init_all(model: nn.Module, owners: set[str]) -> None:
    """Calls `_init_weights` on the modules that own buffers, then on the enclosing modules, which may set them, too."""
    around = {owner[:at] for owner in owners for at, letter in enumerate(f"{owner}.") if letter == "."} | {""}
    for name in sorted(around, key=lambda each: -len(each.split(".")) if each else 1):
        failures = () if name in owners else (NotImplementedError, RuntimeError, AttributeError, TypeError)
        absent = contextlib.nullcontext() if name in owners else _any_layers(model.get_submodule(name))
        # an enclosing module may read parameters, which are on meta
        with absent, seeded(0), contextlib.suppress(*failures):  # the same on every rank if it draws numbers
            init_weights(model, name)


@contextlib.contextmanager
def _any_layers(module: nn.Module) -> Iterator[None]:
    """Lets a module's `_init_weights` loop over all layers: those of other pipeline stages have every attribute."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    swapped = [(each, key, one) for each in lists for key, one in each._modules.items() if not _has_state(one)]
    for each, key, _one in swapped:
        each._modules[key] = _Anything()
    try:
        yield
    finally:
        for each, key, one in swapped:
            each._modules[key] = one


def _has_state(module: nn.Module | None) -> bool:
    return module is not None and any(each._parameters or each._buffers for each in module.modules())


class _Anything(nn.Module):
    """Has every attribute and does nothing: `_is_hf_initialized` is true, so transformers initializes none of them."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Returns itself."""
        return self


@torch.no_grad()
def _fill(module: nn.Module, key: str, value: int | Tensor) -> None:
    buffer = _buffer(module, key)
    buffer.copy_(value) if isinstance(value, Tensor) else buffer.fill_(value)


def _buffer(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


@torch.no_grad()
def load_buffers(model: nn.Module, values: ParameterValues) -> None:
    """Copies the values of persistent buffers into a model; buffers absent from `values` stay unchanged."""
    for name, buffer in persistent_buffers(model).items():
        value = values.buffer(name)
        if value is not None:
            buffer.copy_(value)


def computed_buffers(model: nn.Module, values: ParameterValues) -> dict[str, Tensor]:
    """Returns the persistent buffers that `fill_buffers` would make, on the CPU; the model on meta is not changed."""
    filled = copy.deepcopy(model)
    fill_buffers(filled, torch.device("cpu"), values)
    return persistent_buffers(filled)


def frozen_to_buffers(model: nn.Module) -> None:
    """Makes every parameter that the architecture declares frozen (`requires_grad=False`) a persistent buffer.

    Its name in a state dict stays. No optimizer may own such a tensor: AFMoE's expert bias follows other rules than the
    gradient, position tables of Marian and Pegasus never change, and DeepSpeed has no partition for them.
    """
    for module in model.modules():
        frozen = [(key, p) for key, p in module._parameters.items() if p is not None and not p.requires_grad]
        for key, parameter in frozen:
            del module._parameters[key]
            module.register_buffer(key, parameter.data)


def keep_in_fp32(model: nn.Module) -> None:
    """Converts the buffers that the architecture declares to need fp32 to fp32, whatever the model's dtype.

    An update of a router's bias (1e-3 per step) would be lost in bf16, whose numbers near 1 are 8e-3 apart.
    Transformers keeps fp32 when it loads weights (`_keep_in_fp32_modules_strict`), but not when it builds a model.
    """
    for name, module, key in list(_persistent(model)):
        buffer = module._buffers[key]
        if buffer is not None and buffer.is_floating_point() and declared_fp32(model, name):
            module._buffers[key] = buffer.float()


def parameters_declared_fp32(model: nn.Module) -> list[str]:
    """The parameters that transformers keeps in fp32 beside bf16; here, all parameters have the model's dtype."""
    return [name for name, _ in model.named_parameters() if declared_fp32(model, name)]


def declared_fp32(model: nn.Module, name: str) -> bool:
    """Whether transformers keeps a parameter or buffer in fp32: it searches its patterns anywhere in a name."""
    declared = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(each.replace("*", ".*"), name) for each in declared)


def _persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, module, key
