"""Writes a model's tensors to safetensors files of bounded size, under the names that `save_pretrained` gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.folder.weight_files import INDEX, SINGLE, stored_tensors

SHARD_BYTES = 4 << 30
"""Largest safetensors file in bytes, for file systems and tools that are limited to 4 GiB."""

METADATA = {"format": "pt"}


def write_weights(
    model: nn.Module,
    weights: CheckpointWeights,
    buffers: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    extra: Iterable[tuple[str, Tensor]] = (),
    placed: Callable[[str, Tensor], tuple[str, Tensor]] = lambda name, tensor: (name, tensor),
) -> None:
    """Writes the weights in `dtype`, and the persistent buffers in their own dtypes.

    Needs memory for one file, and for the tensors that are converted together (the experts of one layer).

    Args:
        model: model on any device; its architecture determines the names in the files.
        weights: values of the parameters, read one at a time.
        buffers: name -> value.
        folder: folder for the files and, if there are several, their index.
        dtype: dtype of the written weights.
        progress: function called with (weights written, total weights).
        extra: (name in the files, tensor) of tensors that are no part of the model, written behind its weights.
        placed: function from a name in the model's own folder, and the tensor, to what is written.
    """
    written = _Files(folder)
    own = (placed(*each) for each in _stored(model, weights, buffers, dtype, progress))
    for name, tensor in chain(own, extra):
        written.add(name, tensor)
    written.close()


def append_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Adds tensors, at least one, to the safetensors files of a folder in new files, and writes the index anew."""
    written = _Files.of(folder)
    for name, tensor in tensors:
        written.add(name, tensor)
    written.close()


def _stored(
    model: nn.Module,
    weights: CheckpointWeights,
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the files, tensor), in the order of the model."""
    place = {name: number for number, name in enumerate([*weights.shapes, *buffers])}
    groups = groups_of_model(model, place)
    done = 0
    for group in sorted(groups, key=lambda each: min(place[name] for name in each.names)):
        tensors = {name: buffers[name] if name in buffers else weights.value(name).to(dtype) for name in group.names}
        done += sum(name not in buffers for name in tensors)
        yield from group.convert(tensors, model).items()
        progress(done, len(weights.shapes))


class _Files:
    """Writer of safetensors files of at most `SHARD_BYTES`, unless one tensor is larger, and of their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._names: list[list[str]] = []

    @classmethod
    def of(cls, folder: Path) -> _Files:
        """Opens a folder with files of its own, to add more to it."""
        found, names = cls(folder), dict[Path, list[str]]()
        for name, info in stored_tensors(folder).items():
            names.setdefault(info.file, []).append(name)
            found._total_bytes += info.bytes
        for file in sorted(names):
            found._names.append(names[file])
            file.rename(found._part(len(found._names)))
        (folder / INDEX).unlink(missing_ok=True)
        return found

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes the last file, and renames the files once their number is known."""
        self._flush()
        if len(self._names) == 1:
            self._part(1).rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names, start=1):
            file = f"model-{number:05d}-of-{len(self._names):05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))

    def _flush(self) -> None:
        self._names.append(list(self._pending))
        save_file(self._pending, self._part(len(self._names)), metadata=METADATA)
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}.safetensors"
