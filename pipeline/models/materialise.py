"""From meta to memory, parameter by parameter.

`place` decides what happens to each parameter once it is real (ZeRO-3 shards it at once); so no rank holds more than
what it keeps, plus one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pipeline.models.values import ParameterValues


@torch.no_grad()
def materialise(
    model: nn.Module,
    values: ParameterValues,
    *,
    device: torch.device,
    place: Callable[[nn.Parameter], None] | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Gives every parameter and buffer of a model on meta its value.

    Args:
        model: built by `build_meta`; changed in place. Tied parameters stay one object.
        values: where the values come from.
        device: where they go.
        place: called with each parameter as soon as it is real.
        names: id of a parameter -> the name its value has, where that is not its name in `model`.
    """
    names = names or {id(parameter): name for name, parameter in model.named_parameters()}
    real: dict[int, nn.Parameter] = {}
    # all values are taken before the model changes: a value may be computed by the model's own code, on meta
    owners = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    for _module, _key, on_meta in owners:
        if id(on_meta) not in real:
            value = values.value(names[id(on_meta)]).to(device=device, dtype=on_meta.dtype)
            real[id(on_meta)] = nn.Parameter(value, requires_grad=on_meta.requires_grad)
            del value  # else it would live on, whole, while the next one is made
            if place is not None:
                place(real[id(on_meta)])
    fill_buffers(model, device)
    for module, key, on_meta in owners:
        module._parameters[key] = real[id(on_meta)]


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Gives the buffers (rotary tables) of a model their values: its own `_init_weights` computes them.

    To be called while its parameters are on meta, where `_init_weights` does nothing.
    """
    for module in model.modules():
        buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        if not buffers:
            continue
        for key, buffer in buffers.items():
            module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        model._init_weights(module)  # type: ignore[operator]
