"""The mean pseudo-gradient of the islands, bit-identical on all islands.

Every island owns a part of the flat tensor. It receives this part of all pseudo-gradients (all-to-all), averages them
in the order of the islands, and sends the mean to all (all-gather). Per island this moves 2 (m - 1) / m times the bytes
of a pseudo-gradient, like a ring all-reduce; with compression, a quarter of that.

The norm of a mean is at most the mean of the norms. All islands refuse a result with a larger or non-finite norm before
it is applied.

With int8, an island adds its rounding error to its next pseudo-gradient (error feedback, Karimireddy et al. 2019). The
owner of a part does the same with the rounding error of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.run.groups.islands.peers import ExchangeError
from pipeline.run.groups.islands.quantize import BLOCK, dequantize, quantize

_ROUNDING = 1.25
"""Factor by which a norm may exceed its bound: int8 adds to each of a block's `BLOCK` values at most 1 / 254 of its
largest, 6 % of the norm, twice; fp32 sums add nothing noticeable."""

_NORM_PART = 1 << 20


class Collectives(Protocol):
    """The methods of `peers.Peers` that are used here."""

    rank: int
    size: int

    def all_to_all(self, values: Tensor) -> Tensor:
        """Sends part i of dim 0 to island i; returns the parts received."""
        ...

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Gathers the values of all islands."""
        ...


class Mean(NamedTuple):
    """A mean, and the error of its compression.

    Attributes:
        values: fp32 [N].
        error: fp32 [N], for this island's next pseudo-gradient; None without compression.
    """

    values: Tensor
    error: Tensor | None


def mean_over_islands(
    gradient: Tensor, peers: Collectives, *, contributors: Sequence[int], error: Tensor | None
) -> Mean:
    """Computes the mean of the contributors' pseudo-gradients. All islands of the group call it.

    Args:
        gradient: fp32 [N], this island's pseudo-gradient; not used if it does not contribute.
        peers: the group.
        contributors: ranks of the islands whose pseudo-gradients count.
        error: fp32 [N], accumulated rounding error of int8 compression; None without compression (fp32).

    Raises:
        ExchangeError: the mean cannot result from the contributors' values.
    """
    count, own = gradient.numel(), peers.rank in contributors
    if error is None and peers.size == 1:
        return Mean(gradient.clone(), None)
    share = -(-count // (peers.size * BLOCK)) * BLOCK
    padded = gradient.new_zeros(share * peers.size)
    if own:
        padded[:count] = gradient if error is None else gradient + error
    norms = torch.cat(peers.all_gather(norm_of(padded)))[list(contributors)]
    if error is None:
        received = peers.all_to_all(padded).view(peers.size, share)
        values = torch.cat(peers.all_gather(_mean(received, contributors)))[:count]
        refuse_impossible(values, float(norms.mean()), peers)
        return Mean(values, None)
    packed = quantize(padded)
    left = padded - dequantize(packed)
    received = dequantize(peers.all_to_all(packed)).view(peers.size, share)
    mean = _mean(received, contributors)
    packed_mean = quantize(mean)
    begin = peers.rank * share
    # in the mean a pseudo-gradient is divided by the number of contributors
    left[begin : begin + share] += (mean - dequantize(packed_mean)) * len(contributors)
    values = torch.cat([dequantize(each) for each in peers.all_gather(packed_mean)])[:count]
    refuse_impossible(values, float(norms.mean()), peers)
    return Mean(values, left[:count] if own else error + left[:count])


def norm_of(values: Tensor) -> Tensor:
    """Computes the Euclidean norm: fp64 [1]. Sums parts in fp32 (ten times as fast on a CPU), then in fp64."""
    parts = [torch.linalg.vector_norm(part) for part in values.split(_NORM_PART)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts).double())
    return norm.reshape(1)


def refuse_impossible(result: Tensor, bound: float, peers: Collectives) -> None:
    """Refuses, on all members alike, a result of an exchange that its inputs cannot give.

    Args:
        result: fp32 [N], equal on all members.
        bound: largest norm that the result can have; not finite if a member's own values are not, which that member
            reports.
        peers: the group.

    Raises:
        ExchangeError: the norm of the result is larger, or not finite.
    """
    norm = float(norm_of(result))
    if math.isfinite(bound) and not norm <= _ROUNDING * bound:
        why = f"the result has norm {norm:.3g}, and the values of {peers.size} members allow at most {bound:.3g}"
        raise ExchangeError(f"{why}: it was damaged on the way or in a host's memory, and is not applied")


def _mean(received: Tensor, contributors: Sequence[int]) -> Tensor:
    total = received[contributors[0]].clone()
    for rank in contributors[1:]:
        total += received[rank]
    return total / len(contributors)
