"""Opens `.metadata` of torch.distributed.checkpoint, a pickle, and creates no objects but those of metadata classes."""

from __future__ import annotations

import pickle
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch

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
"""Module -> classes and functions that `.metadata` may name."""
_NOT_NEEDED = ("torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch")
"""Modules of the plans that Megatron stores in `.metadata`; objects of these modules are not created."""


class Fields:
    """Stand-in for an object whose attributes alone are needed."""


class Opaque(Fields):
    """Stand-in for an object of any class or function; keeps only its attributes."""

    def __init__(self, *_: Any) -> None:
        """Accepts any arguments, and ignores them."""


def enum_member(owner: object, name: str) -> Enum:
    """Replaces `getattr`, with which Python 3.11.0 to 3.11.3 pickles enum members; returns nothing else.

    Raises:
        UnpicklingError: `owner` is not an enum, or has no member `name`.
    """
    if isinstance(owner, EnumMeta) and name in owner.__members__:
        member: Enum = owner.__members__[name]
        return member
    raise pickle.UnpicklingError(f"it asks for the attribute {name!r} of {owner!r}, which is no member of an enum")


class _Unpickler(pickle.Unpickler):
    """Unpickler that creates only the classes of torch's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class or function of a name.

        Raises:
            UnpicklingError: metadata may not contain it.
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


def read_pickled(path: Path) -> Any:
    """Reads the metadata in a file.

    Raises:
        UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError: the file is damaged, or names a
            class or function that metadata may not contain.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return _Unpickler(file).load()
