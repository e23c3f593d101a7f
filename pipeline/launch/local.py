"""`--nproc N`: N processes of this machine, started and watched over.

torchrun does this too, and may be used instead. Torch's `SubprocessContext` underneath it lets the others live for up
to 30 s after a failure, shows the errors of all ranks mixed or of none, and leaves orphans when it is killed itself;
and it needs torch in this process, which here waits in 20 MB.

Rank 0 writes to the terminal. What the others write is kept in files, and so are the errors of all ranks
(`headrace.base.cli.guarded`): when one fails, the others often fail after it, and only the first error tells anything.
When one is lost, the watchdog's report lies in one of those files too (`pipeline/faults`).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.base.cli import ERROR_FILE
from headrace.base.errors import EXIT_FOLLOWED, EXIT_INTERRUPTED, EXIT_LOST
from headrace.base.processes import STOPPED, state_of
from pipeline.launch.arrivals import listed

_POLL_S = 0.05
INSIST_S = 60.0
"""Seconds that a rank with an error of its own has for telling it, before its watchdog ends it."""
_SETTLE_S = 1.0
"""Time in which ranks that fail together are seen to fail, so that the cause can be told from its consequences."""
_GRACE_S = 5.0
"""Time between asking a process to end and ending it."""
_TAIL_LINES = 20
CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process|peer|did not answer", re.IGNORECASE
)
"""What a rank says when another one has gone."""
_HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: Path
    error: Path

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def said(self) -> str:
        """Its error, or the end of what it printed where it had no time to tell."""
        if self.error.exists():
            return self.error.read_text().rstrip()
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])


def supervise(command: Sequence[str], *, processes: int) -> int:
    """Runs a command as so many ranks on this machine until all are done or one fails.

    Signals that ask for something (Ctrl-C, SIGTERM, ...) are handed on to every rank; a second Ctrl-C ends all.

    Args:
        command: what every rank runs.
        processes: number of ranks.

    Returns:
        0, or the exit code of the rank that failed first; 128 + n when it was ended by signal n; `EXIT_LOST` when the
        other ranks have found that one is lost, and `EXIT_FOLLOWED` when one has failed and does not come to its end.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-")))
        port = stack.enter_context(_held_port())
        ranks: list[_Rank] = []
        stack.callback(_end, ranks, signal.SIGTERM)
        ranks.extend(_start(command, number, processes, folder, port) for number in range(processes))
        stack.enter_context(_handing_on(ranks))
        try:
            failures = _watch_through_interrupt(ranks)
        except KeyboardInterrupt:
            _end(ranks, signal.SIGINT)
            return EXIT_INTERRUPTED
        if not failures:
            return 0
        own = [rank for rank in failures if rank.process.returncode not in (EXIT_LOST, EXIT_FOLLOWED)]
        if _any_left_with(EXIT_LOST, failures) and all(rank.process.returncode < 0 for rank in own):
            return _tell_loss(ranks, own)
        if not own:
            return _tell_nothing(ranks)
        cause = next((rank for rank in own if not CONSEQUENCE.search(_last_lines(rank))), own[0])
        _end(ranks, signal.SIGTERM)
        return _tell(cause, processes)


def _start(command: Sequence[str], number: int, processes: int, folder: Path, port: int) -> _Rank:
    output, error = folder / f"output-{number}", folder / f"error-{number}"
    threads = max(1, (os.cpu_count() or 1) // processes)
    environ = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "HEADRACE_NPROC": str(processes),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        ERROR_FILE: str(error),
    }
    with ExitStack() as stack:
        kept = None if number == 0 else stack.enter_context(output.open("wb"))
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=kept,
            stderr=kept and subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=_die_with_parent,  # noqa: PLW1509  there are no threads here
        )
    return _Rank(number, process, output, error)


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent is gone, however the parent ended."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _watch(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Waits for the end of all, or for a failure; then a moment longer. Returns those that failed, first one first.

    Whoever has followed another rank's error is done before that rank, which may have much to close.
    """
    failures: list[_Rank] = []
    deadline = waits_for_cause = float("inf")
    while time.monotonic() < min(deadline, waits_for_cause) and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
        failures += [rank for rank in ranks if rank.failed and rank not in failures]
        if _any_left_with(EXIT_FOLLOWED, failures):
            waits_for_cause = min(waits_for_cause, time.monotonic() + INSIST_S + _GRACE_S)
        if any(rank.process.returncode != EXIT_FOLLOWED for rank in failures):
            deadline = min(deadline, time.monotonic() + _SETTLE_S)
    return failures + [rank for rank in ranks if rank.failed and rank not in failures]


def _any_left_with(code: int, ranks: Sequence[_Rank]) -> bool:
    return any(rank.process.returncode == code for rank in ranks)


def _watch_through_interrupt(ranks: Sequence[_Rank]) -> list[_Rank]:
    """As `_watch`. The first Ctrl-C is handed on, for a run that saves itself before it ends; the second is raised."""
    try:
        return _watch(ranks)
    except KeyboardInterrupt:
        for rank in ranks:
            _send(rank, signal.SIGINT)
        return _watch(ranks)


def _end(ranks: Sequence[_Rank], how: signal.Signals) -> None:
    """Ends the processes that are left, and what they started: asks first, where they can act; then insists."""
    deadline = time.monotonic() + _GRACE_S
    for rank in ranks:
        _send(rank, signal.SIGKILL if state_of(rank.process.pid)[0] == STOPPED else how)
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
    for rank in ranks:
        _send(rank, signal.SIGKILL)
        rank.process.wait()


def _send(rank: _Rank, how: signal.Signals) -> None:
    if rank.process.poll() is None:
        os.killpg(rank.process.pid, how)


def _tell_loss(ranks: Sequence[_Rank], dead: Sequence[_Rank]) -> int:
    """Shows the watchdog's report, which names whoever was lost, and what only their parent knows: how they ended."""
    ended = [f"  rank {rank.number} was ended by {signal.Signals(-rank.process.returncode).name}" for rank in dead]
    _end(ranks, signal.SIGTERM)
    reports = [rank.error.read_text().rstrip() for rank in ranks if rank.error.exists()]
    print("\n".join([*reports[:1], *ended]), file=sys.stderr, flush=True)
    return EXIT_LOST


def _tell_nothing(ranks: Sequence[_Rank]) -> int:
    """All that have ended have followed an error, and whose it is has not come to its end."""
    left = listed(rank.number for rank in ranks if rank.process.poll() is None)
    _end(ranks, signal.SIGTERM)
    waited = f"{left} of {len(ranks)} did not end within {INSIST_S + _GRACE_S:g} s"
    print(f"error: a rank has failed without telling why; {waited}", file=sys.stderr, flush=True)
    return EXIT_FOLLOWED


def _tell(cause: _Rank, processes: int) -> int:
    code, said = cause.process.returncode, cause.said()
    if code < 0:
        print(f"error: rank {cause.number} of {processes} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    elif cause.number > 0:
        print(f"error: rank {cause.number} of {processes} failed with exit code {code}:", file=sys.stderr)
    if said:
        print(said, file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _last_lines(rank: _Rank) -> str:
    return "\n".join(rank.said().splitlines()[-3:])


@contextmanager
def _handing_on(ranks: Sequence[_Rank]) -> Iterator[None]:
    def hand_on(number: int, _frame: object) -> None:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    before = {which: signal.signal(which, hand_on) for which in _HANDED_ON}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


@contextmanager
def _held_port() -> Iterator[int]:
    """A free port that Linux gives to nobody else; rank 0 may still listen on it, as both allow its reuse."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
