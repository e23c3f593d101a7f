"""Watchdog of each rank: reports step and phase in heartbeats, and ends the process when another rank is lost.

    with run_watchdog(launch, rendezvous, config=..., run_dir=...) as watchdog:
        with watchdog:                       # an error that leaves this block is reported to the others
            watchdog.enter_phase("training", step)

A thread (`monitor.py`) sends heartbeats to the server beside rank 0 (`heartbeat_server.py`), which diagnoses dead and
hung ranks (`diagnosis.py`). A rank blocked in a collective cannot act itself; its thread exits with `EXIT_LOST`.
"""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from foundation.errors import EXIT_INTERRUPTED, EXIT_LOST, HeadraceError
from foundation.link_errors import is_link_error
from pipeline.config.sections.run import WatchdogSection
from pipeline.runtime.faults.diagnosis import SETTLE_S, Diagnosis, RankStatus
from pipeline.runtime.faults.end_processes import exit_now
from pipeline.runtime.faults.flight_recorder import dump, pending_collective
from pipeline.runtime.faults.heartbeat_connection import (
    connect,
    find_heartbeat_server,
    heartbeat_interval,
    heartbeat_timeout,
    start_heartbeat_server,
)
from pipeline.runtime.faults.heartbeat_messages import MessageDecoder
from pipeline.runtime.faults.monitor import Monitor, PendingCollective, RankPosition, ServerAddress, registration
from pipeline.runtime.faults.report import append_fault_once, describe_fault, fault_row, print_report, with_timeout
from pipeline.runtime.launch import Launch, Rendezvous
from pipeline.runtime.launch.missing_ranks import barrier
from pipeline.runtime.launch.rendezvous import store_call

_IDLE_S, _DUMP_S = 10.0, 3.0
"""Seconds without progress until a rank looks up its pending collective; seconds that a dump of collectives takes at
most."""
_MIN_BARRIER_S = 5.0
"""Shortest timeout, in seconds, for ranks that reach a barrier together."""


class Watchdog:
    """The main thread's interface to the watchdog. As a context manager it reports errors that leave the block."""

    def __init__(self) -> None:
        self._position, self._ticks = RankPosition(), 0
        self._monitor: Monitor | None = None
        self._error_reported = False

    @property
    def position(self) -> RankPosition:
        """Step and phase of the main thread, including the number of progress reports."""
        return replace(self._position, ticks=self._position.ticks + self._ticks)

    def enter_phase(self, phase: str, step: int | None = None) -> None:
        """Reports step and phase of the main thread. Takes about a microsecond; a repeated call reports progress.

        Args:
            phase: a few words that complete "in ..."; all ranks enter the same phases in the same order.
            step: the current step; unchanged when None.
        """
        self._position = self._position.moved_to(phase, step)

    def report_progress(self) -> None:
        """Reports progress within the current phase, from any thread; other ranks need not report the same."""
        self._ticks += 1

    def start(self, monitor: Monitor) -> None:
        """Starts to send heartbeats."""
        self._monitor = monitor
        monitor.start()

    def wait_until_registered(self, seconds: float) -> None:
        """Waits until the server knows this rank, or is known to be unreachable."""
        if self._monitor is not None:
            self._monitor.connected.wait(seconds)

    def close(self) -> None:
        """Signs off; call it before `os._exit`, or this rank counts as dead."""
        if self._monitor is not None:
            self._monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reports an error that leaves the block."""
        if error is not None and not isinstance(error, SystemExit):
            self.report_error(error)

    def report_error(self, error: BaseException) -> None:
        """Reports an error to the other ranks, once. After a secondary error the diagnosis ends the process."""
        if self._monitor is None or self._error_reported:
            return
        self._error_reported = True
        secondary = is_link_error(error)
        trace = "" if isinstance(error, HeadraceError) else "".join(traceback.format_exception(error))
        self._monitor.report_error(_first_line(error), secondary=secondary, exit_code=_exit_code(error), trace=trace)
        if secondary:
            self._monitor.await_diagnosis(3 * SETTLE_S)


@contextmanager
def run_watchdog(
    launch: Launch, rendezvous: Rendezvous | None, *, config: WatchdogSection, run_dir: Path
) -> Iterator[Watchdog]:
    """Runs the watchdog of this rank until the block ends. A failure to set it up is only a warning.

    Args:
        launch: from `detect`.
        rendezvous: from `process_group`; None where there is none.
        config: the timeouts.
        run_dir: directory in which faults are recorded.
    """
    watchdog = Watchdog()
    if config.enabled:
        _start(watchdog, launch, rendezvous, config, run_dir)
    try:
        if rendezvous is not None:
            _wait_for_all_ranks(watchdog, rendezvous)
        yield watchdog
    finally:
        watchdog.close()


def _wait_for_all_ranks(watchdog: Watchdog, rendezvous: Rendezvous) -> None:
    """Waits until every rank is registered or cannot be: the server would not notice an earlier end of a rank."""
    start = time.monotonic()
    watchdog.wait_until_registered(rendezvous.timeout_s)
    remaining_s = rendezvous.timeout_s - (time.monotonic() - start)
    barrier(rendezvous, "at the watchdog's start", timeout_s=max(remaining_s, _MIN_BARRIER_S))


def _start(
    watchdog: Watchdog, launch: Launch, rendezvous: Rendezvous | None, config: WatchdogSection, run_dir: Path
) -> None:
    is_rank_zero, server = launch.rank == 0, list[ServerAddress]()
    try:
        if is_rank_zero:
            server.append(start_heartbeat_server(launch, rendezvous, config=config, run_dir=run_dir))
    except OSError as error:
        _warn(f"the watchdog could not be started ({error})")
        return

    def connect_to_server() -> tuple[socket.socket, MessageDecoder] | None:
        address = server[0] if is_rank_zero else find_heartbeat_server(rendezvous) if rendezvous else None
        if address is None:
            return None
        server.append(address)
        return connect(address, registration(launch.rank), local=is_rank_zero)

    def on_server_lost(silence_s: float) -> None:
        if is_rank_zero:
            _warn("the heartbeat server has exited")
        elif rendezvous is not None and not _store_responds(rendezvous):
            token, master = server[-1].token, launch.master
            _report_rank_zero_lost(
                rendezvous, watchdog.position, silence_s, run_dir=run_dir, token=token, master=master
            )

    def dump_collectives() -> None:
        with_timeout(_DUMP_S, lambda: dump(run_dir, launch.rank), default=None)

    watchdog.start(
        Monitor(
            launch.rank,
            position=lambda: watchdog.position,
            connect=connect_to_server,
            on_server_lost=on_server_lost,
            interval_s=heartbeat_interval(launch.world_size),
            timeout_s=heartbeat_timeout(config, launch.world_size),
            collective=PendingCollective(pending_collective, idle_s=min(_IDLE_S, config.hang_timeout / 3)),
            on_hang=dump_collectives,
        )
    )


def _store_responds(rendezvous: Rendezvous) -> bool:
    """Tells whether the store responds; it lives in rank 0, or in torchrun, which monitors rank 0 itself."""
    return store_call(lambda: rendezvous.store.check(["watchdog"]), default=False)


def _report_rank_zero_lost(
    rendezvous: Rendezvous, position: RankPosition, silence_s: float, *, run_dir: Path, token: str, master: str
) -> None:
    """Reports that rank 0's host and the server are lost; only the first rank that records the fault prints it.

    No rank prints it where agents have ended rank 0 because another host does not answer them.
    """
    now = time.monotonic()
    status = RankStatus(0, rendezvous.rank_zero_host, 0, now - silence_s, now, step=position.step, phase=position.phase)
    diagnosis = Diagnosis("silent" if silence_s else "died", (0,), silence_s)
    statuses, world_size = {0: status}, rendezvous.world_size
    row = fault_row(diagnosis, statuses, world_size=world_size)
    if append_fault_once(run_dir, row, token=token, master=master):
        print_report(describe_fault(diagnosis, statuses, world_size=world_size))
    exit_now(EXIT_LOST)


def _warn(what: str) -> None:
    print(f"warning: {what}: the run goes on, but a rank that dies or hangs will not be reported", file=sys.stderr)


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return line if isinstance(error, HeadraceError) else f"{type(error).__name__}: {line}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, HeadraceError) else 1
