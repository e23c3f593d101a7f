"""Parameter initialization: seeded by the parameter's name (law 2), or loaded from safetensors files.

Both are functions from a name to the full tensor, called for one parameter at a time, so that a rank never holds more
than its shards and one full parameter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headrace.base.errors import ConfigError, DataError
from pipeline.data.permutation import derive_key


class ParameterValues(Protocol):
    """The initial values of a model's parameters."""

    def value(self, name: str) -> Tensor:
        """The full value of one parameter: its full shape, fp32, on the CPU."""
        ...


class InitByName:
    """Law 2: Hugging Face's own initialisation, one parameter at a time, seeded by the parameter's name.

    Architectures initialise a parameter in the code of the module that owns it and sometimes again in a parent module
    (GPT-2 rescales its residual projections). So one parameter is materialised on the CPU, the generator is seeded from
    (seed, name, shape), and the model's `_init_weights` is called on the owner and then on each of its ancestors, with
    all other parameters still on meta, where initialisation does nothing. The values depend neither on the layout, nor
    the device, nor on which other parameters exist.
    """

    def __init__(self, model: nn.Module, *, seed: int) -> None:
        self._model, self._seed = model, seed

    @torch.no_grad()
    def value(self, name: str) -> Tensor:
        """The parameter's value, fp32 on the CPU."""
        owner_name, _, key = name.rpartition(".")
        owner = self._model.get_submodule(owner_name)
        on_meta = owner._parameters[key]
        assert on_meta is not None
        real = nn.Parameter(torch.full(on_meta.shape, math.nan, dtype=torch.float32), requires_grad=False)
        owner._parameters[key] = real
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_key(self._seed, "init", name, tuple(on_meta.shape)) >> 1)
                for module in _owner_and_ancestors(self._model, owner_name):
                    self._model._init_weights(module)  # type: ignore[operator]
        finally:
            owner._parameters[key] = on_meta
        if real.isnan().any():
            why = f"transformers' initialisation of this architecture does not set {name}"
            remedy = "use another architecture, or load weights with model.path"
            raise ConfigError("model.config.model_type", self._model.config.model_type, why=why, remedy=remedy)  # type: ignore[union-attr]
        return real.detach()


class FromSafetensors:
    """Values read from the safetensors files of a Hugging Face folder, one tensor at a time.

    Args:
        folder: contains model.safetensors, or model.safetensors.index.json and its shards.
        shapes: the parameters of the model; the files must contain all with these shapes, and no others.
        rename: from a name in the model to the name in the files.
        partial: allow other tensors in the files (a model that keeps only some layers).

    Raises:
        DataError: missing or unexpected tensors, wrong shapes, or truncated files.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        shapes: Mapping[str, torch.Size],
        rename: Callable[[str], str] = lambda name: name,
        partial: bool = False,
    ) -> None:
        self._folder, self._rename = Path(folder), rename
        self._file_of = _tensor_files(self._folder)
        found = set(self._file_of)
        missing = sorted(n for n in shapes if rename(n) not in found)
        extra = [] if partial else sorted(found - {rename(n) for n in shapes} - _ignorable(found, shapes))
        if missing or extra:
            raise DataError(
                f"{folder}: the files do not contain the model that config.json describes\n"
                f"  missing ({len(missing)}): {', '.join(missing[:5]) or '-'}\n"
                f"  unexpected ({len(extra)}): {', '.join(extra[:5]) or '-'}\n"
                f"  try: load it with transformers and save it again with save_pretrained, so that the names match"
            )
        for name, shape in shapes.items():
            self._check_shape(name, shape)

    def value(self, name: str) -> Tensor:
        """The parameter's value, fp32 on the CPU."""
        stored = self._rename(name)
        with safe_open(self._folder / self._file_of[stored], framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor.to(torch.float32)

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        stored = self._rename(name)
        with safe_open(self._folder / self._file_of[stored], framework="pt") as file:
            found = tuple(file.get_slice(stored).get_shape())
        if found != tuple(shape):
            raise DataError(f"{self._folder}: {stored} has shape {found}, but config.json makes it {tuple(shape)}")


def _owner_and_ancestors(model: nn.Module, owner_name: str) -> list[nn.Module]:
    parts = owner_name.split(".") if owner_name else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]


def _tensor_files(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            for name in sorted(set(weight_map.values())):
                _tensor_names(folder / name)
            return weight_map
        return dict.fromkeys(_tensor_names(folder / "model.safetensors"), "model.safetensors")
    except (FileNotFoundError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise DataError(
            f"{folder}: no complete safetensors weights ({error})\n  try: export it again, or use another folder"
        ) from None


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _ignorable(found: set[str], shapes: Mapping[str, torch.Size]) -> set[str]:
    """Tensors of old files that are not parameters: rotary tables, and a head that the model ties to its embedding."""
    rotary = {n for n in found if re.search(r"rotary_emb\.inv_freq$", n)}
    tied = {"lm_head.weight"} if "lm_head.weight" not in shapes else set()
    return rotary | tied


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


class Zeros:
    """Zeros, for parameters that a checkpoint is about to overwrite: nothing is drawn or read.

    Args:
        shapes: the full shape of every parameter.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes

    def value(self, name: str) -> Tensor:
        """Zeros of the parameter's full shape, fp32 on the CPU."""
        return torch.zeros(self._shapes[name], dtype=torch.float32)
