"""Materializes a model from the meta device, parameter by parameter.

With ZeRO-3, `make` shards each parameter at once, so that no rank has more in memory than its shards and one full
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.initial_values import ParameterValues

MakeParameter = Callable[[str, nn.Parameter], nn.Parameter]


@torch.no_grad()
def materialize(
    model: nn.Module,
    values: ParameterValues,
    *,
    device: torch.device,
    make: MakeParameter | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Fills every parameter and buffer of a model on meta.

    Args:
        model: model from `build_meta`, changed in place. Tied parameters stay one object.
        values: values of the parameters, and perhaps of persistent buffers.
        device: device of the new parameters and buffers.
        make: function (name in `values`, parameter on meta) -> parameter; None makes a parameter with its whole value.
        names: id of a parameter -> its name in `values`, if it differs from the name in `model`.
    """

    def whole(name: str, on_meta: nn.Parameter) -> nn.Parameter:
        value = values.value(name, device=device).to(on_meta.dtype)
        return nn.Parameter(value, requires_grad=on_meta.requires_grad)

    names = names or {id(parameter): name for name, parameter in model.named_parameters()}
    real: dict[int, nn.Parameter] = {}
    # all values are computed before the model changes: `values` may run the model's own code, on meta
    owners = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    for _module, _key, on_meta in owners:
        if id(on_meta) not in real:
            real[id(on_meta)] = (make or whole)(names[id(on_meta)], on_meta)
    fill_buffers(model, device, values)
    for module, key, on_meta in owners:
        module._parameters[key] = real[id(on_meta)]
