"""Local launcher, `--nproc N`, and in a pod of Kubeflow's Trainer: starts and supervises ranks on this machine.

torchrun does this too, and may be used instead. But torch's `SubprocessContext`, on which it is built, lets the other
ranks live for up to 30 s after a failure, prints the errors of all ranks interleaved or none, and leaves orphans when
it is killed. It also needs torch in this process, which takes only 20 MB here.

Rank 0 writes to the terminal. The output of the other ranks is kept in files, and so are the errors of all ranks
(`foundation.cli.guarded`): when one fails, the others often fail after it, and only the first error is the cause. When
a rank is lost, the watchdog's report is in one of these files, too (`pipeline/runtime/faults`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from foundation.errors import EXIT_FOLLOWED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_REQUEUE
from pipeline.runtime.launch.environment import POD
from pipeline.runtime.launch.host_memory import HOST_MEMORY, out_of_memory_kills
from pipeline.runtime.launch.pod import PodPlace
from pipeline.runtime.launch.rank_process import RankProcess, start_rank, terminate
from pipeline.runtime.launch.rendezvous import format_ranks

_POLL_S = 0.05
OWN_ERROR_S = 60.0
"""Seconds that a rank with an error of its own has for printing it, before its watchdog ends it."""
_SETTLE_S = 1.0
"""Seconds after the first failure in which other failures are collected, to tell the cause from its consequences."""
_GRACE_S = 5.0
"""Seconds beyond `OWN_ERROR_S` for a rank with its own error to clean up."""
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def supervise_pod(command: Sequence[str], place: PodPlace) -> int:
    """Supervises the ranks of one of several hosts (`supervise`), without knowledge of the other hosts' ranks."""
    return _run(command, place, {POD: "1"})


def supervise(command: Sequence[str], *, processes: int) -> int:
    """Runs a command as `processes` ranks on this machine until all have finished or one fails.

    Signals (Ctrl-C, SIGTERM, ...) are forwarded to every rank; a second Ctrl-C ends all.

    Args:
        command: command line of every rank.
        processes: number of ranks.

    Returns:
        0, or the exit code of the rank that failed first; 128 + n if signal n ended that rank; `EXIT_LOST` if the other
        ranks' watchdog has reported a lost rank; `EXIT_FOLLOWED` if the failed rank does not exit.
    """
    with _reserved_port() as port:
        return _run(command, PodPlace(0, processes, processes, "127.0.0.1", port), {"HEADRACE_NPROC": str(processes)})


def _run(command: Sequence[str], place: PodPlace, marker: dict[str, str]) -> int:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-")))
        before = out_of_memory_kills()
        ranks: list[RankProcess] = []
        stack.callback(terminate, ranks, signal.SIGTERM)
        ranks.extend(_start(command, number, place, folder, marker) for number in range(place.processes))
        stack.enter_context(_forwarding_signals(ranks))
        try:
            failures = _wait_through_interrupt(ranks)
        except KeyboardInterrupt:
            terminate(ranks, signal.SIGINT)
            return EXIT_INTERRUPTED
        if not failures:
            return 0
        own = [rank for rank in failures if rank.process.returncode not in (EXIT_LOST, EXIT_FOLLOWED)]
        if _any_exited_with(EXIT_LOST, failures) and all(rank.process.returncode < 0 for rank in own):
            return _report_loss(ranks, own, oom=out_of_memory_kills() > before)
        if not own:
            return _report_no_cause(ranks, place)
        terminate(ranks, signal.SIGTERM)
        # ranks that only lost their link to the failed rank exit with `EXIT_LOST`
        return _report_failure(own[0], place.world_size, oom=out_of_memory_kills() > before)


def _start(
    command: Sequence[str], local_rank: int, place: PodPlace, folder: Path, marker: dict[str, str]
) -> RankProcess:
    threads, rank = max(1, (os.cpu_count() or 1) // place.processes), place.first + local_rank
    environ = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **marker,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    output = None if local_rank == 0 else folder / f"output-{rank}"
    return start_rank(command, rank, environ=environ, output=output, error=folder / f"error-{rank}")


def _wait(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    """Waits until all exit or one fails, then `_SETTLE_S` longer. Returns the failed ranks, in order.

    Ranks that exit because of another rank's error (`EXIT_FOLLOWED`) exit before that rank, which may have much to
    close. A pod's ranks that were asked to stop (`EXIT_REQUEUE`) exit before rank 0.
    """
    failures: list[RankProcess] = []
    deadline = cause_deadline = float("inf")
    while time.monotonic() < min(deadline, cause_deadline) and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
        failures += [rank for rank in ranks if rank.failed and rank not in failures]
        if _any_exited_with(EXIT_FOLLOWED, failures) or _any_exited_with(EXIT_REQUEUE, failures):
            cause_deadline = min(cause_deadline, time.monotonic() + OWN_ERROR_S + _GRACE_S)
        if any(rank.process.returncode not in (EXIT_FOLLOWED, EXIT_REQUEUE) for rank in failures):
            deadline = min(deadline, time.monotonic() + _SETTLE_S)
    return failures + [rank for rank in ranks if rank.failed and rank not in failures]


def _any_exited_with(code: int, ranks: Sequence[RankProcess]) -> bool:
    return any(rank.process.returncode == code for rank in ranks)


def _wait_through_interrupt(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    """Waits like `_wait`; forwards the first Ctrl-C, at which the run saves a checkpoint, and raises the second."""
    try:
        return _wait(ranks)
    except KeyboardInterrupt:
        for rank in ranks:
            rank.send(signal.SIGINT)
        return _wait(ranks)


def _report_loss(ranks: Sequence[RankProcess], dead: Sequence[RankProcess], *, oom: bool) -> int:
    """Prints the watchdog's report, which names the lost rank, and the signals that ended ranks, known only here."""
    ended = [f"  rank {rank.number} was ended by {_signal(rank, oom=oom)}" for rank in dead]
    terminate(ranks, signal.SIGTERM)
    reports = [rank.error.read_text().rstrip() for rank in ranks if rank.error.exists()]
    print("\n".join([*reports[:1], *ended]), file=sys.stderr, flush=True)
    return EXIT_LOST


def _report_no_cause(ranks: Sequence[RankProcess], place: PodPlace) -> int:
    """Reports that all exited ranks followed the error of a rank that has not exited, or is on another host."""
    left = [rank.number for rank in ranks if rank.process.poll() is None]
    terminate(ranks, signal.SIGTERM)
    if not left and place.world_size > place.processes:
        print(
            "error: a rank of another pod has failed: its error is in the log of that pod", file=sys.stderr, flush=True
        )
        return EXIT_FOLLOWED
    waited = f"{format_ranks(left)} of {len(ranks)} did not exit within {OWN_ERROR_S + _GRACE_S:g} s"
    print(f"error: a rank has failed without printing its error; {waited}", file=sys.stderr, flush=True)
    return EXIT_FOLLOWED


def _report_failure(cause: RankProcess, processes: int, *, oom: bool) -> int:
    code, text = cause.process.returncode, cause.error_text()
    if code < 0:
        print(f"error: rank {cause.number} of {processes} was ended by {_signal(cause, oom=oom)}", file=sys.stderr)
    elif cause.number > 0:
        print(f"error: rank {cause.number} of {processes} failed with exit code {code}:", file=sys.stderr)
    if text:
        print(text, file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _signal(rank: RankProcess, *, oom: bool) -> str:
    """Names the signal that ended a rank; adds the cause of a SIGKILL if the kernel was short of memory meanwhile."""
    number = signal.Signals(-rank.process.returncode)
    return f"{number.name}: {HOST_MEMORY}" if oom and number is signal.SIGKILL else number.name


@contextmanager
def _forwarding_signals(ranks: Sequence[RankProcess]) -> Iterator[None]:
    def forward(number: int, _frame: object) -> None:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Binds a free port to keep it from other processes; rank 0 can still listen on it: both set SO_REUSEADDR."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
