"""Contracts of collectives and point-to-point messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.plan.fake_gpu.contracts import Call, contract, dense, described


def _in_one_piece(call: Call) -> Iterator[str]:
    for name, tensor in call.tensors():
        if not tensor.is_contiguous():
            yield f"{name} is {described(tensor)}, not contiguous"


def _one_dtype(call: Call) -> Iterator[str]:
    if len({(each.dtype, each.device) for _, each in call.tensors()}) > 1:
        yield "the dtypes or devices differ"


def _pairs(call: Call, *names: tuple[str, str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the (whole, shard) tensors, by the parameter names of the several operators."""
    for whole, shard in names:
        if whole in call.values and shard in call.values:
            yield from zip(
                (each for _, each in call.tensors(whole)), (each for _, each in call.tensors(shard)), strict=True
            )


def _shares(call: Call, pairs: Iterator[tuple[Tensor, Tensor]]) -> Iterator[str]:
    yield from _in_one_piece(call)
    yield from _one_dtype(call)
    for whole, shard in pairs:
        if whole.numel() != call.ranks * shard.numel():
            yield f"{whole.numel():,} elements are not {call.ranks} times {shard.numel():,}"


@contract("_allgather_base_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor")
def all_gather_into_tensor(call: Call) -> Iterator[str]:
    """Input and output are contiguous and of one dtype; the output has as many elements as all ranks' inputs, which are
    of equal size.

    Source: torch 2.13 c10d/ProcessGroupNCCL.cpp, _allgather_base and check_gpu_single_tensor; NCCL 2.30.7
    src/collectives.cc:131 (one sendcount)
    """
    names = ("output_tensor", "input_tensor"), ("outputs", "inputs")
    yield from _shares(call, _pairs(call, *names))


@contract("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor")
def reduce_scatter_tensor(call: Call) -> Iterator[str]:
    """Input and output are contiguous and of one dtype; the input has as many elements as all ranks' outputs, which are
    of equal size.

    Source: torch 2.13 c10d/ProcessGroupNCCL.cpp, _reduce_scatter_base; NCCL 2.30.7 src/collectives.cc:238
    """
    names = ("input_tensor", "output_tensor"), ("inputs", "outputs")
    yield from _shares(call, _pairs(call, *names))
    if call.operator == "reduce_scatter_tensor" and call.values["input"].shape[0] % call.ranks:
        yield f"dim 0 has {call.values['input'].shape[0]} rows, not a multiple of {call.ranks} ranks"


@contract("alltoall_base_", "all_to_all_single")
def all_to_all_single(call: Call) -> Iterator[str]:
    """Input and output are contiguous and of one dtype; there is a split for each rank, and the splits add up to dim 0;
    without splits the ranks divide dim 0; other dims are the same.

    Source: torch 2.13 c10d/Utils.hpp:605 (checkSplitSizes)
    """
    yield from _in_one_piece(call)
    yield from _one_dtype(call)
    for name, splits in (("input", "input_split_sizes"), ("output", "output_split_sizes")):
        sizes: list[int] = call.values[splits]
        for _, tensor in call.tensors(name):
            if not sizes and tensor.shape[0] % call.ranks:
                yield f"dim 0 of {name} has {tensor.shape[0]} rows for {call.ranks} ranks"
            if sizes and (len(sizes) != call.ranks or sum(sizes) != tensor.shape[0]):
                yield f"{splits} {list(sizes)} of {call.ranks} ranks do not add up to {tensor.shape[0]} rows"
    if len({tuple(each.shape[1:]) for _, each in call.tensors("input", "output")}) > 1:
        yield "the dims after the first differ"


@contract(
    "allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "reduce_scatter_", "alltoall_", "all_reduce"
)
def dense_tensors(call: Call) -> Iterator[str]:
    """Tensors of all-reduces and broadcasts are dense: their elements are in one piece of memory, in any order.

    Source: torch 2.13 c10d/ProcessGroupNCCL.cpp, check_gpu_single_tensor ("Tensors must be contiguous")
    """
    for name, tensor in call.tensors():
        if not dense(tensor):
            yield f"{name} is {described(tensor)}, not in one piece"


class Message(NamedTuple):
    """A send or receive of a rank.

    Attributes:
        group: name of the process group.
        peer: global rank of the other end.
        operator: send or recv_.
        batched: whether it is part of a batch, whose messages have no order.
    """

    group: str
    peer: int
    operator: str
    batched: bool


@contract("send", "recv_")
def point_to_point(call: Call) -> Iterator[str]:
    """Tensors are contiguous. Messages between two ranks come in the same order on both, a receive for each send, or
    in one batch of one group (batch_isend_irecv): a message alone holds up all later ones until its peer comes, and two
    ranks that both send first wait for ever.

    Source: torch 2.13 c10d/ProcessGroupNCCL.cpp, pointToPoint; torch/distributed/distributed_c10d.py:1329 and :3049;
    NCCL 2.30.7 user guide, usage/p2p.rst
    """
    yield from _in_one_piece(call)


def check_messages(messages: dict[int, Sequence[Message]]) -> Iterator[str]:
    """Yields what is wrong with the order of messages outside of batches: rank -> its messages, in order."""
    met = {"send": "recv_", "recv_": "send"}
    for rank, other in combinations(messages, 2):
        own, theirs = (
            [(each.group, each.operator) for each in messages[a] if each.peer == b and not each.batched]
            for a, b in ((rank, other), (other, rank))
        )
        mirrored = [(group, met[operator]) for group, operator in theirs]
        for group in {group for group, _ in [*own, *mirrored]}:
            ends = [[operator for name, operator in side if name == group] for side in (own, mirrored)]
            if ends[0] != ends[1]:
                at = next((n for n, (a, b) in enumerate(zip(*ends, strict=False)) if a != b), min(map(len, ends)))
                yield f"message {at} between ranks {rank} and {other} is not a send on one and a receive on the other"


def check_splits(splits: dict[int, list[list[list[int]]]]) -> Iterator[str]:
    """Yields what is wrong with calls of `split_group`: rank -> its calls in order, each with all groups of ranks."""
    (first, expected), *others = splits.items()
    for rank, calls in others:
        if calls != expected:
            at = next((n for n, (a, b) in enumerate(zip(calls, expected, strict=False)) if a != b), None)
            where = f"call {min(len(calls), len(expected)) if at is None else at}"
            yield f"ranks {first} and {rank} split differently in {where}"
    for groups in expected:
        members = [rank for group in groups for rank in group]
        if len(members) != len(set(members)):
            yield f"a rank is in two groups of {groups}"


@contract("split_group")
def split_group(call: Call) -> Iterator[str]:
    """All ranks of the parent group make the same splits in the same order, also ranks in no group of a split (they
    have no colour); no rank is in two groups of a split.

    Source: torch 2.13 torch/distributed/distributed_c10d.py:5668; c10d/ProcessGroupNCCL.hpp:537; NCCL 2.30.7
    src/init.cc:3392, ncclCommSplit
    """
    splits: Any = call.values["splits"]
    yield from check_splits(splits)


CONTRACTS = (
    all_gather_into_tensor,
    reduce_scatter_tensor,
    all_to_all_single,
    dense_tensors,
    point_to_point,
    split_group,
)
