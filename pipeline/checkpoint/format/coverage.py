"""Checks that the shards of tensors cover every element exactly once, and describes the errors of one tensor.

`unevenly_covered` compares fingerprints. Give every index x of dim d a random weight w_d(x) modulo a prime p, and every
element the product of the weights of its indices. The fingerprint of a tensor or a rectangle is the sum over its
elements. It equals the product, over the dims, of the sums of weights. If the shards cover every element exactly once,
their fingerprints add up to the tensor's. Otherwise the two sums are different polynomials of degree D in the weights,
and agree with a probability of at most D / p (J. T. Schwartz, Fast probabilistic algorithms for verification of
polynomial identities, 1980): two rounds with p = 2^31 - 1 leave D^2 * 2e-19. Only the sums of weights up to the indices
at which shards begin or end are needed; a hash of each index serves as a random sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.format.shard_table import Ints, ShardTable, StoredTensor
from pipeline.models.construction.rectangle import Rectangle

_PRIME = 2**31 - 1
_ROUNDS = 2
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mixed(values: Ints, seed: int) -> npt.NDArray[np.uint64]:
    """Returns a 64-bit hash of every value (the finalizer of SplitMix64; Steele, Lea, Flood 2014)."""
    x = values.astype(np.uint64) + np.uint64(seed * _GOLDEN & _MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def unevenly_covered(table: ShardTable) -> list[int]:
    """Finds the indices of tensors with an element in no shard or in several, or with a shard outside the tensor."""
    wrong = np.zeros(len(table.tensors), dtype=bool)
    wrong[table.tensor_of_row[_outside(table)]] = True
    for number in range(_ROUNDS):
        whole = _fingerprints(np.zeros_like(table.shapes), table.shapes, number)
        shards = _fingerprints(table.offsets, table.sizes, number)
        sums = np.concatenate([[0], np.cumsum(shards)])  # below 2^63 for 2^32 shards
        wrong |= (sums[table.first_row[1:]] - sums[table.first_row[:-1]]) % _PRIME != whole
    return [int(tensor) for tensor in np.flatnonzero(wrong)]


def shards_outside(table: ShardTable) -> Iterator[tuple[str, str]]:
    """Yields (key, error) for every shard that exceeds its tensor; the table's rows may be in any order."""
    for row in _outside(table).tolist():
        stored = table.tensors[table.tensor_of_row[row]]
        yield stored.key, coverage_error(stored, [table.rectangle(row)]) or "a shard has a negative offset"


def _outside(table: ShardTable) -> Ints:
    wrong = (table.offsets < 0) | (table.offsets + table.sizes > table.shapes[table.tensor_of_row])
    return np.flatnonzero(wrong.any(axis=1))


def _fingerprints(offsets: Ints, sizes: Ints, number: int) -> Ints:
    """Fingerprints of N rectangles: int64 [N], below the prime."""
    product = np.ones(len(offsets), dtype=np.int64)
    for dim in range(offsets.shape[1]):
        seed = 1 + number * 64 + dim
        up_to_end, up_to_start = (
            (mixed(each, seed) % np.uint64(_PRIME)).astype(np.int64)
            for each in (offsets[:, dim] + sizes[:, dim], offsets[:, dim])
        )
        product = product * ((up_to_end - up_to_start) % _PRIME) % _PRIME
    return product


def coverage_errors(table: ShardTable) -> Iterator[tuple[str, str]]:
    """Yields (key, error) for every tensor whose shards do not cover it exactly once."""
    for tensor in unevenly_covered(table):
        stored = table.tensors[tensor]
        yield stored.key, coverage_error(stored, table.rectangles(tensor)) or "its shards do not cover it exactly once"


def coverage_error(stored: StoredTensor, shards: Sequence[Rectangle]) -> str | None:
    """Describes why the shards do not cover the tensor exactly once; None if they do.

    Shards that lie inside the tensor without overlaps, and have as many elements as it has, cover it.
    """
    for shard in shards:
        ends = (o + s for o, s in zip(shard.offsets, shard.sizes, strict=True))
        if len(shard.sizes) != len(stored.shape) or any(end > d for end, d in zip(ends, stored.shape, strict=True)):
            return f"a shard at {shard.offsets} of size {shard.sizes} does not lie within {stored.shape}"
    pair = next(_overlapping(shards), None)
    if pair is not None:
        return f"the shards at {pair[0].offsets} and at {pair[1].offsets} overlap"
    missing = stored.numel - sum(shard.numel for shard in shards)
    return f"{missing:,} of {stored.numel:,} elements are in no shard" if missing else None


def _overlapping(shards: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Yields pairs of rectangles that share an element, by a sweep along the first dim."""
    filled = [shard for shard in shards if shard.numel]
    if filled and not filled[0].sizes:  # every shard of a scalar is the whole scalar
        yield from pairwise(filled)
        return
    active: list[Rectangle] = []
    for shard in sorted(filled, key=lambda each: each.offsets):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > shard.offsets[0]]
        yield from ((other, shard) for other in active if _intersect(other, shard))
        active.append(shard)


def _intersect(a: Rectangle, b: Rectangle) -> bool:
    dims = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(start < other + size and other < start + length for start, length, other, size in dims)
