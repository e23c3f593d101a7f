"""Parameter values: seeded by the parameter's name (law 2) here, read from files in `stored_values`.

Both are functions from a name to the full tensor, called for one parameter at a time, so that a rank never holds more
than its shards and one full parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.base.errors import ConfigError
from pipeline.data.permutation import derive_key
from pipeline.models.own_init import Constructors, init_weights


class ParameterValues(Protocol):
    """The initial values of a model's parameters and persistent buffers."""

    def value(self, name: str) -> Tensor:
        """The full value of one parameter: its full shape, fp32, on the CPU."""
        ...

    def buffer(self, name: str) -> Tensor | None:
        """The value of a persistent buffer, on the CPU; None for the one that the model's own code computes."""
        ...


class OwnBuffers:
    """A base class of values that leave persistent buffers to the model's own code."""

    def buffer(self, name: str) -> Tensor | None:  # noqa: ARG002  the name of the protocol
        """None: see `ParameterValues.buffer`."""
        return None


class InitByName(OwnBuffers):
    """Law 2: Hugging Face's own initialization, one parameter at a time, seeded by the parameter's name.

    Architectures initialize a parameter in the code of the module that owns it and sometimes again in a parent module
    (GPT-2 rescales its residual projections). So one parameter is materialized on the CPU, the generator is seeded from
    (seed, name, shape), and the model's `_init_weights` is called on the owner and then on each of its ancestors, with
    all other parameters still on meta, where initialization does nothing. A parameter that `_init_weights` does not set
    has the value of its module's constructor, called with the same seed. The values depend neither on the layout, nor
    the device, nor on which other parameters exist.
    """

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self._model, self._seed, self._constructors = model, seed, Constructors(model)

    @torch.no_grad()
    def value(self, name: str) -> Tensor:
        """The parameter's value, fp32 on the CPU."""
        owner_name, _, key = name.rpartition(".")
        owner = self._model.get_submodule(owner_name)
        try:
            try:
                real = self._initialized(owner, owner_name, key, also=())
            except NotImplementedError:  # it reads another parameter of the module, which is on meta (RWKV)
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
        """A parameter after `_init_weights`, with those of the same module named in `also` off the meta device, too.

        Before, it is NaN, or with `constructed` what the module's constructor sets.
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
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for each in _owner_and_ancestors(owner_name):
                    init_weights(self._model, each)
        finally:
            owner._parameters.update(on_meta)
        return real[key]

    def _refusal(self, what: str) -> ConfigError:
        kind: Any = self._model.config.model_type  # type: ignore[union-attr]
        why = f"transformers' initialization of this architecture {what}"
        remedy = "use another architecture, or load weights with model.path"
        return ConfigError("model.config.model_type", kind, why=why, remedy=remedy)

    def check(self, *, largest: int = 1 << 20) -> None:
        """Draws one parameter of every kind (names without layer numbers), none with more than `largest` elements.

        So that an architecture that cannot be initialized is refused before a process group exists.

        Raises:
            ConfigError: as `value`.
        """
        kinds: dict[str, str] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.numel() <= largest:
                kinds.setdefault(re.sub(r"\d+", "*", name), name)
        for name in kinds.values():
            self.value(name)


def _owner_and_ancestors(owner_name: str) -> list[str]:
    parts = owner_name.split(".") if owner_name else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


class ReportsProgress:
    """Wraps values to report progress: computing or reading those of a large model takes minutes.

    Args:
        values: the wrapped values.
        report: called for each parameter.
    """

    def __init__(self, values: ParameterValues, report: Callable[[], None]) -> None:
        self._values, self._report = values, report

    def value(self, name: str) -> Tensor:
        """See `ParameterValues.value`."""
        self._report()
        return self._values.value(name)

    def buffer(self, name: str) -> Tensor | None:
        """See `ParameterValues.buffer`."""
        return self._values.buffer(name)


class Zeros(OwnBuffers):
    """Zeros, for parameters that a checkpoint is about to overwrite: nothing is drawn or read.

    Args:
        shapes: the full shape of every parameter.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes

    def value(self, name: str) -> Tensor:
        """Zeros of the parameter's full shape, fp32 on the CPU."""
        return torch.zeros(self._shapes[name], dtype=torch.float32)
