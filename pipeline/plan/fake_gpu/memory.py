"""Device memory of a fake step: its storages, their lifetimes and their kinds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.plan.fake_gpu.accesses import ACCESSES

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
_BLOCK = 512
"""Granularity of CUDA's allocator, in bytes."""
_DEEPEST = 60
"""Most stack frames that are searched for the function that allocates."""


@dataclass(frozen=True)
class Peak:
    """The largest number of bytes that lived at one time, by kind.

    Attributes:
        bytes: total of all kinds.
        kinds: kind -> bytes at that time.
    """

    bytes: int
    kinds: dict[str, int]


class Memory:
    """Follows the storages of a device from the first operator that sees them until they are freed.

    A storage's kind is that of the function that allocated it (`makers`). Else it is logits if its tensor's last dim is
    the vocabulary, a gradient if it has the head's shape, or activations. `name` may set it later: the last kind
    counts.

    Args:
        makers: code of a function -> kind of the storages allocated while it runs.
        head: (vocabulary, hidden size) of the head on this rank.
    """

    def __init__(self, makers: Mapping[CodeType, str], *, head: tuple[int, int]) -> None:
        self._makers, self._head = makers, head
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._kinds: list[str] = []
        self._bytes: list[int] = []
        self._events: list[tuple[int, int]] = []
        """Changes in order: (number of the storage, change in bytes)."""
        self._begin = 0

    def see(self, tensor: Tensor) -> None:
        """Notes the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return
        number = len(self._kinds)
        self._numbers[storage] = number
        self._kinds.append(self._kind(tensor))
        self._bytes.append(0)
        self._resized(number, storage.nbytes())
        weakref.finalize(storage, self._resized, number, 0).atexit = False

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Sets the kind of tensors, which may be DTensors."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            number = self._numbers.get(local.untyped_storage())
            if number is not None:
                self._kinds[number] = kind

    def pass_through(self, size: int) -> None:
        """Notes a buffer of `size` bytes that lives only within an operator."""
        self._kinds.append("buffers")
        self._bytes.append(0)
        number = len(self._kinds) - 1
        self._resized(number, size)
        self._resized(number, 0)

    def begin(self) -> None:
        """Begins a new peak: only moments from here on count."""
        self._begin = len(self._events)

    def peak(self) -> Peak:
        """The peak since `begin`."""
        totals = list(accumulate(change for _, change in self._events))
        first = max(0, self._begin - 1)
        at = max(range(first, len(totals)), key=totals.__getitem__)
        kinds = dict.fromkeys(KINDS, 0)
        for number, change in self._events[: at + 1]:
            kinds[self._kinds[number]] += change
        return Peak(totals[at], kinds)

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Follows resizes of storages: FSDP2 frees gathered weights by them, and no dispatch mode sees them."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            number = self._numbers.get(storage)
            if number is not None:
                self._resized(number, size)
            ACCESSES.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _resized(self, number: int, size: int) -> None:
        rounded = -(-size // _BLOCK) * _BLOCK
        change = rounded - self._bytes[number]
        if change:
            self._bytes[number] = rounded
            self._events.append((number, change))

    def _kind(self, tensor: Tensor) -> str:
        # start at the caller's frame: a frame that refers to itself would keep its tensors until garbage is collected
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_DEEPEST):
            if frame is None:
                break
            if frame.f_code in self._makers:
                return self._makers[frame.f_code]
            frame = frame.f_back
        if tuple(tensor.shape) == self._head:
            return "gradients"
        return "logits" if tensor.ndim and tensor.shape[-1] == self._head[0] else "activations"
