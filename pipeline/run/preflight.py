"""The pre-flight check: all-reduces over every process group before the model is built; names a rank that is missing.

Without this check a host with a broken network card causes a hang in the first step, and after half an hour a timeout
on every other host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from foundation.errors import TrainingError
from pipeline.engines.parallel.mesh import Mesh
from pipeline.runtime.launch import Rendezvous
from pipeline.runtime.launch.missing_ranks import SETTLE_S, barrier, deadline, give_up, missing_ranks, unreachable
from pipeline.runtime.launch.rendezvous import format_ranks

_ELEMENTS = 1 << 15
"""Number of elements of an all-reduce: 256 KiB of int64, larger than a packet, under a millisecond on any network."""
_ALL = "all ranks"


def preflight(
    rendezvous: Rendezvous,
    make_mesh: Callable[[], Mesh],
    *,
    device: torch.device,
    make_more: Callable[[Mesh], Mapping[str, dist.ProcessGroup | None]] = lambda _mesh: {},
) -> tuple[Mesh, str]:
    """Makes the process groups, then checks the result of an all-reduce over every axis and over all ranks.

    Args:
        rendezvous: the rendezvous of two or more ranks, from `process_group`.
        make_mesh: makes the process groups of this rank.
        device: this rank's device.
        make_more: makes further groups to check, by names that are the same on all ranks; None for a group that this
            rank is not in.

    Returns:
        The mesh, and one line for people: the size of each axis, and the duration of the all-reduces.

    Raises:
        UnreachableError: a rank did not take part within `launch.timeout`; the message names it and its host.
        TrainingError: an all-reduce over an axis gives a wrong sum.
    """
    barrier(rendezvous, "before process groups were made")
    with deadline(rendezvous, "while process groups were made"):
        mesh = make_mesh()
        more = make_more(mesh)
    barrier(rendezvous, "before the first all-reduce")
    world = dist.group.WORLD
    assert world is not None
    groups = {**mesh.groups(), **more}
    # a group's first all-reduce opens its connections, and is left out of the printed time
    for axis, group in [*groups.items(), (_ALL, world)]:
        if group is None:
            rendezvous.mark(f"passed/{axis}")
            continue
        # nccl connects inside the call, before its own timeout counts
        watched = device.type == "cuda"
        where = f"in the all-reduce over {axis}"
        with deadline(rendezvous, where, passed_flag=f"passed/{axis}", extra_s=SETTLE_S) if watched else nullcontext():
            _check(rendezvous, axis, group, device)
    used = {axis: group for axis, group in groups.items() if group is not None}
    with deadline(rendezvous, "in the all-reduces that are timed"):
        milliseconds = _timed([*used.values(), world], device)
    axes = "".join(f"{axis} {group.size()}, " for axis, group in used.items())
    return mesh, f"preflight: {axes}all {rendezvous.world_size} ranks answer ({milliseconds:.1f} ms)"


def _timed(groups: Iterable[dist.ProcessGroup], device: torch.device) -> float:
    """Times one all-reduce over each group; returns the sum in milliseconds."""
    started = time.perf_counter()
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1000


def _check(rendezvous: Rendezvous, axis: str, group: dist.ProcessGroup, device: torch.device) -> None:
    ranks = dist.get_process_group_ranks(group)
    values = torch.full((_ELEMENTS,), rendezvous.rank + 1, device=device)
    started = time.monotonic()
    try:
        _all_reduce(values, group, rendezvous.timeout_s)
    except RuntimeError as error:
        reason, seconds = _reason(error), time.monotonic() - started
        where = f"in the all-reduce over {axis} ({format_ranks(ranks)})"
        missing = give_up(rendezvous, f"passed/{axis}", ranks)
        # every rank of this group has given up, so the cause is a rank of another group
        missing = missing or missing_ranks(rendezvous, f"passed/{_ALL}", rendezvous.ranks)
        raise unreachable(rendezvous, missing, where, reason, seconds=seconds) from None
    expected = sum(ranks) + len(ranks)
    wrong = values[values != expected]
    if len(wrong):
        raise TrainingError(
            f"the all-reduce over {axis} ({format_ranks(ranks)}) is wrong: {len(wrong)} of {_ELEMENTS} sums, such as"
            f" {int(wrong[0])} where {expected} is right\n"
            f"  try: {rendezvous.describe(ranks)}: look for hardware that corrupts data, and for ranks of another run"
        )
    rendezvous.mark(f"passed/{axis}")


def _reason(error: RuntimeError) -> str:
    """Returns the line of a backend's error that names the cause: gloo's first, NCCL's last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[-1] if "NCCL" in lines[0] else lines[0]


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    options = dist.AllreduceOptions()
    if values.device.type == "cpu":
        # gloo gets its own deadline to end its thread; NCCL's would end the process before it can report the error
        options.timeout = timeout
    group.allreduce([values], options).wait(timeout)
    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)
