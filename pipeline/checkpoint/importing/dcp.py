"""Distributed checkpoints of torch (`dcp.save`): with Hugging Face names, and torchtitan's of Llama.

A key is a path through nested dicts, which `.metadata` keeps beside the flat key. Taken are

    model/NAME, NAME                                 weights
    optimizer/state/NAME/exp_avg, optimizer/state.NAME.exp_avg    states of get_optimizer_state_dict, nested or flat
    optimizer/param_groups/0/lr, optimizer/param_groups.NAME.lr   hyperparameters
    step, train_state/step                           the step

`.metadata` is a pickle: only the classes of torch that it consists of are made.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.format.metadata import TORCH_METADATA, storage_errors
from pipeline.checkpoint.format.shard_table import StoredTensor
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.format.torch_metadata import from_torch_metadata
from pipeline.checkpoint.importing import torchtitan
from pipeline.checkpoint.importing.source import (
    SourceCheckpoint,
    TargetModel,
    hugging_face_name,
    one_step_counter,
)
from pipeline.checkpoint.importing.unpickle import Opaque, enum_member
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.checkpoint.write.streamed import LazyTensor

_STATE = re.compile(r"(?:^|\.)state\.(?P<name>.+)\.(?P<kind>exp_avg|exp_avg_sq|momentum_buffer|step)$")
_GROUP = re.compile(r"(?:^|\.)param_groups\.(?P<group>.+)\.(?P<key>lr|betas|eps|weight_decay|momentum|nesterov)$")
_AROUND_WEIGHTS = ("app", "state", "state_dict", "model", "module")
_STEPS = ("step", "global_step", "iteration")
_CLASSES = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}
"""What `.metadata` may name."""
_NOT_NEEDED = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch")
"""Modules of the plans that Megatron keeps in `.metadata`: nothing of them is made."""


@dataclass
class _Collected:
    """What the folders hold, as it is collected."""

    weights: dict[str, LazyTensor] = field(default_factory=dict)
    states: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    counters: list[Any] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)


def read_dcp(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of `dcp.save`.

    Args:
        folder: with `.metadata`; or that of several, `step-N`, of which the newest is taken.
        wanted: gives the number of heads that torchtitan's order of rows depends on.

    Raises:
        CheckpointError: files are missing or damaged, or it has no optimizer state or step.
    """
    if not (folder / TORCH_METADATA).is_file():
        steps = [path.parent for path in folder.glob(f"step-*/{TORCH_METADATA}")]
        folder = max(steps, key=lambda path: int(path.name.rpartition("-")[2]))
    source = read_folders([folder])
    return torchtitan.in_hugging_face_names(source, wanted) if torchtitan.is_of(source) else source


def read_folders(folders: Sequence[Path], *, step: int | None = None) -> SourceCheckpoint:
    """Opens what lies in one or several folders of `dcp.save`, such as one of the model and one of its optimizer.

    Args:
        folders: each with `.metadata`.
        step: where it is recorded elsewhere.

    Raises:
        CheckpointError: as `read_dcp`.
    """
    found = _Collected()
    for folder in folders:
        for path, value in _entries(folder):
            _sort_in(found, path, value)
    where = folders[0]
    if not found.states:
        raise CheckpointError(
            f"{where} has no optimizer states by name ({', '.join(list(found.left_out)[:4]) or 'weights alone'})\n"
            "  try: save get_optimizer_state_dict of torch.distributed.checkpoint.state_dict beside the model; for the"
            " weights alone dcp_to_torch of torch.distributed.checkpoint.format_utils"
        )
    counter = one_step_counter(found.counters, where)
    steps = [step] if step is not None else found.steps or ([] if counter is None else [int(counter)])
    if not steps:
        raise CheckpointError(f"{where} records no step\n  try: save it with a key step: the optimizer steps done")
    return SourceCheckpoint(
        path=where,
        kind="torch (DCP)",
        step=max(steps),
        weights=found.weights,
        states=found.states,
        optimizer_step=counter,
        groups=list(found.groups.values()),
        left_out=list(found.left_out),
    )


def _sort_in(found: _Collected, path: tuple[str, ...], value: Any) -> None:
    """Puts an entry where it belongs: a `LazyTensor` or a plain value."""
    dotted, tensor = ".".join(path), isinstance(value, LazyTensor) and bool(value.shape)
    plain = value.read().item() if isinstance(value, LazyTensor) and not value.shape else value
    if match := _STATE.search(dotted):
        if match["kind"] == "step":
            found.counters.append(plain)
        else:
            found.states.setdefault(match["kind"], {})[hugging_face_name(match["name"])] = value
    elif match := _GROUP.search(dotted):
        found.groups.setdefault(match["group"], {})[match["key"]] = plain
    elif path[-1] in _STEPS and not tensor:
        found.steps.append(int(plain))
    elif tensor and not dotted.startswith(("optim", "lr_scheduler", "dataloader", "train_state")):
        while len(path) > 1 and path[0] in _AROUND_WEIGHTS:
            path = path[1:]
        found.weights[hugging_face_name(".".join(path))] = value
    elif "param_groups" not in dotted:
        found.left_out[path[0]] = None


@dataclass(frozen=True)
class DcpFolder:
    """A folder of `dcp.save`, opened.

    Attributes:
        folder: with `.metadata`.
        tensors: key -> what is stored.
        places: key of a value that is no tensor -> where it lies.
        metadata: torch's.
        reader: of the tensors.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    places: Mapping[str, Any]
    metadata: Any
    reader: ShardReader

    @classmethod
    def open(cls, folder: Path) -> DcpFolder:
        """Opens a folder.

        Raises:
            CheckpointError: files are missing or damaged.
        """
        metadata = _metadata(folder)
        try:
            table = from_torch_metadata(metadata)
            found = {index.fqn: info for index, info in metadata.storage_data.items()}
            plain = [key for key in metadata.state_dict_metadata if key not in table.table.index and key in found]
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise _damaged(folder / TORCH_METADATA, repr(error)) from None
        files = {*table.files, *(found[key].relative_path for key in plain)}
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing[:4])}{more}\n"
                f"  try: copy the files of all ranks here, from the disks of all nodes"
            )
        sizes = {name: (folder / name).stat().st_size for name in table.files}
        for key, why in storage_errors(table, sizes, aliases=True):
            raise _damaged(folder, f"{key}: {why}")
        tensors = {each.key: each for each in table.tensors}
        reader = ShardReader(folder, table, foreign=True)
        return cls(folder, tensors, {key: found[key] for key in plain}, metadata, reader)

    def tensor(self, key: str) -> LazyTensor:
        """A whole tensor."""
        stored = self.tensors[key]
        return LazyTensor(tuple(stored.shape), stored.dtype, partial(self._read, key, 0, tuple(stored.shape)))

    def row(self, key: str, index: int) -> LazyTensor:
        """One entry along the first dim of a tensor, without that dim."""
        stored = self.tensors[key]
        shape = tuple(stored.shape[1:])
        start = index * torch.Size(shape).numel()
        return LazyTensor(shape, stored.dtype, partial(self._read, key, start, shape))

    def _read(self, key: str, start: int, shape: tuple[int, ...]) -> Tensor:
        stored = self.tensors[key]
        values = torch.empty(torch.Size(shape).numel(), dtype=stored.dtype)
        self.reader.read({key: NamedShard(tuple(stored.shape), start=start, values=values)})
        return values.view(shape)

    def bytes_of(self, key: str) -> io.BytesIO:
        """The file of torch.save that a value which is no tensor was written as."""
        place = self.places[key]
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))


def _entries(folder: Path) -> Iterator[tuple[tuple[str, ...], LazyTensor | Any]]:
    """Path and value of everything in a folder: tensors, which are read later, and plain values."""
    opened = DcpFolder.open(folder)
    paths: Mapping[str, Any] = opened.metadata.planner_data or {}
    for key in opened.tensors:
        yield _path(paths, key), opened.tensor(key)
    for key in opened.places:
        yield _path(paths, key), _plain(opened.bytes_of(key))


def _path(paths: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(map(str, paths.get(key, (key,))))


def _plain(file: io.BytesIO) -> Any:
    """A value that is no tensor; None where it is not made of plain ones."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return None


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what torch's metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of a name.

        Raises:
            UnpicklingError: it is none of those.
        """
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if module in _NOT_NEEDED:
            return Opaque
        known = name in _CLASSES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which opening it would execute: refused")
        return super().find_class(module, name)


def _metadata(folder: Path) -> Any:
    path = folder / TORCH_METADATA
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing\n  try: copy it here: without it nothing can be found") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise _damaged(path, str(error) or repr(error)) from None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}\n  try: copy it again, or the checkpoint of another step")
