"""Before the model is built: every rank talks to every rank it will talk to, and one that does not answer is named.

Without this a host with a broken network card shows as a hang in the first step, and after half an hour as a timeout
on every other host. Each rank leaves notes in the store of the meeting: it has come, it has passed a check, it has
given up. A rank that waits for one that waits for a third is not to blame: who has not even given up when the others
have is the one to look at. So that they give up together, they begin together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.cli import guarded, leave
from headrace.errors import TrainingError
from pipeline.launch import Meeting
from pipeline.launch.group import UnreachableError, ask
from pipeline.parallel.mesh import Mesh

_ELEMENTS = 1 << 15
"""256 KiB of int64: more than one network packet, and less than a millisecond on any network."""
_ALL = "all ranks"
_SETTLE_S = 3.0
"""Time in which ranks that give up together have all said so."""


def preflight(meeting: Meeting, make_mesh: Callable[[], Mesh], *, device: torch.device) -> tuple[Mesh, str]:
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
    _begin(meeting, "before process groups were made")
    with _deadline(meeting, "while process groups were made"):
        mesh = make_mesh()
    _begin(meeting, "before the first all-reduce")
    world = dist.group.WORLD
    assert world is not None
    used = {axis: group for axis, group in _groups(mesh).items() if group is not None}
    # the first all-reduce of a group makes its connections, which is not what the figure is to say
    for axis, group in [*used.items(), (_ALL, world)]:
        # nccl connects inside the call, before its own timeout counts
        watched = device.type == "cuda"
        where = f"in the all-reduce over {axis}"
        with _deadline(meeting, where, passed=f"passed/{axis}", spare_s=_SETTLE_S) if watched else nullcontext():
            _check(meeting, axis, group, device)
    started = time.perf_counter()
    for group in [*used.values(), world]:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    milliseconds = (time.perf_counter() - started) * 1000
    axes = "".join(f"{axis} {group.size()}, " for axis, group in used.items())
    return mesh, f"preflight: {axes}all {meeting.world_size} ranks answer ({milliseconds:.1f} ms)"


def _groups(mesh: Mesh) -> dict[str, dist.ProcessGroup | None]:
    data = "data" if mesh.size("cp") > 1 else "dp"
    return {"pp": mesh.group("pp"), data: mesh.group("data"), "cp": mesh.group("cp"), "tp": mesh.group("tp")}


def _begin(meeting: Meeting, when: str) -> None:
    """Waits in the store until all ranks are here."""

    def arrive() -> bool:
        meeting.store.set(f"{when}/{meeting.rank}", "1")
        if meeting.store.add(when, 1) == meeting.world_size:
            meeting.store.set(f"all {when}", "1")
        meeting.store.wait([f"all {when}"], timedelta(seconds=meeting.timeout_s))
        return True

    if not ask(arrive, otherwise=False, patience_s=meeting.timeout_s + 1.0):
        absent = meeting.missing(when, range(meeting.world_size))
        raise _silence(meeting, absent, when, "the others wait for it", seconds=meeting.timeout_s)


@contextmanager
def _deadline(meeting: Meeting, when: str, *, passed: str | None = None, spare_s: float = 0.0) -> Iterator[None]:
    """Ends this process when it is still in here after the timeout: torch's waits for a stopped store have no end."""
    limit_s = meeting.timeout_s + spare_s
    passed = passed or when

    def give_up() -> int:
        raise _give_up(meeting, passed, range(meeting.world_size), when, "the others wait for it", seconds=limit_s)

    watch = threading.Timer(limit_s, lambda: leave(guarded(give_up)))
    watch.daemon = True
    watch.start()
    try:
        yield
        meeting.note(f"{passed}/{meeting.rank}")
    finally:
        watch.cancel()


def _check(meeting: Meeting, axis: str, group: dist.ProcessGroup, device: torch.device) -> None:
    ranks = dist.get_process_group_ranks(group)
    values = torch.full((_ELEMENTS,), meeting.rank + 1, device=device)
    started = time.monotonic()
    try:
        _all_reduce(values, group, meeting.timeout_s)
    except RuntimeError as error:
        said, seconds = _reason(error), time.monotonic() - started
        where = f"in the all-reduce over {axis} ({_listed(ranks)})"
        raise _give_up(meeting, f"passed/{axis}", ranks, where, said, seconds=seconds) from None
    expected = sum(ranks) + len(ranks)
    wrong = values[values != expected]
    if len(wrong):
        raise TrainingError(
            f"the all-reduce over {axis} ({_listed(ranks)}) is wrong: {len(wrong)} of {_ELEMENTS} sums, such as"
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


def _give_up(
    meeting: Meeting, passed: str, ranks: Sequence[int], where: str, said: str, *, seconds: float
) -> UnreachableError:
    """Finds who has neither left the note `passed` nor given up, once all who wait for it have given up."""
    meeting.note(f"gave-up/{meeting.rank}")
    deadline = time.monotonic() + _SETTLE_S
    silent = _silent(meeting, passed, ranks)
    while silent and time.monotonic() < deadline:
        time.sleep(0.1)
        silent = _silent(meeting, passed, ranks)
    # all of this group have given up: they wait for a rank of another one
    silent = silent or _silent(meeting, f"passed/{_ALL}", range(meeting.world_size))
    return _silence(meeting, silent, where, said, seconds=seconds)


def _silent(meeting: Meeting, passed: str, ranks: Iterable[int]) -> list[int]:
    not_passed = meeting.missing(passed, ranks)
    return meeting.missing("gave-up", not_passed) if not_passed else []


def _silence(meeting: Meeting, silent: list[int], where: str, said: str, *, seconds: float) -> UnreachableError:
    if silent:
        text = f"{meeting.where(silent)} did not answer {where} within {seconds:.1f} s\n  why: {said}\n"
        text += "  try: look at that host and at the rank's own error; start without it, or raise launch.timeout"
    else:
        text = f"all ranks are there, but did not reach each other {where}: {said}\n"
        text += "  try: let GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that the hosts share"
    if meeting.rank == 0:
        time.sleep(_SETTLE_S + 1.0)  # the others are reading their notes in this process
    return UnreachableError(text)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (", ..." if len(ranks) > 8 else "")
