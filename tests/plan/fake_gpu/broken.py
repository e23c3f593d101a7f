"""Keeps and breaks each contract of the fake device, and prints as JSON which contract each call is said to break.

Every function makes one call, rightly or (`bad`) with one fault, which a CPU forgives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pipeline.plan.fake_gpu.device as fake  # isort: skip  before torch
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from pipeline.checkpoint import save
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.config.topology import Topology
from pipeline.plan.fake_gpu.contracts import BrokenContractError, Call
from pipeline.plan.fake_gpu.contracts_collectives import Message, check_messages, split_group
from pipeline.plan.fake_gpu.memory import Memory
from pipeline.plan.fake_gpu.recorder import StepRecorder
from pipeline.plan.fake_gpu.step import axes_of, world
from pipeline.plan.fake_gpu.streams import FakeEvent
from pipeline.plan.fake_gpu.submissions import pin
from pipeline.runtime.launch.host_copy import HostCopy

aten: Any = torch.ops.aten
BF16 = torch.bfloat16


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def unaligned(*shape: int, dtype: torch.dtype) -> Tensor:
    return cuda(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return cuda(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def flash(bad: bool, *, size: int = 64, make: Any = cuda, dtype: torch.dtype = BF16, kind: str = "flash") -> None:
    query = make(2, 4, 16, size, dtype=dtype) if bad else cuda(2, 4, 16, 64, dtype=BF16)
    key, value = cuda(2, 4, 16, query.shape[-1], dtype=query.dtype), cuda(2, 4, 16, query.shape[-1], dtype=query.dtype)
    extra = () if kind == "flash" else (None, True)
    getattr(aten, f"_scaled_dot_product_{kind}_attention")(query, key, value, *extra)


def heads_that_do_not_divide(bad: bool) -> None:
    query, other = cuda(2, 4, 16, 64, dtype=BF16), cuda(2, 3 if bad else 2, 16, 64, dtype=BF16)
    aten._scaled_dot_product_flash_attention(query, other, other)


def backward(bad: bool, *, kind: str, fault: str = "log-sum") -> None:
    query, key, value, grad = (cuda(2, 4, 16, 64, dtype=BF16) for _ in range(4))
    log_sum = cuda(2, 4, 32)[..., :16].contiguous()
    log_sum = cuda(2, 4, 32)[..., ::2] if bad and fault == "log-sum" else log_sum
    if bad and fault == "gradient":
        grad = strided(2, 4, 16, 64, dtype=BF16) if kind == "cudnn" else cuda(2, 4, 16, 64)
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    operator = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    if kind == "efficient":
        operator(grad, query, key, value, None, query, log_sum, seed, seed, 0.0, [True] * 3 + [False])
    elif kind == "flash":
        operator(grad, query, key, value, query, log_sum, None, None, 16, 16, 0.0, False, seed, seed)
    else:
        operator(grad, query, key, value, query, log_sum, seed, seed, None, None, None, 16, 16, 0.0, False)


def bias(bad: bool) -> None:
    query = cuda(2, 4, 16, 64, dtype=BF16)
    mask = cuda(2, 4, 16, 17 if bad else 24, dtype=BF16)[..., :16]
    aten._scaled_dot_product_efficient_attention(query, query, query, mask, True)


def fp8(bad: bool, *, fault: str = "layout") -> None:
    rows = 24 if bad and fault == "size" else 32
    first, second = (cuda(32, rows).to(torch.float8_e4m3fn) for _ in range(2))
    if bad and fault == "alignment":
        first = torch.empty(32 * rows + 1, dtype=torch.float8_e4m3fn, device="cuda")[1:].view(32, rows)
    second = second.contiguous() if bad and fault == "layout" else second.t()
    scale = cuda(1)
    aten._scaled_mm(first, second, scale, scale, out_dtype=BF16)


def grouped(bad: bool, *, scaled: bool = False) -> None:
    width = 60 if bad else 64
    rows, weights = cuda(32, width, dtype=BF16), cuda(2, 32, width, dtype=BF16)
    ends = torch.zeros(2, dtype=torch.int32, device="cuda")
    if not scaled:
        aten._grouped_mm(rows, weights.mT, ends)
        return
    rows, weights = rows.to(torch.float8_e4m3fn), weights.to(torch.float8_e4m3fn)
    aten._scaled_grouped_mm(rows, weights.mT, cuda(32), cuda(2, 32), ends, out_dtype=BF16)


def adamw(bad: bool, *, fault: str) -> None:
    parameter, step = cuda(8, 8), torch.zeros((), device="cpu" if bad and fault == "step" else "cuda")
    grad = cuda(8, 8, dtype=BF16 if bad and fault == "dtype" else torch.float32)
    moment = cuda(8, 8).t() if bad and fault == "layout" else cuda(8, 8)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    found = {"found_inf": torch.zeros((), device="cpu" if bad and fault == "found_inf" else "cuda")}
    lists = [parameter], [grad], [moment], [cuda(8, 8)], [], [step]
    aten._fused_adamw_(*lists, **options, **found, amsgrad=False, maximize=False)


def gather(bad: bool, *, fault: str) -> None:
    part = strided(8) if bad and fault == "strides" else cuda(8)
    whole = cuda(33 if bad and fault == "size" else 32, dtype=BF16 if bad and fault == "dtype" else torch.float32)
    dist.distributed_c10d.all_gather_into_tensor(whole, part)


def scatter(bad: bool, *, fault: str) -> None:
    whole = strided(32) if bad and fault == "strides" else cuda(33 if bad and fault == "size" else 32)
    if bad and fault == "uneven":
        functional.wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(cuda(33), "sum", 4, group()))
    dist.reduce_scatter_tensor(cuda(8), whole)


def exchange(bad: bool, *, fault: str) -> None:
    sent = cuda(7, 4).t() if bad and fault == "strides" else cuda(7 if fault == "splits" else 4, 7)
    splits = [1, 2, 3, 2 if bad else 1] if fault == "splits" else [1] * 4
    received = cuda(4, 6 if bad and fault == "dims" else 7)
    dist.all_to_all_single(received, sent, [1] * 4, splits)


def group() -> str:
    world_group = dist.group.WORLD
    assert world_group is not None
    return str(world_group.group_name)


def reduce_dense(bad: bool) -> None:
    dist.all_reduce(strided(8) if bad else cuda(4, 2).t())


def message(bad: bool) -> None:
    operation = torch.ops.c10d.send
    operation([strided(8) if bad else cuda(8)], dist.group.WORLD.boxed(), 1, 0)


def splits(bad: bool, *, fault: str) -> None:
    first, second = [[0, 1], [2, 3]], [[0, 2]]  # ranks 1 and 3 have no colour in the second
    own = {rank: [first, second] for rank in range(4)}
    if bad:
        own[3] = [second, first] if fault == "order" else [first]
    split_group.verify(Call("split_group", {"splits": own}))


def read(bad: bool, *, how: str) -> None:
    side, source = torch.cuda.Stream(), cuda(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        source += 1
        done = torch.cuda.Event()
        done.record()
    if not bad:
        {"event": done.wait, "stream": lambda: torch.cuda.current_stream().wait_stream(side), "host": done.synchronize}[
            how
        ]()
    assert (source + 1).shape == (8,)


def overwritten(bad: bool) -> None:
    side, source = torch.cuda.Stream(), cuda(8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert (source + 1).shape == (8,)
    if not bad:
        torch.cuda.synchronize()
    source.zero_()


def collective(bad: bool, *, functionally: bool = False) -> None:
    values = cuda(8)
    if functionally:
        got = torch.ops._c10d_functional.all_reduce(values, "sum", group())
        got = got if bad else torch.ops._c10d_functional.wait_tensor(got)
        assert (got + 1).shape == (8,)
        return
    work = dist.all_reduce(values, async_op=True)
    if not bad:
        work.wait()
    values += 1


def freed(bad: bool, *, recorded: bool = False) -> None:
    side, source = torch.cuda.Stream(), cuda(2**20)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = source + 1
    if recorded and not bad:
        source.record_stream(side)
    del source
    if not recorded and not bad:
        torch.cuda.current_stream().wait_stream(side)
    assert cuda(2**19).shape != kept.shape


def resized(bad: bool) -> None:
    side, source = torch.cuda.Stream(), cuda(2**20)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = source + 1
    source.untyped_storage().resize_(0)
    if not bad:
        torch.cuda.current_stream().wait_stream(side)
    assert cuda(2**20).shape == kept.shape


def staging(bad: bool) -> None:
    buffer = pin(torch.zeros(8))
    assert buffer.to("cuda", non_blocking=True).is_cuda
    if not bad:
        torch.cuda.synchronize()
    buffer += 1


def staged(bad: bool) -> None:
    got = cuda(8).to("cpu", non_blocking=True)
    if not bad:
        torch.cuda.current_stream().synchronize()
    assert (got + 1).shape == (8,)


def checkpoint(bad: bool) -> None:
    """The writer's copy of a shard, which its thread reads: without the wait, too early."""
    writer = CheckpointWriter.__new__(CheckpointWriter)
    writer._buffers, writer._page_locked = {}, set()
    item, value = SimpleNamespace(index=0), cuda(8)
    plan: Any = SimpleNamespace(items=[item], value_lookup=lambda _state: lambda _item: value)
    with ExitStack() as stack:
        stack.enter_context(patch.object(save, "_page_lock", lambda buffer, _device: pin(buffer) is not None))
        if bad:
            stack.enter_context(patch.object(torch.cuda, "synchronize", lambda: None))
        lookup = writer._copy_to_host(plan, {})
    assert (lookup(item) + 1).shape == (8,)


def numbers(bad: bool) -> None:
    """The copy of a step's sums, which the host reads a step later: without the wait for its event, too early."""
    copy = HostCopy(cuda(8))
    with patch.object(FakeEvent, "synchronize", lambda _event: None) if bad else nullcontext():
        assert len(copy.read()) == 8


def pageable(bad: bool) -> None:
    source = torch.zeros(8)
    assert (source if bad else pin(source)).to("cuda", non_blocking=True).is_cuda


def reading(bad: bool, *, recorder: StepRecorder, how: Callable[[Tensor], Any]) -> None:
    recorder.forbids_reads = bad
    try:
        how(cuda(8))
    finally:
        recorder.forbids_reads = False


OPTIONS: dict[str, tuple[str, Callable[..., None], dict[str, dict[str, Any]]]] = {
    "flash": (
        "flash attention",
        flash,
        {
            "head size": {"size": 60},
            "too wide": {"size": 264},
            "last dim": {"make": strided},
            "alignment": {"make": unaligned},
            "dtype": {"dtype": torch.float32},
        },
    ),
    "heads": ("flash attention", heads_that_do_not_divide, {"": {}}),
    "efficient": (
        "efficient attention",
        flash,
        {"strided": {"make": strided, "kind": "efficient"}, "unaligned": {"make": unaligned, "kind": "efficient"}},
    ),
    "bias": ("efficient attention", bias, {"": {}}),
    "grouped": ("layouts of products", grouped, {"bf16": {}, "fp8": {"scaled": True}}),
    "all-reduce": ("dense tensors", reduce_dense, {"": {}}),
    "message": ("point to point", message, {"": {}}),
    "overwritten": ("order of streams", overwritten, {"": {}}),
    "collective": ("order of streams", collective, {"": {}, "functional": {"functionally": True}}),
    "freed": ("memory of another stream", freed, {"": {}, "record_stream": {"recorded": True}}),
    "resized": ("memory of another stream", resized, {"": {}}),
    "page-locked": ("waits of the host", staging, {"": {}}),
    "checkpoint writer": ("waits of the host", checkpoint, {"": {}}),
    "sums of a step": ("waits of the host", numbers, {"": {}}),
    "page-locked, read": ("waits of the host", staged, {"": {}}),
    "pageable": ("copies from pageable memory", pageable, {"": {}}),
}
FAULTS = {
    "fp8": ("layouts of products", fp8, ("layout", "size", "alignment")),
    "adamw": ("fused optimizers", adamw, ("step", "dtype", "layout", "found_inf")),
    "gather": ("all gather into tensor", gather, ("strides", "size", "dtype")),
    "scatter": ("reduce scatter tensor", scatter, ("strides", "size", "uneven")),
    "exchange": ("all to all single", exchange, ("splits", "strides", "dims")),
    "splits": ("split group", splits, ("order", "missing")),
}


def cases(recorder: StepRecorder) -> Iterator[tuple[str, str, Callable[..., None], dict[str, Any]]]:
    """Yields (case, contract that it breaks, function, its options)."""
    for name, (contract, function, options) in OPTIONS.items():
        yield from ((f"{name} {key}", contract, function, given) for key, given in options.items())
    for name, (contract, function, faults) in FAULTS.items():
        yield from ((f"{name}: {fault}", contract, function, {"fault": fault}) for fault in faults)
    for kind in ("flash", "efficient", "cudnn"):
        contract = "cudnn attention" if kind == "cudnn" else f"{kind} attention backward"
        for fault in ("log-sum", "gradient"):
            yield f"{kind} backward: {fault}", contract, backward, {"kind": kind, "fault": fault}
    for how in ("event", "stream", "host"):
        yield f"read: {how}", "order of streams", read, {"how": how}
    reads = {"item": lambda t: t.sum().item(), "cpu": lambda t: t.cpu(), "bool": lambda t: bool(t.sum() > 0)}
    for name, way in {**reads, "mask": lambda t: t[t > 0], "tolist": lambda t: t.tolist()}.items():
        yield f"reading: {name}", "host reads", reading, {"recorder": recorder, "how": way}


@contextmanager
def on_device() -> Iterator[StepRecorder]:
    """The fake device, with a process group of four ranks."""
    topology = Topology(dp=4)
    recorder = StepRecorder(Memory({}, head=(1, 1)), axes_of=lambda ranks: axes_of(topology, ranks))
    resizes, lists = recorder._memory.following_resizes(), recorder.reading_lists()
    with world(topology, 0), fake.fake_tensors(), resizes, lists, recorder:
        yield recorder


def broken_by(function: Callable[..., None], *, bad: bool, **options: Any) -> str:
    """The contract that a call breaks, with the message; empty if none."""
    try:
        function(bad, **options)
    except BrokenContractError as error:
        return f"{error.contract.name}: {error}"
    finally:
        torch.cuda.synchronize()  # memory that a fault left in use is another's afterwards
    return ""


def orders_of_messages() -> list[list[str]]:
    """What is said of messages in the same order on both ranks, of two sends that wait for each other, and of these in
    batches."""
    send, receive = ("send", "recv_")
    found = []
    for operators, batched in (((send, receive), False), ((send, send), False), ((send, send), True)):
        of_ranks = {
            rank: [Message("pp", 1 - rank, first, batched), Message("pp", 1 - rank, last, batched)]
            for rank, first in enumerate(operators)
            for last in [receive if first == send else send]
        }
        found.append(list(check_messages(of_ranks)))
    return found


def main() -> None:
    with on_device() as recorder:
        found = {
            name: [contract, *(broken_by(function, bad=bad, **options) for bad in (False, True))]
            for name, contract, function, options in cases(recorder)
        }
    print(json.dumps({"cases": found, "messages": orders_of_messages()}))


if __name__ == "__main__":
    main()
