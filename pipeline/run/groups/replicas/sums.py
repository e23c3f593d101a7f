"""The sum of the replicas' gradients, bit-identical on all replicas.

As in `islands.mean`, every replica owns a part of the flat gradient: it gets that part of all gradients (all-to-all),
sums them in the order of the replicas' names, and sends the sum to all (all-gather). Per replica this moves 2 (m - 1) /
m times the bytes of a gradient, like a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.run.groups.islands.mean import Collectives, norm_of, refuse_impossible

BUCKET = 1 << 24
"""Number of elements exchanged at once: 64 MiB within a message's time-out, and in each of three buffers."""


class GradientSums:
    """The flat gradient of this rank on the CPU, fp32 [N], and the result of the last exchange.

    The result is kept until the next exchange has succeeded: a replica that missed the exchange can still get it.
    """

    def __init__(self) -> None:
        self._own, self._result = torch.empty(0), torch.empty(0)
        self._own_loss_sums = self._loss_sums = torch.empty(0, dtype=torch.float64)

    def exchange(self, gradients: Sequence[Tensor], sums: Tensor, peers: Collectives) -> None:
        """Sums over the replicas. All replicas of the group call it; `keep` makes it the result.

        Args:
            gradients: fp32, of any shapes; not changed.
            sums: [1 + parts], sums of the loss and its parts; not changed.
            peers: connections to the same ranks of the replicas.

        Raises:
            ExchangeError: a replica does not answer, or the sum cannot result from the replicas' values.
        """
        self._gather(gradients)
        norm = norm_of(self._own)
        for bucket in self._own.split(BUCKET):
            bucket.copy_(_sum(bucket, peers))
        gathered = peers.all_gather(torch.cat([sums.detach().to("cpu", torch.float64), norm]))
        totals = gathered[0]
        for each in gathered[1:]:
            totals += each
        # the norm of a sum is at most the sum of the norms
        refuse_impossible(self._own, float(totals[-1]), peers)
        self._own_loss_sums = totals[:-1]

    def keep(self) -> None:
        """Makes the sums of `exchange` the result, when it has succeeded on all ranks of this replica."""
        self._own, self._result, self._loss_sums = self._result, self._own, self._own_loss_sums

    def write(self, gradients: Sequence[Tensor], sums: Tensor) -> None:
        """Writes the result into the gradients of this rank and the sums of its losses."""
        for gradient, values in zip(gradients, self._result.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view(gradient.shape))
        sums.copy_(self._loss_sums)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns the result: fp32 [N], and fp64 [1 + parts]."""
        return self._result, self._loss_sums

    def take(self, result: Tensor, loss_sums: Tensor) -> None:
        """Replaces the result by another replica's."""
        self._result, self._loss_sums = result, loss_sums

    def _gather(self, gradients: Sequence[Tensor]) -> None:
        sizes = [gradient.numel() for gradient in gradients]
        if self._own.numel() != sum(sizes):
            self._own = torch.empty(sum(sizes))
        for gradient, values in zip(gradients, self._own.split(sizes), strict=True):
            values.copy_(gradient.detach().reshape(-1))


def _sum(values: Tensor, peers: Collectives) -> Tensor:
    count, share = values.numel(), -(-values.numel() // peers.size)
    padded = values.new_zeros(share * peers.size)
    padded[:count] = values
    received = peers.all_to_all(padded).view(peers.size, share)
    total = received[0].clone()
    for each in received[1:]:
        total += each
    return torch.cat(peers.all_gather(total))[:count]
