"""Collects whole matrices from the ranks' shards, and returns results to the shards, in any layout.

An update that depends on whole matrices (Muon's) is computed once per matrix, by an owner rank. One all-to-all sends
shards of matrices to their owners; another returns results to all ranks with a part. Matrices are distributed over the
ranks by FLOPs. If a rank has a whole matrix, it computes the update itself without sending, unless this exceeds its
share.

All that the exchange needs to know of a layout is each rank's shards: flat ranges of a box of a parameter. This
describes shards of FSDP2, ZeRO, tensor and expert parallelism alike. If several ranks have copies, one is sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.format.shards import split_flat_range
from pipeline.models.construction.rectangle import Rectangle
from pipeline.models.hidden_matrices import MatrixForm

_ELEMENTS_AT_ONCE = 1 << 27
"""Largest number of elements of a rank's shards in one exchange: each copy is 256 MiB in bf16."""
_OVER_SHARE = 1.1
"""Multiple of a rank's share of the FLOPs up to which it computes the matrices that it has whole."""


Form = TypeVar("Form")


@dataclass(frozen=True)
class HeldShard(Generic[Form]):
    """A rank's part of a parameter within one of its tensors.

    Attributes:
        name: Hugging Face name of the parameter.
        form: description of the whole parameter, e.g. its matrices.
        box: box of the parameter that contains the flat range; None for the whole parameter.
        start: first flat index within the box.
        offset: first index in the flattened tensor.
        length: number of elements.
    """

    name: str
    form: Form
    box: Rectangle | None
    start: int
    offset: int
    length: int


Stored = tuple[str, int]
"""A stored matrix: parameter name, and index of the expert within the parameter."""


@dataclass(frozen=True)
class _HeldRectangle:
    """A rank's rectangle of a stored matrix, contiguous in the rank's tensor.

    Attributes:
        tensor: index of the rank's tensor.
        offset: first index in the flattened tensor.
        rows, columns: the rectangle, as (first, count).
    """

    tensor: int
    offset: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.rows[1] * self.columns[1]

    @property
    def rectangle(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.rows, self.columns

    def of(self, matrix: Tensor) -> Tensor:
        """Views the rectangle within a whole matrix."""
        return matrix.narrow(0, *self.rows).narrow(1, *self.columns)


class MatrixExchange:
    """Gathers, changes and returns matrices. Every rank of the group has the same tensors by index. Collective.

    Args:
        tensors: this rank's shards by tensor; an empty list for a tensor without shards.
        group: the ranks that together have every matrix; None for one process.
        flops: form of a parameter -> FLOPs of one update of each of its stored matrices.
    """

    def __init__(
        self,
        tensors: Sequence[Sequence[HeldShard[MatrixForm]]],
        group: dist.ProcessGroup | None,
        *,
        flops: Callable[[MatrixForm], float],
    ) -> None:
        self._group, self._flops = group, flops
        self._held: list[list[list[HeldShard[MatrixForm]]]] = [[list(each) for each in tensors]]
        self._rank = 0
        if group is not None:
            self._rank = dist.get_rank(group)
            self._held *= dist.get_world_size(group)
            dist.all_gather_object(self._held, [list(each) for each in tensors], group=group)
        self._rounds: dict[tuple[int, ...], list[_Round]] = {}

    def apply(self, tensors: dict[int, Tensor], compute: Callable[[list[tuple[MatrixForm, Tensor]]], None]) -> None:
        """Changes tensors in place.

        Args:
            tensors: index -> this rank's tensor, contiguous, all of one dtype. The indices are the same on every rank.
            compute: function that changes whole matrices, in their stored form [m, n], in place.
        """
        key = tuple(tensors)
        if key not in self._rounds:
            self._rounds[key] = list(self._made(key))
        flat = {index: tensor.view(-1) for index, tensor in tensors.items()}
        for each in self._rounds[key]:
            each.run(flat, compute, group=self._group)

    def shares(self, indices: Sequence[int]) -> list[float]:
        """Returns the FLOPs assigned to every rank."""
        return [*self._made(indices)][-1].load

    def _made(self, indices: Sequence[int]) -> Iterator[_Round]:
        load = [0.0] * len(self._held)
        for names in self._divided(indices):
            made = self._round(indices, names, load)
            load = made.load
            yield made

    def _divided(self, indices: Sequence[int]) -> Iterator[set[str]]:
        """Yields sets of parameters to exchange together: one, or at most `_ELEMENTS_AT_ONCE` elements per rank."""
        sizes: dict[str, list[int]] = {}
        for rank, _, shard in self._shards(indices):
            sizes.setdefault(shard.name, [0] * len(self._held))[rank] += shard.length
        chosen: set[str] = set()
        total = [0] * len(self._held)
        for name, added in sizes.items():
            if chosen and max(map(sum, zip(total, added, strict=True))) > _ELEMENTS_AT_ONCE:
                yield chosen
                chosen, total = set(), [0] * len(self._held)
            chosen.add(name)
            total = [size + more for size, more in zip(total, added, strict=True)]
        yield chosen

    def _shards(self, indices: Sequence[int]) -> Iterator[tuple[int, int, HeldShard[MatrixForm]]]:
        """Yields (rank, index of its tensor, shard), tensor by tensor."""
        for index in indices:
            yield from ((rank, index, shard) for rank, held in enumerate(self._held) for shard in held[index])

    def _round(self, indices: Sequence[int], names: set[str], load: list[float]) -> _Round:
        holders: dict[Stored, dict[int, list[_HeldRectangle]]] = {}
        forms: dict[str, MatrixForm] = {}
        for rank, index, shard in self._shards(indices):
            if shard.name in names:
                forms[shard.name] = shard.form
                for stored, part in _parts_of(shard, index):
                    holders.setdefault(stored, {}).setdefault(rank, []).append(part)
        flops = {name: self._flops(form) for name, form in forms.items()}
        return _Round(holders, forms, flops, rank=self._rank, load=load)


def _parts_of(shard: HeldShard[MatrixForm], index: int) -> Iterator[tuple[Stored, _HeldRectangle]]:
    """Divides a shard in tensor `index` into parts of stored matrices."""
    inner, offset = shard.box.sizes if shard.box else shard.form.shape, shard.offset
    for rectangle in split_flat_range(inner, shard.start, shard.length):
        box = rectangle.shifted(shard.box.offsets) if shard.box else rectangle
        *experts, rows, columns = zip(box.offsets, box.sizes, strict=True)
        first, count = experts[0] if experts else (0, 1)
        for expert in range(first, first + count):
            yield (shard.name, expert), _HeldRectangle(index, offset, rows, columns)
            offset += rows[1] * columns[1]


class _Round:
    """One exchange: the parts that this rank sends, computes and receives.

    Args:
        holders: stored matrix -> rank -> parts of the matrix on the rank.
        forms: form of each parameter, by name.
        flops: parameter name -> FLOPs of one update of each of its stored matrices.
        rank: this process's rank within the group.
        load: FLOPs of every rank in earlier rounds.

    Attributes:
        load: FLOPs of every rank so far.
    """

    def __init__(
        self,
        holders: dict[Stored, dict[int, list[_HeldRectangle]]],
        forms: dict[str, MatrixForm],
        flops: dict[str, float],
        *,
        rank: int,
        load: list[float],
    ) -> None:
        self._holders, self._forms, self._rank = holders, forms, rank
        self.load, ranks = list(load), len(load)
        owners = self._deal(flops)
        # in an order that is the same on all ranks
        self._there = _Leg(rank, ranks, (row for each in owners.items() for row in self._senders(*each, ranks=ranks)))
        self._back = _Leg(rank, ranks, (row for each in owners.items() for row in self._receivers(*each)))
        self._owned = [stored for stored, owner in owners.items() if owner == rank]

    def _deal(self, flops: dict[str, float]) -> dict[Stored, int]:
        """Assigns every stored matrix to an owner, the largest first, with the same result on all ranks."""
        total = sum(self.load) + sum(flops[name] for name, _ in self._holders)
        limit = _OVER_SHARE * total / len(self.load)
        least = [(load, rank) for rank, load in enumerate(self.load)]
        heapq.heapify(least)
        owners: dict[Stored, int] = {}
        for stored in sorted(self._holders, key=lambda stored: (-flops[stored[0]], stored)):
            cost = flops[stored[0]]
            whole = (rank for rank in self._holders[stored] if self._is_whole(rank, stored))
            allowed = [rank for rank in whole if self.load[rank] + cost <= max(limit, cost)]
            while least[0][0] < self.load[least[0][1]]:  # the rank got more since its entry was made
                heapq.heapreplace(least, (self.load[least[0][1]], least[0][1]))
            owner = min(allowed, key=lambda rank: (self.load[rank], rank)) if allowed else least[0][1]
            owners[stored] = owner
            self.load[owner] += cost
        return owners

    def _is_whole(self, rank: int, stored: Stored) -> bool:
        """Whether a rank has all of a matrix, in one piece."""
        parts, (m, n) = self._holders[stored].get(rank, []), self._forms[stored[0]].shape[-2:]
        return len(parts) == 1 and parts[0].rectangle == ((0, m), (0, n))

    def _senders(self, stored: Stored, owner: int, *, ranks: int) -> Iterator[_Sent]:
        """Yields the parts that make up the matrix; nothing if the owner has it whole."""
        if self._is_whole(owner, stored):
            return
        taken: set[tuple[tuple[int, int], tuple[int, int]]] = set()
        for rank in sorted(self._holders[stored], key=lambda rank: (rank - owner) % ranks):
            for part in self._holders[stored][rank]:
                if part.rectangle not in taken:  # another rank may have the same part
                    taken.add(part.rectangle)
                    yield rank, owner, stored, part

    def _receivers(self, stored: Stored, owner: int) -> Iterator[_Sent]:
        """Yields the parts of all ranks, except an owner that has the whole matrix."""
        for rank, parts in self._holders[stored].items():
            if rank != owner or not self._is_whole(owner, stored):
                yield from ((owner, rank, stored, part) for part in parts)

    def run(
        self,
        tensors: dict[int, Tensor],
        compute: Callable[[list[tuple[MatrixForm, Tensor]]], None],
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Runs one round of `MatrixExchange.apply`; tensors are flat."""
        like = next(iter(tensors.values()))
        matrices: dict[Stored, Tensor] = {}
        for stored in self._owned:
            shape = self._forms[stored[0]].shape[-2:]
            if self._is_whole(self._rank, stored):
                [part] = self._holders[stored][self._rank]
                matrices[stored] = _values(tensors, part).view(shape)
            else:
                matrices[stored] = like.new_empty(shape)
        self._there.run(
            lambda _, part: _values(tensors, part),
            lambda stored, part, values: part.of(matrices[stored]).copy_(values),
            like=like,
            group=group,
        )
        compute([(self._forms[stored[0]], matrix) for stored, matrix in matrices.items()])
        self._back.run(
            lambda stored, part: part.of(matrices[stored]),
            lambda _, part, values: _values(tensors, part).copy_(values.reshape(-1)),
            like=like,
            group=group,
        )


def _values(tensors: dict[int, Tensor], part: _HeldRectangle) -> Tensor:
    return tensors[part.tensor].narrow(0, part.offset, part.numel)


_Sent = tuple[int, int, Stored, _HeldRectangle]
"""One transfer: (sending rank, receiving rank, matrix, part of the matrix)."""


class _Leg:
    """One all-to-all of parts.

    Args:
        rank: this process's rank within the group.
        ranks: number of ranks in the group.
        rows: transfers between all ranks, in the same order on all ranks.
    """

    def __init__(self, rank: int, ranks: int, rows: Iterator[_Sent]) -> None:
        out: list[list[tuple[Stored, _HeldRectangle]]] = [[] for _ in range(ranks)]
        into: list[list[tuple[Stored, _HeldRectangle]]] = [[] for _ in range(ranks)]
        self._used = False
        for sender, receiver, stored, part in rows:
            self._used = True
            if sender == rank:
                out[receiver].append((stored, part))
            if receiver == rank:
                into[sender].append((stored, part))
        self._out, self._in = (list(chain.from_iterable(side)) for side in (out, into))
        self._out_sizes, self._in_sizes = (
            [sum(part.numel for _, part in each) for each in side] for side in (out, into)
        )

    def run(
        self,
        read: Callable[[Stored, _HeldRectangle], Tensor],
        write: Callable[[Stored, _HeldRectangle, Tensor], object],
        *,
        like: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Sends every part that `read` returns, and passes received values to `write`, in the part's shape."""
        if not self._used:
            return
        sent = [read(stored, part).reshape(-1) for stored, part in self._out]
        outgoing = torch.cat(sent) if sent else like.new_empty(0)
        incoming = outgoing
        if group is not None:
            incoming = like.new_empty(sum(self._in_sizes))
            dist.all_to_all_single(incoming, outgoing, self._in_sizes, self._out_sizes, group=group)
        pieces = incoming.split([part.numel for _, part in self._in]) if self._in else ()
        for (stored, part), values in zip(self._in, pieces, strict=True):
            write(stored, part, values.view(part.rows[1], part.columns[1]))
