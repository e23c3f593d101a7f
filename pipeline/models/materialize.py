"""Materializes a model from the meta device, parameter by parameter.

A callback receives each parameter once it has its value (ZeRO-3 shards it immediately), so that no rank holds more than
its shards plus one full parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pipeline.models.buffers import fill_buffers
from pipeline.models.values import ParameterValues


@torch.no_grad()
def materialize(
    model: nn.Module,
    values: ParameterValues,
    *,
    device: torch.device,
    on_parameter: Callable[[nn.Parameter], None] | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Gives every parameter and buffer of a model on meta its value.

    Args:
        model: built by `build_meta`; changed in place. Tied parameters stay one object.
        values: of its parameters, and of persistent buffers where it has them.
        device: of the result.
        on_parameter: called with each parameter as soon as it has its value.
        names: id of a parameter -> its name in `values`, where that is not its name in `model`.
    """
    names = names or {id(parameter): name for name, parameter in model.named_parameters()}
    real: dict[int, nn.Parameter] = {}
    # all values are computed before the model changes: `values` may run the model's own code, on meta
    owners = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    for _module, _key, on_meta in owners:
        if id(on_meta) not in real:
            value = values.value(names[id(on_meta)]).to(device=device, dtype=on_meta.dtype)
            real[id(on_meta)] = nn.Parameter(value, requires_grad=on_meta.requires_grad)
            del value  # otherwise the full tensor would stay in memory while the next one is computed
            if on_parameter is not None:
                on_parameter(real[id(on_meta)])
    fill_buffers(model, device, values)
    for module, key, on_meta in owners:
        module._parameters[key] = real[id(on_meta)]
