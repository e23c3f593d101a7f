"""Whether ranks that should hold the same weights do, bit for bit.

Each parameter's bits are summed with weights into 64 bits, per rank; the least and the greatest sum over the ranks that
should agree are compared. The weights are odd and depend on the place, so that one flipped bit always changes the sum,
and the sum is of integers, so that the order of addition does not matter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.base.errors import TrainingError
from pipeline.engines.base import Replica

_AT_ONCE = 1 << 22
"""Elements summed at a time: 64 MiB of whole numbers."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D
"""Knuth's multiplier for linear congruential generators of 64 bits (MMIX): odd, and without pattern."""


@torch.no_grad()
def fingerprint(values: Tensor) -> Tensor:
    """A number, int64, of the bits of a tensor and their places."""
    flat = values.detach().contiguous().view(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE].long()
        place = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        weight = (place * _ODD).bitwise_left_shift_(1).bitwise_or_(1)
        total += (part * weight).sum()  # modulo 2^64
    return total


def check_replicas(replicas: Iterable[Replica], *, step: int) -> None:
    """Compares all replicas. Collective: every rank brings its own.

    Args:
        replicas: of this rank, in the same order on all ranks of a group.
        step: for the message.

    Raises:
        TrainingError: some differ; on all ranks, with the parameter and the ranks that are in the minority.
    """
    grouped: dict[dist.ProcessGroup, list[Replica]] = defaultdict(list)
    for replica in replicas:
        grouped[replica.group].append(replica)
    own = [line for group, each in grouped.items() for line in _differing(group, each)]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    said: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(said, own)
    found = sorted({line for lines in said for line in lines})
    if found:
        listed = "\n".join(f"    {line}" for line in found[:8]) + ("\n    ..." if len(found) > 8 else "")
        raise TrainingError(
            f"step {step}: ranks that should hold the same weights do not:\n{listed}\n"
            f"  try: start again, from a checkpoint before that (run.resume takes the newest); if it is the same rank"
            f" again, take its machine out"
        )


def _differing(group: dist.ProcessGroup, replicas: Sequence[Replica]) -> list[str]:
    sums = torch.stack([fingerprint(replica.values) for replica in replicas])
    least, greatest = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
    bad = (least != greatest).nonzero().flatten()
    if not bad.numel():
        return []
    everyone = [torch.empty_like(sums[bad]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, sums[bad], group=group)
    ranks = dist.get_process_group_ranks(group)
    table = torch.stack(everyone).tolist()
    return [
        f"{replicas[number].name}: {_minority(ranks, [row[column] for row in table])}"
        for column, number in enumerate(bad.tolist())
    ]


def _minority(ranks: Sequence[int], sums: Sequence[int]) -> str:
    """Who differs from most; of whom no most agree, it cannot be said."""
    ((common, most), *rest) = Counter(sums).most_common()
    if rest and rest[0][1] == most:
        return f"ranks {', '.join(map(str, ranks))} do not agree"
    odd = [rank for rank, each in zip(ranks, sums, strict=True) if each != common]
    name = "rank" if len(odd) == 1 else "ranks"
    return f"{name} {', '.join(map(str, odd))} of {', '.join(map(str, ranks))}"
