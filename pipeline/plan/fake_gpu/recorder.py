"""Records a step's use of the device: collectives, host reads, copies from the host, FLOPs and memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipeline.engines.parallel.collectives import host_sizes
from pipeline.plan.fake_gpu.accesses import ACCESSES
from pipeline.plan.fake_gpu.contracts import Call, call_of
from pipeline.plan.fake_gpu.contracts_operators import host_reads
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.fake_gpu.streams import HOST, ORDER
from pipeline.plan.fake_gpu.submissions import Submissions, is_pinned
from pipeline.runtime.launch.host_copy import HostCopy

aten: Any = torch.ops.aten

_HERE = f"{Path(__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[2]}/"

COLLECTIVES: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "barrier": ("barrier", 0),
}
"""Operator of torch.distributed -> its kind here, and the position of the argument with the tensor that is gathered,
reduced or sent."""

FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}
"""Operators of torch's functional collectives, whose first argument is this rank's input."""

_SHAPE_READS = {
    host_sizes._opoverload,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
}
"""Operators whose result has a shape or value that depends on numbers on the device."""


class StepRecorder(TorchDispatchMode):
    """A dispatch mode that counts the work of a step on fake tensors.

    Enter it within fake tensors. It counts from `begin` on; memory is followed from the start, and every call has to
    keep its operator's contracts.

    Args:
        memory: record of every storage of the device.
        axes_of: function that turns the ranks of a process group into the axes along which they differ, in words.
        gloo: whether to follow the copy that gloo makes of the input of a reduce-scatter; NCCL makes none.
        host: whether to follow tensors in the host's memory, too.

    Attributes:
        collectives: (kind, axes, dtype) -> [count, bytes of the whole tensors].
        host_reads: project line that made the host wait for the device -> count.
        deferred_reads: project line that began a copy to the host, for which the host waits later -> count.
        unpinned: project line that copied pageable host memory to the device -> count.
        forbids_reads: whether a read of the device for which the host waits breaks a contract.
        flops: FLOPs of matrix products and attention; causal attention counts in full, as in MFU.
    """

    def __init__(
        self, memory: Memory, *, axes_of: Callable[[list[int]], str], gloo: bool = False, host: bool = False
    ) -> None:
        super().__init__()
        self._memory, self._axes_of, self._gloo = memory, axes_of, gloo
        self._followed = ("cuda", "cpu") if host else ("cuda",)
        self._groups: dict[str, str] = {}
        self._submissions = Submissions()
        self.forbids_reads = False
        self.begin()

    def __enter__(self) -> Self:
        self._follows = self._submissions.following()
        self._follows.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._follows.__exit__(*error)

    def begin(self) -> None:
        """Forgets all counts."""
        self.collectives: dict[tuple[str, str, str], list[int]] = {}
        self.host_reads: Counter[str] = Counter()
        self.deferred_reads: Counter[str] = Counter()
        self.unpinned: Counter[str] = Counter()
        self.flops = 0
        self._memory.begin()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _on_meta(args, kwargs):
            with _disable_current_modes():
                return op(*args, **kwargs)
        if op is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self._read_number(args[0])
            return _constant(args[0].dtype) if not _asks_for_overflow() else 0
        if op is aten.index.Tensor and _by_mask(args):
            return self._all_rows(*args)
        self._note_copies(op, args, kwargs)
        if op.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(op, args)
        result = self._submissions.run(op, args, kwargs)
        if op.overloadpacket in flop_registry:
            self.flops += int(flop_registry[op.overloadpacket](*args, **kwargs, out_val=result))
        elif op is aten._grouped_mm.default:
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, FakeTensor) and each.device.type in self._followed:  # a DTensor has no memory itself
                self._memory.see(each)
        return result

    @contextmanager
    def deferring_reads(self) -> Iterator[None]:
        """Counts every `HostCopy` within the block and gives it constants, because a fake device has no events."""

        def begin(copy: HostCopy, values: Tensor) -> None:
            if values.device.type == "cuda":
                self.deferred_reads[_line()] += 1
            copy.__dict__["constants"] = [_constant(values.dtype)] * values.numel()

        before = HostCopy.__init__, HostCopy.read
        HostCopy.__init__, HostCopy.read = begin, lambda copy: copy.constants  # type: ignore[assignment, attr-defined, method-assign]
        try:
            yield
        finally:
            HostCopy.__init__, HostCopy.read = before  # type: ignore[method-assign]

    @contextmanager
    def reading_lists(self) -> Iterator[None]:
        """Counts `tolist` within the block as one read, as on a device; on fake tensors it reads number by number."""

        def tolist(tensor: FakeTensor) -> Any:
            self._read_number(tensor)
            shape = [int(size) for size in tensor.shape]
            return np.full(shape, _constant(tensor.dtype)).tolist()

        before = FakeTensor.tolist
        FakeTensor.tolist = tolist  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            FakeTensor.tolist = before  # type: ignore[method-assign]

    def _note_copies(self, op: Any, args: Any, kwargs: Any) -> None:
        source, target = _copied(op, args, kwargs)
        if source is None:
            if op in _SHAPE_READS and args[0].device.type == "cuda":
                self._read(f"{_line()} ({op.overloadpacket.__name__})")
            return
        if source.device.type == "cuda" and target == "cpu":
            self._read(_line(), waits=not call_of(op, args, kwargs).values["non_blocking"])
        if source.device.type == "cpu" and target == "cuda" and not is_pinned(source):
            self.unpinned[_line()] += 1

    def _all_rows(self, tensor: Tensor, masks: Any) -> Tensor:
        """Selects all rows, and counts the read for which the host waits: the number of rows that a mask selects."""
        self._read(f"{_line()} (mask)")
        return tensor.new_empty((masks[0].numel(), *tensor.shape[masks[0].ndim :]))

    def _read(self, where: str, *, waits: bool = True) -> None:
        """Counts a read of the device, for which the host waits."""
        self.host_reads[where] += 1
        if not waits:
            return
        if self.forbids_reads:
            host_reads.verify(Call("a read", {"where": where}))
        ORDER.join(HOST, ORDER.current)

    def _read_number(self, tensor: Tensor) -> None:
        """Counts a read of a number by the host; one of the host's own tensors comes after copies into it."""
        if tensor.device.type == "cuda":
            self._read(_line())
        else:
            ACCESSES.access(tensor, "a read", ORDER.submit(HOST), writes=False)

    def _note_collective(self, op: Any, args: Any) -> None:
        name = op.__name__.split(".")[0]
        if name == "wait_tensor":
            return
        times = 1
        if op.namespace == "c10d":
            assert name in COLLECTIVES, f"{op} is not in the table of collectives"
            kind, at = COLLECTIVES[name]
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
        else:
            kind, at = FUNCTIONAL[name], 0
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            times = group.size() if kind == "all_gather" else 1
        whole = [each for each in tree_leaves(args[at]) if isinstance(each, Tensor)]
        dtype = str(whole[0].dtype).removeprefix("torch.") if whole else "-"
        entry = self.collectives.setdefault((kind, self._axes(group), dtype), [0, 0])
        if self._gloo and kind == "reduce_scatter":
            self._memory.pass_through(sum(each.numel() * each.element_size() for each in whole))
        entry[0] += 1
        entry[1] += times * sum(each.numel() * each.element_size() for each in whole)

    def _axes(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._groups:
            self._groups[group.group_name] = self._axes_of(dist.get_process_group_ranks(group))
        return self._groups[group.group_name]


def _on_meta(args: Any, kwargs: Any) -> bool:
    """Whether an operator works on a model on meta, which stays there: FSDP2 and copies want no fake tensors for it."""
    first = next((each for each in args if isinstance(each, Tensor)), None)
    if first is None:
        return str(kwargs.get("device")) == "meta"
    return first.is_meta and not isinstance(first, FakeTensor) and str(kwargs.get("device", "meta")) == "meta"


def _by_mask(args: Any) -> bool:
    return args[1][0] is not None and args[1][0].dtype is torch.bool and args[0].device.type == "cuda"


def _copied(op: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, str]:
    """The tensor that an operator copies, and the kind of device it copies it to."""
    if op is aten._to_copy.default and kwargs.get("device") is not None:
        return args[0], torch.device(kwargs["device"]).type
    if op is aten.copy_.default:
        return args[1], args[0].device.type
    return None, ""


def _constant(dtype: torch.dtype) -> bool | float | int:
    """The constant that the host reads from a fake tensor, which has no numbers."""
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _asks_for_overflow() -> bool:
    """Whether DeepSpeed checks for gradient overflow or an invalid norm; on fake tensors the answer is no."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if "overflow" in name or "invalid" in name:
            return True
        frame = frame.f_back
    return False


def _line() -> str:
    """The innermost executed line of the project outside of the fake device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_HERE):
            return f"pipeline/{name.removeprefix(_PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward pass"
