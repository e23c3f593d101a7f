"""Initial values of a parametrized model: the base model's, scaled (law 2 holds here too)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from foundation.errors import ConfigError
from pipeline.engines.parametrization.scales import Parametrization, base_name
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.recorded_init import Fill


class ScaledInit(InitByName):
    """Initializes parameters by name like those of the base model, times each parameter's `Scale.init`.

    If an architecture's own initialization depends on width or depth (GPT-2's residual projections), the base model's
    sizes are used. A model with the base model's sizes gets the values of `InitByName`.

    Args:
        model: the model, on meta, built by `build_meta`.
        parametrization: the model's parametrization.
        seed: the run's seed.
    """

    def __init__(self, model: nn.Module, parametrization: Parametrization, *, seed: int) -> None:
        super().__init__(model, seed=seed)
        self._parametrization, self._base = parametrization, InitByName(parametrization.base, seed=seed)

    def fills(self, name: str) -> tuple[Fill, ...]:
        """Implements `InitByName.fills`.

        Raises:
            ConfigError: the architecture's code does not compute the values as numbers of one scale.
        """
        fills = self._base.fills(base_name(name))
        if fills is None:
            why = f"transformers initializes {name} by code of its own, which cannot be scaled"
            raise ConfigError("model.parametrization", "completep", why=why, remedy="use the standard parametrization")
        factor = self._parametrization.scales[name].init
        return tuple(replace(fill, a=fill.a * factor, b=fill.b * factor) for fill in fills)
