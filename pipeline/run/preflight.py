"""Before the model is built: every rank talks to every rank it will talk to, and one that does not answer is named.

Without this a host with a broken network card shows as a hang in the first step, and after half an hour as a timeout
on every other host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.base.errors import TrainingError
from pipeline.launch import Rendezvous
from pipeline.launch.arrivals import listed
from pipeline.launch.missing_ranks import SETTLE_S, arrive, blamed, deadline, silence, unheard
from pipeline.parallel.mesh import Mesh

_ELEMENTS = 1 << 15
"""256 KiB of int64: more than one network packet, and less than a millisecond on any network."""
_ALL = "all ranks"


def preflight(meeting: Rendezvous, make_mesh: Callable[[], Mesh], *, device: torch.device) -> tuple[Mesh, str]:
    """Makes the process groups; then an all-reduce over every axis and over all ranks, each with a checked result.

    Args:
        meeting: from `process_group`.
        make_mesh: makes the groups of this rank.
        device: of this rank.

    Returns:
        The mesh, and one line for a person: which axes answered, and how fast.

    Raises:
        UnreachableError: a rank did not answer within the meeting's timeout; names it and its host.
        TrainingError: the ranks of an axis answer, but their sum is wrong.
    """
    arrive(meeting, "before process groups were made")
    with deadline(meeting, "while process groups were made"):
        mesh = make_mesh()
    arrive(meeting, "before the first all-reduce")
    world = dist.group.WORLD
    assert world is not None
    used = {axis: group for axis, group in _groups(mesh).items() if group is not None}
    # the first all-reduce of a group makes its connections, which is not what the figure is to say
    for axis, group in [*used.items(), (_ALL, world)]:
        # nccl connects inside the call, before its own timeout counts
        watched = device.type == "cuda"
        where = f"in the all-reduce over {axis}"
        with deadline(meeting, where, passed=f"passed/{axis}", spare_s=SETTLE_S) if watched else nullcontext():
            _check(meeting, axis, group, device)
    with deadline(meeting, "in the all-reduces that are timed"):
        milliseconds = _timed([*used.values(), world], device)
    axes = "".join(f"{axis} {group.size()}, " for axis, group in used.items())
    return mesh, f"preflight: {axes}all {meeting.world_size} ranks answer ({milliseconds:.1f} ms)"


def _timed(groups: Iterable[dist.ProcessGroup], device: torch.device) -> float:
    """Milliseconds that one all-reduce over each group takes."""
    started = time.perf_counter()
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1000


def _groups(mesh: Mesh) -> dict[str, dist.ProcessGroup | None]:
    data = "data" if mesh.size("cp") > 1 else "dp"
    return {"pp": mesh.group("pp"), data: mesh.group("data"), "cp": mesh.group("cp"), "tp": mesh.group("tp")}


def _check(meeting: Rendezvous, axis: str, group: dist.ProcessGroup, device: torch.device) -> None:
    ranks = dist.get_process_group_ranks(group)
    values = torch.full((_ELEMENTS,), meeting.rank + 1, device=device)
    started = time.monotonic()
    try:
        _all_reduce(values, group, meeting.timeout_s)
    except RuntimeError as error:
        said, seconds = _reason(error), time.monotonic() - started
        where = f"in the all-reduce over {axis} ({listed(ranks)})"
        silent = blamed(meeting, f"passed/{axis}", ranks)
        # all of this group have given up: they wait for a rank of another one
        silent = silent or unheard(meeting, f"passed/{_ALL}", meeting.everyone)
        raise silence(meeting, silent, where, said, seconds=seconds) from None
    expected = sum(ranks) + len(ranks)
    wrong = values[values != expected]
    if len(wrong):
        raise TrainingError(
            f"the all-reduce over {axis} ({listed(ranks)}) is wrong: {len(wrong)} of {_ELEMENTS} sums, such as"
            f" {int(wrong[0])} where {expected} is right\n"
            f"  try: {meeting.where(ranks)}: look for hardware that corrupts data, and for ranks of another run"
        )
    meeting.note(f"passed/{axis}/{meeting.rank}")


def _reason(error: RuntimeError) -> str:
    """gloo says it in the first line, nccl in the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[-1] if "NCCL" in lines[0] else lines[0]


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    options = dist.AllreduceOptions()
    if values.device.type == "cpu":
        # gloo's own deadline, so that its thread ends too; nccl's would end the process before it can tell anything
        options.timeout = timeout
    group.allreduce([values], options).wait(timeout)
    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)
