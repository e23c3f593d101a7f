"""Tensors of the starting model that a training did not use: an export takes them over from the model's folder.

They are layers that predict more tokens, and the other parts of a multimodal model, which is then exported as a whole.
They are not copied into the run: the extra layer of DeepSeek-V3 has 23 GB. An export reads them from `model.path`, if
the folder still has the fingerprint that the checkpoint recorded.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from foundation.directory import Manifest, write_json
from foundation.errors import DataError
from foundation.foreign_json import read_json
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.models.construction.extra_tensors import whole
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.folder.extra_weights import COUNTS, renumbered
from pipeline.models.folder.model_folder import CONFIG, ModelFolder
from pipeline.models.folder.multi_token_names import module_names
from pipeline.models.folder.text_part import TEXT_ALONE
from pipeline.models.layers import original_name
from pipeline.models.multi_token import modules_of

DROP = "drop"
Placed = Callable[[str, Tensor], tuple[str, Tensor]]
"""Function from a tensor's name in a decoder's own folder, and the tensor, to what is written."""
_PLACEHOLDER = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa)\w*token_(id|index)$")
_BESIDE = ("*processor*.json", "chat_template.json")
"""Files of the programs that prepare images and sounds for a model."""


@dataclass(frozen=True)
class KeptExtras:
    """The tensors that an export takes over unchanged; an iterable of (name in the export, tensor).

    Attributes:
        names: Names of the tensors in the export; empty if there are none.
        values: Reader of the starting model's folder; None if there are none.
        moved: Difference of a layer's number in the export to its number in the folder (model.keep_layers).
        dtype: Dtype of weights that the folder has in fp8.
    """

    names: list[str]
    values: FromSafetensors | None = None
    moved: int = 0
    dtype: torch.dtype = torch.float32

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self.values is not None:
            for name, value in self.values.extras(dtype=self.dtype):
                yield renumbered(name, by=self.moved), value

    @property
    def multimodal(self) -> Path | None:
        """The starting model's folder, if its other parts are kept; else None."""
        return self.values.folder if self.values is not None and self.values.part is not None else None

    def placed(self, name: str, value: Tensor) -> tuple[str, Tensor]:
        """Returns a trained tensor with its name in the exported folder; Mllama's embedding with the rows for images.

        Args:
            name: name of the tensor in a folder of the decoder alone.
            value: the trained tensor.
        """
        part = None if self.values is None else self.values.part
        if part is None:
            return name, value
        in_files = part.name_in_files(name)
        stored = part.files.get(in_files)
        if stored is None or stored.shape == tuple(value.shape):
            return in_files, value
        return in_files, torch.cat((value, whole(stored)[len(value) :].to(value.dtype)))

    def copy_beside(self, staging: Path, *, dtype: torch.dtype) -> None:
        """Writes the config of the multimodal model, and copies the files of its processors."""
        assert self.multimodal is not None
        fields = read_json(self.multimodal / CONFIG)
        for section in (fields, *(each for each in fields.values() if isinstance(each, dict))):
            for key in ("torch_dtype", "dtype"):
                section.pop(key, None)
        fields.pop("quantization_config", None)
        write_json(staging / CONFIG, fields | {"dtype": str(dtype).removeprefix("torch.")})
        for file in (each for pattern in _BESIDE for each in self.multimodal.glob(pattern)):
            shutil.copyfile(file, staging / file.name)


def kept_extras(manifest: Manifest, model: nn.Module, *, dtype: torch.dtype, given: str | None) -> KeptExtras:
    """Finds the tensors to take over.

    Args:
        manifest: manifest of the checkpoint.
        model: the trained model, on any device.
        dtype: dtype of weights that the folder has in fp8.
        given: folder of the starting model, if it has moved, or "drop"; None for its place at the training.

    Raises:
        DataError: the folder is gone or has changed.
    """
    recorded, section = manifest.details.get("extra_weights"), manifest.config.get("model") or {}
    if recorded is None or DROP in (section.get("extra_weights"), given):
        return KeptExtras([])
    folder = _unchanged(given or str(manifest.parents["model.path"]["path"]), manifest, recorded)
    layers = section.get("keep_layers")
    values = FromSafetensors(folder.path, model=model, rename=original_name(layers), partial=layers is not None)
    moved = 0 if layers is None else len(layers) - int(folder.config.get("num_hidden_layers") or len(layers))
    return KeptExtras([renumbered(name, by=moved) for name in values.left_out], values, moved, dtype)


def _unchanged(path: str, manifest: Manifest, recorded: dict[str, Any]) -> ModelFolder:
    what = f"{recorded['tensors']} tensors that were not trained ({', '.join(recorded['first'])}) belong to the export"
    remedy = "try: --extra-weights FOLDER, where the folder is now, or --extra-weights drop for an export without them"
    try:
        folder = ModelFolder.open(path)
    except DataError as error:
        raise DataError(f"{what}: {str(error).splitlines()[0]}\n  {remedy}") from None
    if folder.fingerprint() != manifest.parents["model.path"]["fingerprint"]:
        raise DataError(f"{what}, and {path} is no longer the folder that the run started from\n  {remedy}")
    return folder


def write_counts(config: PretrainedConfig, folder: Path, *, kept: bool, trained: int = 0) -> None:
    """Writes into config.json how many layers predict more tokens; 0 if the folder has none of their tensors.

    transformers leaves the number out where it is the architecture's default; other programs have no defaults.

    Args:
        config: the model's config.
        folder: the exported folder.
        kept: whether the folder has layers of the starting model, unchanged.
        trained: number of layers that were trained.
    """
    own = {config.attribute_map.get(key, key) for key in COUNTS if getattr(config, key, None)}
    own |= {module_names(config.model_type).count} if trained and not own else set()
    if own:
        counts = {key: max(trained, getattr(config, key, 0) if kept else 0) for key in sorted(own)}
        write_json(folder / CONFIG, read_json(folder / CONFIG) | counts)


class ExportedModules:
    """The names of trained modules for multi-token prediction in an export, and what it repeats beside them.

    Args:
        model: the trained model, on any device.
        weights: its weights.
        dtype: dtype of the written weights.
    """

    def __init__(self, model: Any, weights: CheckpointWeights, *, dtype: torch.dtype) -> None:
        self._model, self._weights, self._dtype = model, weights, dtype
        self._names, self._layers = module_names(model.config.model_type), model.config.num_hidden_layers
        self.count = len(modules_of(model))

    def placed(self, name: str, value: Tensor, *, other: Placed) -> tuple[str, Tensor]:
        """Returns a tensor with its name in the folder; `other` does so for those of no module."""
        found = self._names.in_files(name, layers=self._layers) if self.count else name
        return other(name, value) if found == name else (found, value)

    def copies(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the copies of embedding and head that the family's files have with every module."""
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for k in range(self.count if self._names.copies else 0):
            prefix = self._names.parts["layer"].format(n=self._layers + k, k=k)
            for copy, module in zip(self._names.copies, ends, strict=True):
                yield f"{prefix}.{copy}", self._weights.value(names[id(module.weight)]).to(self._dtype)


def class_of(folder: Path) -> Any:
    """Returns transformers' class that loads a folder: the one that config.json names, for a multimodal model."""
    fields = read_json(folder / CONFIG)
    named = (fields.get("architectures") or [""])[0]
    return (
        getattr(transformers, named, AutoModelForCausalLM)
        if fields["model_type"] in TEXT_ALONE
        else AutoModelForCausalLM
    )


def placeholders(folder: Path) -> set[int]:
    """Returns the ids that stand for images and sounds, which a multimodal model does not look up in its embedding."""
    fields = read_json(folder / CONFIG)
    sections = [fields, *(each for each in fields.values() if isinstance(each, dict))]
    found = (value for each in sections for key, value in each.items() if _PLACEHOLDER.search(key))
    return {value for value in found if isinstance(value, int)}
