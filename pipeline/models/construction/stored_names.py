"""Converts tensors of a Hugging Face folder to a model's, and back.

transformers renames and fuses tensors while it loads a folder: in the files of Mixtral, Qwen3-MoE and DeepSeek-V3 every
expert has its own tensors, while the model has one parameter [experts, ...] per layer. This module uses transformers'
table (conversion_mapping.py) to read and write folders tensor by tensor, under the names that `save_pretrained` writes
and other programs expect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

Transforms = tuple[list[WeightRenaming], list[WeightConverter]]


@dataclass
class TensorGroup:
    """Tensors that are converted together.

    Attributes:
        key: name of the result, or of the first result of several.
        sources: (pattern of the converter, name) of every tensor that is converted, in the order of the converter.
        converter: transformers' converter; None if a tensor is only renamed.
        renamings: rules that rename the results.
    """

    key: str
    sources: list[tuple[str, str]]
    converter: WeightConverter | None = None
    renamings: tuple[WeightRenaming, ...] = ()

    @property
    def names(self) -> list[str]:
        """The tensors that are converted."""
        return [name for _, name in self.sources]

    def convert(self, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Converts tensors; returns the results by name. For tensors on the meta device, only shapes are computed.

        Args:
            tensors: name -> tensor, for all of `names`.
            model: the Hugging Face model, whose config some conversions read.

        Raises:
            RuntimeError, ValueError: the shapes do not fit together.
        """
        if self.converter is None:
            return {self.key: tensors[self.names[0]]}
        converter: Any = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.key, name, pattern, tensors[name])
        made = converter.convert(self.key, model=model, config=model.config)
        results = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {apply_renamings(name, list(self.renamings)): value for name, value in results.items()}


def groups_of_files(model: nn.Module, found: Iterable[str], known: Collection[str]) -> list[TensorGroup]:
    """Returns the conversions from tensors in files to a model's tensors.

    Args:
        model: the Hugging Face model, on any device.
        found: names of the tensors in the files.
        known: names of the model's parameters and persistent buffers.
    """
    transforms = _split(get_model_conversion_mapping(model))
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    state = dict.fromkeys(known, True)
    groups: dict[str, TensorGroup] = {}
    for name in sorted(found, key=dot_natural_key):
        target, pattern = rename_source_key(name, *transforms, prefix, state)
        if target not in state and name in state:  # the table renames it although it has the model's own name
            target, pattern = name, None
        _add(groups, target, pattern, name, transforms[1])
    return list(groups.values())


def groups_of_model(model: nn.Module, names: Iterable[str]) -> list[TensorGroup]:
    """Returns the conversions from a model's tensors to the tensors that `save_pretrained` writes.

    Args:
        model: the Hugging Face model, on any device.
        names: names of the model's parameters and persistent buffers.
    """
    loading = [each for each in get_model_conversion_mapping(model, add_legacy=False) if not _adds_prefix(each)]
    renamings, converters = _split([each.reverse_transform() for each in reversed(loading)])
    groups: dict[str, TensorGroup] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
        _add(groups, target, pattern, name, converters, tuple(renamings))
    return list(groups.values())


def _add(
    groups: dict[str, TensorGroup],
    target: str,
    pattern: str | None,
    name: str,
    converters: list[WeightConverter],
    renamings: tuple[WeightRenaming, ...] = (),
) -> None:
    if pattern is None:
        # two tensors with one name, e.g. a fused tensor beside its parts: the later one does not belong to the model
        key = target if target not in groups else name
        groups.setdefault(key, TensorGroup(key, [(name, name)]))
        return
    converter = next(each for each in converters if pattern in each.source_patterns)
    group = groups.setdefault(target, TensorGroup(target, [], converter, renamings))
    group.sources.append((pattern, name))


def _split(transforms: Iterable[Any]) -> Transforms:
    every = list(transforms)
    renamings = [each for each in every if isinstance(each, WeightRenaming)]
    return renamings, [each for each in every if isinstance(each, WeightConverter)]


def _adds_prefix(transform: Any) -> bool:
    """Whether a transform adds or removes a prefix; a model not loaded from files has no prefix to restore."""
    return isinstance(transform, PrefixChange)
