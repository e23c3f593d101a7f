"""In each rank: says where the main thread is, and ends the process when another rank is lost.

    with watched(launch, meeting, config=..., run_dir=...) as watchdog:
        with watchdog:                       # tells the others of an error that leaves this block
            watchdog.at("training", step)

A thread (`monitor.py`) sends signs of life to the hub beside rank 0 (`hub.py`), which judges (`verdict.py`). A rank
that waits in a collective can do nothing itself; its thread ends it with `EXIT_LOST`.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.base.errors import EXIT_INTERRUPTED, EXIT_LOST, HeadraceError
from pipeline.config.schema import WatchdogSection
from pipeline.faults.diagnosis import SETTLE_S, Diagnosis, RankStatus
from pipeline.faults.heartbeat_messages import Lines
from pipeline.faults.monitor import Address, Monitor, RankPosition, hello
from pipeline.faults.process_exit import leave_now
from pipeline.faults.rendezvous import (
    connect,
    find_heartbeat_server,
    heartbeat_interval,
    heartbeat_timeout,
    start_heartbeat_server,
)
from pipeline.faults.report import claim, describe_fault, publish, row
from pipeline.launch import Launch, Rendezvous
from pipeline.launch.arrivals import ask
from pipeline.launch.local import CONSEQUENCE
from pipeline.launch.missing_ranks import arrive

_SKEW_S = 5.0
"""Patience at least with ranks that arrive at the same place together."""


class Watchdog:
    """What the main thread tells. As a context manager it tells of errors."""

    def __init__(self) -> None:
        self._place, self._signs = RankPosition(), 0
        self._monitor: Monitor | None = None
        self._failed = False

    @property
    def place(self) -> RankPosition:
        """Where the main thread is."""
        return replace(self._place, ticks=self._place.ticks + self._signs)

    def at(self, phase: str, step: int | None = None) -> None:
        """Says where the main thread is. Takes about a microsecond; the same place again is a sign of progress.

        Args:
            phase: a few words that complete "in ...", the same on all ranks and in the same order.
            step: that is worked on; as before when None.
        """
        self._place = self._place.next(phase, step)

    def alive(self) -> None:
        """A sign of progress in the same place, from whatever thread: only some ranks may have one to give."""
        self._signs += 1

    def begin(self, monitor: Monitor) -> None:
        """From here on signs of life are sent."""
        self._monitor = monitor
        monitor.start()

    def wait_until_known(self, seconds: float) -> None:
        """Waits until the hub knows this rank, or is known not to be there."""
        if self._monitor is not None:
            self._monitor.connected.wait(seconds)

    def close(self) -> None:
        """Says goodbye; to be called before a process leaves by `os._exit`, or it would count as dead."""
        if self._monitor is not None:
            self._monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tells of an error that leaves the block."""
        if error is not None and not isinstance(error, SystemExit):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error, once. One that follows from another rank's end ends this process instead."""
        if self._monitor is None or self._failed:
            return
        self._failed = True
        consequence = follows(error)
        self._monitor.fail(_first_line(error), consequence=consequence, code=_code(error))
        if consequence:
            self._monitor.await_verdict(3 * SETTLE_S)


def follows(error: BaseException) -> bool:
    """Whether an error looks like what a rank sees when another one has gone."""
    names = ("DistBackendError", "DistNetworkError", "DistStoreError")
    return type(error).__name__ in names or CONSEQUENCE.search(str(error)) is not None


@contextmanager
def watched(
    launch: Launch, meeting: Rendezvous | None, *, config: WatchdogSection, run_dir: Path
) -> Iterator[Watchdog]:
    """Watches over this rank until the block ends. Whatever fails in setting it up is a warning.

    Args:
        launch: from `detect`.
        meeting: from `process_group`; None where there is none.
        config: the limits.
        run_dir: where faults are recorded.
    """
    watchdog = Watchdog()
    if config.enabled:
        _begin(watchdog, launch, meeting, config, run_dir)
    try:
        if meeting is not None:
            _arrive(watchdog, meeting)
        yield watchdog
    finally:
        watchdog.close()


def _arrive(watchdog: Watchdog, meeting: Rendezvous) -> None:
    """Waits until every rank is watched, or cannot be: of one that stops before that the hub would know nothing."""
    began = time.monotonic()
    watchdog.wait_until_known(meeting.timeout_s)
    left_s = meeting.timeout_s - (time.monotonic() - began)
    arrive(meeting, "at the watchdog's start", within_s=max(left_s, _SKEW_S))


def _begin(
    watchdog: Watchdog, launch: Launch, meeting: Rendezvous | None, config: WatchdogSection, run_dir: Path
) -> None:
    first, found = launch.rank == 0, list[Address]()
    try:
        if first:
            found.append(start_heartbeat_server(launch, meeting, config=config, run_dir=run_dir))
    except OSError as error:
        _warn(f"the watchdog could not be started ({error})")
        return

    def find() -> tuple[socket.socket, Lines] | None:
        address = found[0] if first else find_heartbeat_server(meeting) if meeting else None
        if address is None:
            return None
        found.append(address)
        return connect(address, hello(launch.rank), local=first)

    def lost(silence_s: float) -> None:
        if first:
            _warn("the watchdog's own process has ended")
        elif meeting is not None and not _answers(meeting):
            _lose_rank_zero(meeting, watchdog.place, silence_s, token=found[-1].token, run_dir=run_dir)

    beat_s, silent_s = heartbeat_interval(launch.world_size), heartbeat_timeout(config, launch.world_size)
    watchdog.begin(
        Monitor(launch.rank, place=lambda: watchdog.place, find=find, lost=lost, beat_s=beat_s, silent_s=silent_s)
    )


def _answers(meeting: Rendezvous) -> bool:
    """Whether the store does, which lives in rank 0 or in torchrun, which looks after rank 0 itself."""
    return ask(lambda: meeting.store.check(["watchdog"]), otherwise=False)


def _lose_rank_zero(meeting: Rendezvous, place: RankPosition, silence_s: float, *, token: str, run_dir: Path) -> None:
    """Rank 0's host is gone, and with it the hub: whoever is first to write it down tells it."""
    now = time.monotonic()
    record = RankStatus(0, meeting.first_host, 0, now - silence_s, now, step=place.step, phase=place.phase)
    verdict = Diagnosis("silent" if silence_s else "died", (0,), silence_s)
    records, size = {0: record}, meeting.world_size
    if claim(run_dir, row(verdict, records, world_size=size), token=token):
        publish(describe_fault(verdict, records, world_size=size))
    leave_now(EXIT_LOST)


def _warn(what: str) -> None:
    print(f"warning: {what}: the run goes on, but nobody will tell which rank dies or hangs", file=sys.stderr)


def _first_line(error: BaseException) -> str:
    said = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return said if isinstance(error, HeadraceError) else f"{type(error).__name__}: {said}"


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, HeadraceError) else 1
