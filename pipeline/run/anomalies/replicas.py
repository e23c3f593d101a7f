"""Replica check against silent data corruption: compares replicated weights across ranks, bit for bit.

Each rank reduces a parameter's bits to a weighted 64-bit sum (fingerprint); the minimum and maximum over the ranks of a
replica group are compared. The weights are odd and depend on the position, so one flipped bit always changes the sum.
The sum is of integers, so the order of addition does not matter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.errors import TrainingError
from pipeline.engines.base import Replica

_CHUNK = 1 << 22
"""Number of elements summed at a time: 64 MiB of integers."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D
"""Knuth's multiplier for linear congruential generators of 64 bits (MMIX): odd, with irregular bits."""


@torch.no_grad()
def fingerprint(values: Tensor) -> Tensor:
    """Computes a position-dependent weighted sum of a tensor's bits: int64 scalar."""
    flat = values.detach().contiguous().view(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        position = torch.arange(start, start + part.numel(), dtype=torch.int64, device=flat.device)
        weight = (position * _ODD).bitwise_left_shift_(1).bitwise_or_(1)
        total += (part * weight).sum()  # modulo 2^64
    return total


def check_replicas(replicas: Iterable[Replica], *, step: int) -> None:
    """Compares all replicas. Collective.

    Args:
        replicas: this rank's replicas, in the same order on all ranks of a group.
        step: number of the step, for the message.

    Raises:
        TrainingError: some replicas differ. All ranks raise it, with the parameters and the ranks in the minority.
    """
    grouped: dict[dist.ProcessGroup, list[Replica]] = defaultdict(list)
    for replica in replicas:
        grouped[replica.group].append(replica)
    own = [line for group, each in grouped.items() for line in _differing(group, each)]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    differences: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(differences, own)
    found = sorted({line for lines in differences for line in lines})
    if found:
        listed = "\n".join(f"    {line}" for line in found[:8]) + ("\n    ..." if len(found) > 8 else "")
        raise TrainingError(
            f"step {step}: replicas of the same weights differ between ranks:\n{listed}\n"
            f"  try: start again, from a checkpoint before that (a resume takes the newest); if it is the same rank"
            f" again, remove its machine from the job"
        )


def _differing(group: dist.ProcessGroup, replicas: Sequence[Replica]) -> list[str]:
    sums = torch.stack([fingerprint(replica.values) for replica in replicas])
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    differing = (lowest != highest).nonzero().flatten()
    if not differing.numel():
        return []
    gathered = [torch.empty_like(sums[differing]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, sums[differing], group=group)
    ranks = dist.get_process_group_ranks(group)
    table = torch.stack(gathered).tolist()
    return [
        f"{replicas[number].name}: {_minority(ranks, [row[column] for row in table])}"
        for column, number in enumerate(differing.tolist())
    ]


def _minority(ranks: Sequence[int], sums: Sequence[int]) -> str:
    """Names the ranks that differ from the majority; all ranks where there is no majority."""
    ((common, most), *rest) = Counter(sums).most_common()
    if rest and rest[0][1] == most:
        return f"ranks {', '.join(map(str, ranks))} do not agree"
    minority = [rank for rank, each in zip(ranks, sums, strict=True) if each != common]
    name = "rank" if len(minority) == 1 else "ranks"
    return f"{name} {', '.join(map(str, minority))} of {', '.join(map(str, ranks))}"
