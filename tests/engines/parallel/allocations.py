"""Records the tensors that a computation allocates and keeps, at the dispatcher, in forward and backward passes."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationRecorder(TorchDispatchMode):
    """Records every new storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self._allocated: list[tuple[torch.dtype, int]] = []
        self._names: list[str] = []
        self._storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self._names.append(func.overloadpacket.__name__)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._allocated.append((tensor.dtype, storage.nbytes() // tensor.element_size()))
                self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def allocations(self, dtype: torch.dtype, *, at_least: int) -> int:
        """Number of allocated tensors of a dtype with at least so many elements."""
        return sum(kind == dtype and elements >= at_least for kind, elements in self._allocated)

    @property
    def largest(self) -> int:
        """Elements of the largest allocated tensor."""
        return max((elements for _, elements in self._allocated), default=0)

    @property
    def alive_bytes(self) -> int:
        """Bytes of the allocated tensors that are still referenced."""
        gc.collect()
        return sum(size for ref, size in self._storages if not ref.expired())

    def calls(self, *names: str) -> int:
        """Number of calls of operators with these names."""
        return sum(name in names for name in self._names)
