"""Submits every call to its stream: asserts contracts, and follows collectives as `ProcessGroupNCCL` runs them.

A collective with `async_op=False` is work of the current stream. Others, and messages, are work of a stream of the
process group, which first waits for the current one; `Work.wait` (or `wait_tensor`) makes the current stream wait for
it. Until then the process group keeps the tensors. A message outside of a batch has a stream for its pair of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipeline.plan.fake_gpu.accesses import ACCESSES, accessed, tensors_of
from pipeline.plan.fake_gpu.contracts import BrokenContractError, Call, call_of, contracts_of
from pipeline.plan.fake_gpu.contracts_collectives import Message
from pipeline.plan.fake_gpu.contracts_operators import ASKED, copies_from_pageable_memory, layouts_of_products
from pipeline.plan.fake_gpu.streams import HOST, ORDER, FakeEvent, FakeStream, Submitted

_C10D: Any = torch._C._distributed_c10d


class Submissions:
    """Runs operators on fake tensors: asserts their contracts, and notes their accesses to memory on their streams."""

    def __init__(self) -> None:
        self._works = _Works()
        self.following, self.messages = self._works.following, self._works.messages

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator.

        Raises:
            BrokenContractError: the call breaks a contract.
        """
        group = _group_of(op, args)
        call = call_of(op, args, kwargs, ranks=1 if group is None else group.size())
        if group is not None and call.operator in ("send", "recv_"):
            self._works.message(call, group)
        contracts = contracts_of(call.operator)
        if contracts and any(tensor.is_cuda for _, tensor in call.tensors()):
            for contract in contracts:
                contract.verify(call)
        try:
            result = op(*args, **kwargs)
        except RuntimeError as error:
            if call.operator not in ASKED:
                raise
            raise BrokenContractError(layouts_of_products, call.operator, str(error), call.shapes()) from None
        self._submit(op, args, kwargs, result, call, group)
        return result

    def _submit(
        self, op: Any, args: Any, kwargs: Any, result: Any, call: Call, group: dist.ProcessGroup | None
    ) -> None:
        found = list(accessed(op, args, kwargs, result))
        for tensor in (*(tensor for tensor, _ in found), *tensors_of(result)):
            ACCESSES.see(tensor)
        if call.values.get("pin_memory"):
            pin(result)
        if call.operator == "wait_tensor":
            self._works.wait_tensor(args[0])
            return
        kinds = {tensor.device.type for tensor, _ in found}
        if call.operator in ("copy_", "_to_copy") and kinds == {"cpu", "cuda"}:
            self._copy(call, *(each for each, _ in sorted(found, key=lambda each: each[1])[-2:]))
            return
        ended = None
        if group is None:
            moment = ORDER.submit(ORDER.current if "cuda" in kinds else HOST)
        else:
            moment, ended = self._works.submit(call, group.group_name)
        for tensor, writes in found:
            if tensor.is_cuda or moment.stream == HOST:
                ACCESSES.access(tensor, call.operator, moment, writes=writes, work=ended)
        if ended is not None:
            self._works.begin(ended, result)

    def _copy(self, call: Call, source: Tensor, target: Tensor) -> None:
        """Submits a copy between host and device; without `non_blocking` the host waits for it."""
        host = source if target.is_cuda else target
        made_pinned = call.operator == "_to_copy" and not target.is_cuda
        call.values["pinned"] = made_pinned or is_pinned(host)
        copies_from_pageable_memory.verify(call)
        moment = ORDER.submit(ORDER.current)
        device, writes = (target, True) if target.is_cuda else (source, False)
        ACCESSES.access(device, call.operator, moment, writes=writes)
        ACCESSES.copy(source, target, moment, waits=not call.values["non_blocking"])


class _Works:
    """Follows asynchronous collectives from their call until somebody waits for them."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Any, FakeEvent]] = {}
        self._results: weakref.WeakKeyDictionary[torch.UntypedStorage, FakeEvent] = weakref.WeakKeyDictionary()
        self.messages: list[Message] = []
        self._batched = False

    def message(self, call: Call, group: dist.ProcessGroup) -> None:
        """Notes a message for `check_messages`."""
        peer = dist.get_global_rank(group, _peer(call))
        self.messages.append(Message(group.group_name, peer, call.operator, self._batched))

    def submit(self, call: Call, group: str) -> tuple[Submitted, FakeEvent | None]:
        """Submits a collective to its stream; returns it, and the event of its end if it is asynchronous."""
        message = call.operator in ("send", "recv_")
        if not call.values.get("async_op", True):
            return ORDER.submit(ORDER.current), None
        alone = message and not self._batched
        stream = ORDER.stream_of((group, _peer(call)) if alone else group)
        ORDER.join(stream, ORDER.current)
        moment, ended = ORDER.submit(stream), FakeEvent()
        ended.record(FakeStream(number=stream))
        return moment, ended

    def begin(self, ended: FakeEvent, result: Any) -> None:
        """Notes the result of an asynchronous collective: a `Work`, or tensors to be waited for."""
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.ScriptObject):
                work = _C10D.Work.unbox(each)
                self._begun[id(work)] = (work, ended)
            elif isinstance(each, Tensor):
                self._results[each.untyped_storage()] = ended

    def wait_tensor(self, tensor: Tensor) -> None:
        """Makes the current stream wait for the collective whose result a tensor is."""
        ended = self._results.pop(tensor.untyped_storage(), None)
        if ended is not None:
            self._end(ended)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows waits, and batches of messages, within the block."""
        wait, batch = _C10D.FakeWork.wait, distributed_c10d.batch_isend_irecv

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._begun.pop(id(work), None)
            if begun is not None:
                self._end(begun[1])
            return wait(work, *args, **kwargs)

        def batched(operations: list[Any]) -> Any:
            self._batched = True
            try:
                return batch(operations)
            finally:
                self._batched = False

        _C10D.FakeWork.wait = waited
        dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batched  # type: ignore[assignment]
        try:
            yield
        finally:
            _C10D.FakeWork.wait = wait
            dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch

    def _end(self, ended: FakeEvent) -> None:
        ended.wait()
        ACCESSES.finish(ended)


def _peer(call: Call) -> int:
    return int(call.values["dst" if call.operator == "send" else "src"])


def _group_of(op: Any, args: Any) -> dist.ProcessGroup | None:
    """The process group of a collective; None for other operators."""
    if op.namespace == "c10d":
        return dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
    if op.namespace == "_c10d_functional" and not op.__name__.startswith("wait_tensor"):
        return distributed_c10d._resolve_process_group(args[-1])
    return None


def pin(tensor: Tensor, *_device: Any) -> Tensor:
    """Replaces `Tensor.pin_memory`."""
    _PINNED.add(tensor.untyped_storage())
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether `pin` was called for its memory, or the tensor is a scalar, which travels with the kernel's arguments."""
    return tensor.untyped_storage() in _PINNED or tensor.ndim == 0


_PINNED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Page-locked memory of this process."""
