"""Reads distributed checkpoints of torch (`dcp.save`) with Hugging Face names, or torchtitan's names of Llama.

A key is a path through nested dicts, which `.metadata` stores beside the flat key. These keys are imported:

    model/NAME, NAME                                 weights
    optimizer/state/NAME/exp_avg, optimizer/state.NAME.exp_avg    states of get_optimizer_state_dict, nested or flat
    optimizer/param_groups/0/lr, optimizer/param_groups.NAME.lr   hyperparameters
    step, train_state/step                           the step

each also under `app`, `state` or `state_dict`. If the weights are under `model` or `module`, all other keys are left
out and named. If they are at the top, an unknown key is taken for a weight, and refused if the model has none of that
name. `.metadata` is a pickle: only torch's metadata classes are created.
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

from foundation.errors import CheckpointError
from foundation.foreign_folders import file_beside
from pipeline.checkpoint.format.metadata import TORCH_METADATA, from_torch_metadata, storage_errors
from pipeline.checkpoint.format.pickled_metadata import read_pickled
from pipeline.checkpoint.format.shard_table import StoredTensor
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.importing import torchtitan
from pipeline.checkpoint.importing.source import (
    STATES,
    SourceCheckpoint,
    TargetModel,
    hugging_face_name,
    one_step_counter,
)
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.checkpoint.write.streamed import LazyTensor

_STATE = re.compile(r"(?:^|\.)state\.(?P<name>.+)\.(?P<kind>\w+)$")
_GROUP = re.compile(r"(?:^|\.)param_groups\.(?P<group>.+)\.(?P<key>\w+)$")
_AROUND_ALL = ("app", "state", "state_dict")
_AROUND_WEIGHTS = ("model", "module")
_STEPS = ("step", "global_step", "iteration", "train_state.step")
_COUNTER = "the optimizer's step counter"
_NO_WEIGHTS = re.compile(r"optim|lr_scheduler|scheduler|dataloader|train_state|rng|random_state|ema|model_ema")
"""Prefixes of top-level path parts that contain no weights."""


@dataclass
class _Collected:
    """Contents of the folders, collected entry by entry.

    Attributes:
        weights: parameter name -> value, for tensors under `model` or `module`.
        bare: first part of the path -> whole path -> value, for tensors elsewhere.
        states: state -> parameter name -> value.
        counters: step counters of the optimizer.
        groups: number of a group, or name of its only parameter -> hyperparameters.
        answers: path -> step recorded there.
        left_out: first parts of the paths that are not imported.
    """

    weights: dict[str, LazyTensor] = field(default_factory=dict)
    bare: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    states: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    counters: list[Any] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)


def read_dcp(folder: Path, wanted: TargetModel) -> SourceCheckpoint:
    """Opens a checkpoint of `dcp.save`.

    Args:
        folder: folder with `.metadata`; or a folder with several `step-N`, whose newest is read.
        wanted: the model of the config; torchtitan's order of rows depends on its number of heads.

    Raises:
        CheckpointError: files are missing or damaged, or there is no optimizer state.
    """
    if not (folder / TORCH_METADATA).is_file():
        folders = {path.parent.name: path.parent for path in folder.glob(f"step-*/{TORCH_METADATA}")}
        steps = {int(name[5:]): path for name, path in folders.items() if name[5:].isdecimal()}
        if not steps:
            why = f"{folder}: no folder is named step-N: {', '.join(sorted(folders))}"
            raise CheckpointError(f"{why}\n  try: one of these in the place of {folder}")
        folder = steps[max(steps)]
    source = read_folders([folder])
    return torchtitan.in_hugging_face_names(source, wanted) if torchtitan.is_of(source) else source


def read_folders(folders: Sequence[Path], *, step: int | None = None) -> SourceCheckpoint:
    """Opens one or several folders of `dcp.save`, e.g. a folder of the model and one of its optimizer.

    Args:
        folders: folders with a `.metadata` each.
        step: step recorded elsewhere; None to read it from the folders.

    Raises:
        CheckpointError: files are missing or damaged, or no folder has an optimizer state.
    """
    found, where = _Collected(), folders[0]
    for folder in folders:
        for path, value in _entries(folder):
            _sort_in(found, path, value, where)
    if not found.states:
        named = ", ".join([*found.left_out, *found.bare][:4])
        raise CheckpointError(
            f"{where} has no optimizer states by name ({named or 'weights alone'})\n"
            "  try: save get_optimizer_state_dict of torch.distributed.checkpoint.state_dict beside the model; for the"
            " weights alone dcp_to_torch of torch.distributed.checkpoint.format_utils"
        )
    counter = one_step_counter(found.counters, where)
    answers = found.answers | ({} if counter is None else {_COUNTER: int(counter)})
    told = {step} if step is not None else {*answers.values()}
    weights = found.weights or {name: each for tensors in found.bare.values() for name, each in tensors.items()}
    others = [f"{top} ({len(tensors)} tensors)" for top, tensors in found.bare.items() if found.weights]
    return SourceCheckpoint(
        path=where,
        kind="torch (DCP)",
        step=told.pop() if len(told) == 1 else 0,
        weights=weights,
        states=found.states,
        optimizer_step=counter,
        groups=list(found.groups.values()),
        members=[_members(name, group) for name, group in found.groups.items()],
        left_out=[*found.left_out, *others],
        answers=answers if step is None and len({*answers.values()}) != 1 else None,
    )


def _members(name: str, group: Mapping[str, Any]) -> list[str]:
    """Returns the parameter names of a group; a flat state has a parameter's name instead of a group number."""
    names = group.get("params") or () if name.isdecimal() else [name]
    return [hugging_face_name(str(each)) for each in names]  # a plain `Optimizer.state_dict()` lists numbers


def _sort_in(found: _Collected, path: tuple[str, ...], value: Any, where: Path) -> None:
    """Adds an entry to `found`: a `LazyTensor`, or a plain value, which is None if it could not be read."""
    tensor = isinstance(value, LazyTensor) and bool(value.shape)
    plain = value.read().item() if isinstance(value, LazyTensor) and not value.shape else value
    state, group = _STATE.search(".".join(path)), _GROUP.search(".".join(path))
    while len(path) > 1 and path[0] in _AROUND_ALL:
        path = path[1:]
    dotted, own = ".".join(path), path[0].startswith("optim")
    if state and state["kind"] == "step" and not tensor and (own or not _NO_WEIGHTS.match(path[0])):
        found.counters.append(plain)
    elif state and tensor and (own or state["kind"] in STATES):
        _put(found.states.setdefault(state["kind"], {}), hugging_face_name(state["name"]), value, where)
    elif group:
        found.groups.setdefault(group["group"], {})[group["key"]] = plain
    elif dotted in _STEPS and isinstance(plain, int | float):
        found.answers[dotted] = int(plain)
    elif tensor and path[0] in _AROUND_WEIGHTS and len(path) > 1:
        while len(path) > 1 and path[0] in _AROUND_WEIGHTS:
            path = path[1:]
        _put(found.weights, hugging_face_name(".".join(path)), value, where)
    elif tensor and not _NO_WEIGHTS.match(path[0]):
        _put(found.bare.setdefault(path[0], {}), hugging_face_name(dotted), value, where)
    else:
        found.left_out[path[0]] = None


def _put(tensors: dict[str, LazyTensor], name: str, value: LazyTensor, where: Path) -> None:
    """Adds a tensor.

    Raises:
        CheckpointError: there is already a tensor with this name.
    """
    if name in tensors:
        raise CheckpointError(f"{where} holds two tensors named {name}\n  try: save it with one model, by one name")
    tensors[name] = value


@dataclass(frozen=True)
class DcpFolder:
    """A folder of `dcp.save`, opened.

    Attributes:
        folder: folder with `.metadata`.
        tensors: key -> description of the stored tensor.
        places: key of each value that is not a tensor -> its location.
        metadata: torch's metadata.
        reader: reader of the tensors' values.
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
        paths = {name: file_beside(folder / TORCH_METADATA, name, CheckpointError) for name in files}
        if missing := sorted(name for name, path in paths.items() if not path.is_file()):
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
        """Returns a whole tensor."""
        stored = self.tensors[key]
        return LazyTensor(tuple(stored.shape), stored.dtype, partial(self._read, key, 0, tuple(stored.shape)))

    def row(self, key: str, index: int) -> LazyTensor:
        """Returns one entry along the first dim of a tensor, without that dim."""
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
        """Reads the bytes that torch.save wrote for a value that is not a tensor."""
        place = self.places[key]
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))


def _entries(folder: Path) -> Iterator[tuple[tuple[str, ...], LazyTensor | Any]]:
    """Yields (path, value) for everything in a folder: tensors, which are read later, and plain values."""
    opened = DcpFolder.open(folder)
    paths: Mapping[str, Any] = opened.metadata.planner_data or {}
    for key in opened.tensors:
        yield _path(paths, key), opened.tensor(key)
    for key in opened.places:
        yield _path(paths, key), _plain(opened.bytes_of(key))


def _path(paths: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(map(str, paths.get(key, (key,))))


def _plain(file: io.BytesIO) -> Any:
    """Reads a value that is not a tensor; None if it contains more than plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return None


def _metadata(folder: Path) -> Any:
    path = folder / TORCH_METADATA
    try:
        return read_pickled(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing\n  try: copy it here: without it nothing can be found") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise _damaged(path, str(error) or repr(error)) from None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}\n  try: copy it again, or the checkpoint of another step")
