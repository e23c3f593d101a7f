"""Finds the files with a model folder's weights, and the location of each tensor in them. No torch.

All code that reads weights uses this module. The files are those that transformers reads: model.safetensors, or else
the files that the index names; files beside them are ignored. A folder that other programs could read differently is
compared and refused: a single file beside an index, a tensor in two shards, an adapter beside its base.

A safetensors file consists of the length N of the header, uint64 little-endian; N bytes of JSON, name -> {dtype, shape,
data_offsets [begin, end)}, counted from the end of the header; and the tensors' concatenated bytes. So names, shapes
and the correct file size are known after reading a few kilobytes.
Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.errors import DataError
from foundation.foreign_folders import file_beside
from foundation.foreign_json import read_json

HfFields = dict[str, Any]
"""Fields of a Hugging Face config, as config.json has them."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
EXPORT = "make one with: headrace export RUN OUT"
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file.

    Attributes:
        dtype: safetensors' name of the dtype (F32, BF16, I32, ...).
        bytes: size of the tensor on disk.
        name: name of the tensor in the file.
        file: file that holds the tensor.
        begin: offset of the tensor's first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    name: str = field(compare=False)
    file: Path = field(compare=False)
    begin: int = field(compare=False)

    def same_values(self, other: TensorInfo) -> bool:
        """Whether another tensor has the same dtype, shape and bytes; both tensors are read if their headers agree."""
        if self != other:
            return False
        with self.file.open("rb") as mine, other.file.open("rb") as theirs:
            mine.seek(self.begin)
            theirs.seek(other.begin)
            for done in range(0, self.bytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, self.bytes - done)
                if mine.read(size) != theirs.read(size):
                    return False
        return True


def stored_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Returns every tensor of a model folder, by its name in the files.

    Raises:
        DataError: there are no safetensors files, a file is missing, truncated or damaged, the index names a wrong
            file, or the folder is ambiguous.
    """
    refuse_adapter(folder)
    single, index = folder / SINGLE, folder / INDEX
    if not index.is_file():
        if not single.is_file():
            raise _without_weights(folder)
        return read_header(single)
    tensors = _tensors_of_index(index)
    if single.is_file() and all(info.file != single for info in tensors.values()):
        _compare_with_single(index, tensors, read_header(single))
    return tensors


def refuse_adapter(folder: Path) -> None:
    """Refuses an adapter (LoRA), alone or beside its base: transformers adds it only if peft is installed.

    Raises:
        DataError: there is an adapter; the message tells how to merge it.
    """
    file = folder / ADAPTER
    if not file.is_file():
        return
    base = "BASE"
    with suppress(DataError):
        base = read_json(file).get("base_model_name_or_path") or base
    merge = (
        "from peft import AutoPeftModelForCausalLM as M;"
        f" M.from_pretrained('{folder}').merge_and_unload().save_pretrained('OUT')"
    )
    remedy = f'merge it with its base (pip install peft): python -c "{merge}"'
    beside = [name for name in (SINGLE, INDEX) if (folder / name).is_file()]
    if not beside:
        raise DataError(f"{folder}: it holds an adapter ({ADAPTER}) of {base}, and no model\n  try: {remedy}")
    raise DataError(
        f"{folder}: it holds a model ({beside[0]}) and an adapter ({ADAPTER}) of {base}, which some programs add to the"
        f" model and some do not\n  try: {remedy}, or move {ADAPTER} and adapter_model.safetensors out of the folder"
    )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one safetensors file.

    Raises:
        DataError: the header cannot be read, or the file does not have the length given in the header.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            # a damaged length must not cause a read of gigabytes
            raw = json.loads(file.read(min(length, path.stat().st_size)))
        entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
        tensors = {name: _tensor(name, entry, path, 8 + length) for name, entry in entries.items()}
    except (struct.error, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: its header cannot be read ({error})\n  try: {EXPORT}") from None
    expected, found = 8 + length + sum(info.bytes for info in tensors.values()), path.stat().st_size
    if found != expected:
        why = f"has {found} bytes, and {expected} by its header: truncated or overwritten"
        raise DataError(f"{path} {why}\n  try: copy or export it again")
    return tensors


def _tensor(name: str, entry: dict[str, Any], path: Path, data: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(entry["dtype"], tuple(entry["shape"]), end - begin, name, path, data + begin)


def _tensors_of_index(index: Path) -> dict[str, TensorInfo]:
    """Tensors of all files that an index names; checks that each is in its file, and equal in any other file."""
    folder = index.parent
    try:
        weight_map: dict[str, str] = dict(read_json(index)["weight_map"])
        names = sorted(set(weight_map.values()))
        missing = next((name for name in names if not file_beside(index, name).is_file()), None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is damaged: {error!r}\n  try: download or export the folder again") from None
    if missing is not None:
        remedy = "copy or export the folder again"
        raise DataError(f"{folder / missing} is missing; {index.name} lists it\n  try: {remedy}")
    headers = {name: read_header(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise _misplaced(index, tensor, name)
    tensors: dict[str, TensorInfo] = {}
    for found in headers.values():
        for tensor, info in found.items():
            other = tensors.setdefault(tensor, info)
            if other is not info and not other.same_values(info):
                what = f"{other.file} and {info.file} both hold {tensor}, with different values"
                raise DataError(f"{what}\n  try: download the folder again, or leave out the file that is not meant")
    return tensors


def _misplaced(index: Path, tensor: str, name: str) -> DataError:
    others = (file for file in sorted(index.parent.glob("*.safetensors")) if file.name != name)
    place = next((file.name for file in others if tensor in read_header(file)), None)
    why = f"it says that {tensor} is in {name}, which does not hold it"
    if place is None:
        return DataError(f"{index}: {why}, and no other file does\n  try: download or export the folder again")
    return DataError(f"{index}: {why}; {place} does\n  try: write {place} beside it in weight_map")


def _compare_with_single(index: Path, tensors: Mapping[str, TensorInfo], single: Mapping[str, TensorInfo]) -> None:
    if tensors.keys() == single.keys():
        different = next((name for name, info in tensors.items() if not info.same_values(single[name])), None)
        if different is None:
            return
        how = f"{different} differs between them"
    else:
        how = f"one has {min(tensors.keys() ^ single.keys())}, and the other does not"
    raise DataError(
        f"{index.parent} holds two models: {SINGLE}, which transformers reads, and the files of {INDEX}: {how}\n"
        f"  try: move {SINGLE} or {INDEX} out of the folder, whichever is not meant"
    )


def _without_weights(folder: Path) -> DataError:
    if not folder.is_dir():
        return DataError(f"{folder}: no such directory\n  try: {EXPORT}")
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        load = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
        why = f"its weights are pickles ({pickles[0]}), and only safetensors are read here"
        remedy = f"write safetensors beside them: python -c \"{load}.save_pretrained('{folder}')\""
        return DataError(f"{folder}: {why}\n  try: {remedy}")
    named = sorted(file.name for file in folder.glob("*.safetensors"))
    if named:
        why = f"it has neither {SINGLE} nor {INDEX}; transformers does not look for {', '.join(named[:3])}"
        remedy = f"rename {named[0]} to {SINGLE}, if its tensors have transformers' names"
        return DataError(f"{folder}: {why}\n  try: {remedy if len(named) == 1 else 'download the folder again'}")
    return DataError(
        f"{folder} has no safetensors\n  try: save the model with transformers' save_pretrained, or {EXPORT}"
    )
