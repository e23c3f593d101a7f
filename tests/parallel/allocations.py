"""What tensors a computation makes and keeps: their sizes, seen at the dispatcher, in forward and backward."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationRecorder(TorchDispatchMode):
    """Notes every new storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[torch.dtype, int]] = []
        self._names: list[str] = []
        self._storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self._names.append(func.overloadpacket.__name__)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._seen.append((tensor.dtype, storage.nbytes() // tensor.element_size()))
                self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def allocations(self, dtype: torch.dtype, *, at_least: int) -> int:
        """How many tensors of so many elements were made."""
        return sum(kind == dtype and elements >= at_least for kind, elements in self._seen)

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that was made."""
        return max((elements for _, elements in self._seen), default=0)

    @property
    def alive_bytes(self) -> int:
        """Bytes of the tensors made so far that somebody still holds."""
        gc.collect()
        return sum(size for ref, size in self._storages if not ref.expired())

    def calls(self, *names: str) -> int:
        """How often operators of these names ran."""
        return sum(name in names for name in self._names)
