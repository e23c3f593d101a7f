"""The mean pseudo-gradient of the islands, bit-identical on all islands.

Every island owns a part of the flat tensor: it gets that part of all pseudo-gradients (all-to-all), takes their mean in
the order of the islands, and sends it to all (all-gather). Per island that is 2 (m - 1) / m times the bytes of a
pseudo-gradient, as a ring all-reduce has; compressed, a quarter of that.

The norm of a mean is at most the mean of the norms, and what is larger than that, or not finite, is refused by all
islands before it is applied.

With int8, an island keeps what its rounding has left out and adds it to its next pseudo-gradient (error feedback,
Karimireddy et al. 2019). The owner of a part does so with the rounding of the mean, too.
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
largest, 6 % of the norm, twice; fp32 sums add nothing that shows."""

_NORM_PART = 1 << 20


class Collectives(Protocol):
    """The part of `peers.Peers` that is needed here."""

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
        gradient: fp32 [N], of this island; not used if it does not contribute.
        peers: the group.
        contributors: ranks of the islands whose pseudo-gradients count.
        error: fp32 [N], what int8 compression has left out so far; None for fp32, without compression.

    Raises:
        ExchangeError: the mean is not one of what the contributors have sent.
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
    # a pseudo-gradient enters the mean divided by the number of contributors
    left[begin : begin + share] += (mean - dequantize(packed_mean)) * len(contributors)
    values = torch.cat([dequantize(each) for each in peers.all_gather(packed_mean)])[:count]
    refuse_impossible(values, float(norms.mean()), peers)
    return Mean(values, left[:count] if own else error + left[:count])


def norm_of(values: Tensor) -> Tensor:
    """The Euclidean norm: fp64 [1]. Parts are summed in fp32, which is ten times as fast on a CPU, and then in fp64."""
    parts = [torch.linalg.vector_norm(part) for part in values.split(_NORM_PART)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts).double())
    return norm.reshape(1)


def refuse_impossible(result: Tensor, bound: float, peers: Collectives) -> None:
    """Refuses a result of an exchange that its inputs cannot give, on all members alike.

    Args:
        result: fp32 [N], the same on all members.
        bound: largest norm that it can have; not finite where a member's own values are not, which is that member's to
            tell.
        peers: the group.

    Raises:
        ExchangeError: its norm is larger, or not finite.
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
