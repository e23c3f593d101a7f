"""Parameter values: computed from the parameter's name (law 2) here, read from files in `stored_values`.

Both are functions from a name and a box to the values of that box. A rank requests its shard of one parameter at a
time. It computes or reads nothing else, and never has more in memory than its shards and one full parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from pipeline.data.permutation import derive_key
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.own_init import Constructors, init_weights, seeded
from pipeline.models.construction.recorded_init import Fill, filled, recorded_fills
from pipeline.models.construction.rectangle import Rectangle, part


class ParameterValues(Protocol):
    """The initial values of a model's parameters and persistent buffers."""

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Returns values of one parameter, in newly allocated memory.

        Args:
            name: Hugging Face name.
            box: part of the full parameter to return; None for the whole parameter.
            device: device of the result.

        Returns:
            fp32 with the sizes of the box: the same numbers as in the full value.
        """
        ...

    def buffer(self, name: str) -> Tensor | None:
        """Returns the value of a persistent buffer, on the CPU; None if the model's own code computes it."""
        ...


class OwnBuffers:
    """Base class of values for models whose own code computes persistent buffers."""

    def buffer(self, name: str) -> Tensor | None:  # noqa: ARG002  the name of the protocol
        """Returns None; see `ParameterValues.buffer`."""
        return None


class InitByName(OwnBuffers):
    """Law 2: Hugging Face's own initialization, one parameter at a time, as a function of (seed, name, element).

    Architectures initialize a parameter in the code of the module that owns it and sometimes again in a parent module
    (GPT-2 rescales its residual projections). The model's `_init_weights` is called on the owner and then on each of
    its ancestors, and its operations on the parameter are recorded on meta, once. If they set a constant, or normal or
    uniform numbers, any box is computed from the counters of its elements, on the requested device.

    Other parameters are set by formulas or their module's constructor (the time constants of Mamba and RWKV, truncated
    normal numbers, GPT-1's projections). For these, the code runs on the full parameter on the CPU, with torch's
    generator seeded from (seed, name, shape), and the box is a part of the result. Meanwhile all other parameters are
    on meta, where initialization does nothing.

    The values do not depend on the layout, the device or the other parameters.

    Args:
        model: model on meta, built by `build_meta`.
        seed: seed of the run.
    """

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self._model, self._seed, self._constructors = model, seed, Constructors(model)
        self._recorded: dict[str, tuple[Fill, ...] | None] = {}

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Returns the values of a parameter; see `ParameterValues.value`."""
        fills = self.fills(name)
        if fills is None:
            return part(self._own_value(name), box).to(device)
        shape = tuple(self._model.get_parameter(name).shape)
        return filled(fills, shape, key=derive_key(self._seed, "init", name), box=box, device=device)

    def fills(self, name: str) -> tuple[Fill, ...] | None:
        """Returns the operations that initialize a parameter; None if the architecture's own code has to run."""
        if name not in self._recorded:
            owner_name, _, key = name.rpartition(".")
            owner = self._model.get_submodule(owner_name)
            on_meta = owner._parameters[key]
            assert on_meta is not None
            blank = nn.Parameter(torch.empty(on_meta.shape, device="meta"), requires_grad=False)
            owner._parameters[key] = blank
            try:
                fills = recorded_fills(blank, partial(self._initialize, owner_name))
                self._recorded[name] = fills if owner._parameters[key] is blank else None
            finally:
                owner._parameters[key] = on_meta
        return self._recorded[name]

    def _initialize(self, owner_name: str) -> None:
        for each in _owner_and_ancestors(owner_name):
            init_weights(self._model, each)

    @torch.no_grad()
    def _own_value(self, name: str) -> Tensor:
        """Returns the full value that the architecture's own code computes, fp32 on the CPU."""
        owner_name, _, key = name.rpartition(".")
        owner = self._model.get_submodule(owner_name)
        try:
            try:
                real = self._initialized(owner, owner_name, key, also=())
            except NotImplementedError:  # the code reads another parameter of the module, which is on meta (RWKV)
                real = self._initialized(owner, owner_name, key, also=tuple(owner._parameters))
            if real.isnan().any():
                real = self._initialized(owner, owner_name, key, also=(), constructed=True)
        except (NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
            raise self._refusal(f"fails for {name}: {' '.join(str(error).split())[:200]}") from None
        if real.isnan().any():
            raise self._refusal(f"does not set {name}")
        return real.detach()

    def _initialized(
        self, owner: nn.Module, owner_name: str, key: str, *, also: tuple[str, ...], constructed: bool = False
    ) -> nn.Parameter:
        """Returns a parameter after `_init_weights`, with its module's parameters in `also` off the meta device, too.

        Before that, the parameter is NaN or, with `constructed`, the value that the module's constructor sets.
        """
        on_meta = {each: p for each, p in owner._parameters.items() if p is not None and each in (key, *also)}
        real = {each: nn.Parameter(torch.full(p.shape, math.nan), requires_grad=False) for each, p in on_meta.items()}
        name, shape = f"{owner_name}.{key}" if owner_name else key, on_meta[key].shape
        seed = derive_key(self._seed, "init", name, tuple(shape)) >> 1
        if constructed:
            value = self._constructors.value(owner_name, key, seed=seed)
            if value is not None and value.shape == shape:
                real[key].copy_(value)
        owner._parameters.update(real)
        try:
            with seeded(seed):
                self._initialize(owner_name)
        finally:
            owner._parameters.update(on_meta)
        return real[key]

    def _refusal(self, what: str) -> ConfigError:
        kind: Any = self._model.config.model_type  # type: ignore[union-attr]
        why = f"transformers' initialization of this architecture {what}"
        remedy = "use another architecture, or load weights with model.path"
        return ConfigError("model.config.model_type", kind, why=why, remedy=remedy)

    def check(self, *, largest: int = 1 << 20) -> None:
        """Tries to initialize one parameter of every kind (names without layer numbers).

        This refuses an architecture that cannot be initialized before a process group exists. Numbers are drawn only if
        the architecture's own code has to run, and only for parameters of at most `largest` elements.

        Raises:
            ConfigError: the architecture's own code fails for a parameter, or does not set it.
        """
        kinds: dict[str, str] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.numel() <= largest:
                kinds.setdefault(re.sub(r"\d+", "*", name), name)
        for name in kinds.values():
            if self.fills(name) is None:
                self._own_value(name)


def _owner_and_ancestors(owner_name: str) -> list[str]:
    parts = owner_name.split(".") if owner_name else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


class ReportsProgress:
    """Wraps values to report progress: a large model's values take minutes to compute or read.

    Args:
        values: the wrapped values.
        report: function called for each parameter.
    """

    def __init__(self, values: ParameterValues, report: Callable[[], None]) -> None:
        self._values, self._report = values, report

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Returns the values of a parameter; see `ParameterValues.value`."""
        self._report()
        return self._values.value(name, box=box, device=device)

    def buffer(self, name: str) -> Tensor | None:
        """Returns the wrapped values' buffer; see `ParameterValues.buffer`."""
        return self._values.buffer(name)


class Zeros(OwnBuffers):
    """Zeros, without drawing or reading values, for parameters that a checkpoint is about to overwrite.

    Args:
        shapes: the full shape of every parameter.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Returns the values of a parameter; see `ParameterValues.value`."""
        sizes = self._shapes[name] if box is None else box.sizes
        return torch.zeros(sizes, dtype=torch.float32, device=device)
