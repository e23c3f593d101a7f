"""Accesses of the streams to memory: what each operator reads and writes, and whether these are in order.

Memory is followed as CUDA's caching allocator lends it: a freed block serves the next tensor of its stream, and
nothing waits for what other streams still do with it (but for `record_stream`). So a new tensor inherits the accesses
to freed blocks of its stream that could be its memory, until its stream comes after them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.plan.fake_gpu.contracts import Call
from pipeline.plan.fake_gpu.contracts_operators import memory_of_another_stream, order_of_streams, waits_of_the_host
from pipeline.plan.fake_gpu.streams import HOST, ORDER, Submitted


@dataclass(frozen=True)
class _Access:
    """An access to a range of a block's bytes.

    Attributes:
        former: whether it was to a freed tensor that may have been in the same memory.
        work: asynchronous collective that makes it, until somebody waits for it; None for other operators.
    """

    begin: float
    end: float
    moment: Submitted
    writes: bool
    operator: str
    former: bool = False
    work: object = None


@dataclass
class _MemoryBlock:
    """A block of memory of a storage.

    Attributes:
        stream: stream on which it was allocated, to which it returns.
        bytes: its size.
        accesses: accesses that later ones may have to come after.
        recorded: streams named by `record_stream`: the block is not used again before their work is done.
    """

    stream: int
    bytes: int
    accesses: list[_Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class Accesses:
    """Follows accesses to device memory, and to host memory that copies use while the host goes on."""

    def __init__(self) -> None:
        self._blocks: dict[int, _MemoryBlock] = {}
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._freed: defaultdict[int, list[_MemoryBlock]] = defaultdict(list)
        self._finished: set[object] = set()

    def see(self, tensor: Tensor) -> None:
        """Notes the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            number = self._numbers[storage] = ORDER.new_name()
            size = storage.nbytes()  # a symbol where it depends on numbers, which a fake tensor lacks
            self._resized(number, size if tensor.is_cuda and isinstance(size, int) else 0)
            weakref.finalize(storage, self._resized, number, 0).atexit = False

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that the memory of a storage was freed, or allocated again."""
        if storage in self._numbers:
            self._resized(self._numbers[storage], storage.nbytes())

    def access(self, tensor: Tensor, operator: str, moment: Submitted, *, writes: bool, work: object = None) -> None:
        """Notes an access to a tensor.

        Raises:
            BrokenContractError: it is not ordered after an access with which it conflicts.
        """
        block = self._blocks.get(self._numbers.get(tensor.untyped_storage(), 0))
        if block is None or not tensor.numel():
            return
        found = _Access(*_span(tensor), moment, writes, operator, work=work)
        for each in block.accesses:
            if each.begin < found.end and found.begin < each.end and (writes or each.writes or each.former):
                self._check(each, found, tensor)
        if writes:
            kept = [each for each in block.accesses if each.begin < found.begin or found.end < each.end]
        else:
            kept = [each for each in block.accesses if not _repeats(found, each)]
        block.accesses = [*kept, found]

    def copy(self, source: Tensor, target: Tensor, moment: Submitted, *, waits: bool) -> None:
        """Notes a copy between host and device: the host's memory is in use until the device has done it."""
        host, writes = (source, False) if target.is_cuda else (target, True)
        if waits:
            ORDER.join(HOST, moment.stream)
            return
        self.see(host)
        number = self._numbers[host.untyped_storage()]
        self._blocks.setdefault(number, _MemoryBlock(HOST, host.untyped_storage().nbytes()))
        self.access(host, "copy_ (non_blocking)", moment, writes=writes)

    def finish(self, work: object) -> None:
        """Notes that somebody has waited for an asynchronous collective: its tensors are no longer kept for it."""
        self._finished.add(work)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Replaces `Tensor.record_stream`."""
        block = self._blocks.get(self._numbers.get(tensor.untyped_storage(), 0))
        if block is not None:
            block.recorded.add(stream.stream_id)

    def _check(self, before: _Access, now: _Access, tensor: Tensor) -> None:
        if before.moment.stream == now.moment.stream or ORDER.follows(now.moment.stream, before.moment):
            return
        contract = memory_of_another_stream if before.former else order_of_streams
        if HOST in (before.moment.stream, now.moment.stream):
            contract = waits_of_the_host
        what = {"now": now, "before": before}
        contract.verify(Call(now.operator, {"tensor": tensor, **what}))

    def _resized(self, number: int, size: int) -> None:
        """Frees the block of a storage, and allocates one of another size."""
        block = self._blocks.get(number)
        if block is not None and block.bytes == size:
            return
        if block is not None:
            self._free(self._blocks.pop(number))
        if size:
            self._blocks[number] = self._allocated(size)

    def _free(self, block: _MemoryBlock) -> None:
        left = [
            each
            for each in block.accesses
            if not each.former  # those are of another freed block
            and each.moment.stream not in (block.stream, HOST, *block.recorded)
            and (each.work is None or each.work in self._finished)  # until then, NCCL's process group keeps the tensors
        ]
        if left and block.stream != HOST:
            self._freed[block.stream].append(replace(block, accesses=left))

    def _allocated(self, size: int) -> _MemoryBlock:
        stream, inherited = ORDER.current, []
        for freed in self._freed[stream]:
            freed.accesses = [each for each in freed.accesses if not ORDER.follows(stream, each.moment)]
            if freed.bytes >= size:
                inherited += [replace(each, begin=0, end=size, former=True) for each in freed.accesses]
        self._freed[stream] = [each for each in self._freed[stream] if each.accesses]
        return _MemoryBlock(stream, size, inherited)


ACCESSES = Accesses()
"""The accesses to the memory of this process's one device."""


def accessed(op: Any, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yields each tensor that an operator reads or writes, and whether it writes it; views read nothing."""
    if op.namespace == "prim":  # properties of tensors
        return
    if op.namespace == "c10d":
        tensors = [list(tensors_of(each)) for each in args]
        for position, found in enumerate(tensors):
            yield from ((each, position == 0 and op.__name__.split(".")[0] != "send") for each in found)
        return
    given = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    inputs = set()
    for name, writes in _accessed_parameters(op):
        for tensor in tensors_of(given.get(name)):
            inputs.add(tensor.untyped_storage())
            yield tensor, writes
    if not _only_allocates(op):
        for tensor in tensors_of(result):
            if tensor.untyped_storage() not in inputs and not _aliases(op):
                yield tensor, True


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yields the tensors among values; of a DTensor or another wrapper, the tensors within it."""
    for each in (values,) if isinstance(values, Tensor) else tree_leaves(values):
        if hasattr(each, "__tensor_flatten__"):
            yield from tensors_of([getattr(each, name) for name in each.__tensor_flatten__()[0]])
        elif isinstance(each, Tensor):
            yield each


@cache
def _accessed_parameters(op: Any) -> tuple[tuple[str, bool], ...]:
    """Parameters of an operator whose tensors it reads or writes, and whether it writes them."""
    if op.__name__.startswith("all_gather_copy_in"):
        return ("all_gather_inputs", False), ("all_gather_output", True)
    if _aliases(op) or _only_allocates(op) or "_like" in op.__name__:
        return ()
    return tuple((each.name, each.is_write) for each in op._schema.arguments)


@cache
def _aliases(op: Any) -> bool:
    """Whether an operator returns a view, without a look at the values."""
    if op.__name__.startswith(("_unsafe_view", "all_gather_copy_in")):
        return True
    returned = [each.alias_info for each in op._schema.returns]
    return any(each is not None and not each.is_write for each in returned)


@cache
def _only_allocates(op: Any) -> bool:
    name: str = op.__name__
    return name.startswith(("empty", "new_empty", "wait_tensor"))


def _span(tensor: Tensor) -> tuple[float, float]:
    """First byte of a tensor in its storage, and the first one after it."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    last = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


def _repeats(now: _Access, before: _Access) -> bool:
    """Whether a read makes an earlier one superfluous: what comes after it comes after both."""
    same = now.moment.stream == before.moment.stream and (now.begin, now.end) == (before.begin, before.end)
    return same and not before.writes and not before.former
