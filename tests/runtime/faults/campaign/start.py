"""One start of a run: its processes, found by its directory, and its progress, from the journal."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.runtime.metrics.journal import NAME, read_rows
from tests.runtime.faults.campaign.layouts import TRAIN, Layout, command_of, environment
from tests.runtime.faults.campaign.warm_start import Warm, pids_of_ranks

POLL_S = 0.005
_OPENING = ("started", "resumed")


def processes_of(work: Path) -> list[psutil.Process]:
    """All processes with a directory in their command line or as their own: launcher, ranks, heartbeat server."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = any(str(work) in word for word in process.cmdline()) or process.cwd() == str(work)
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_all(work: Path) -> None:
    """Kills all processes of a directory, as a power cut would."""
    for process in processes_of(work):
        with suppress(psutil.Error):
            process.kill()


class Start:
    """A started run; its processes are identified by their working directory."""

    def __init__(self, work: Path, run_dir: Path, layout: Layout, launcher: str, number: int) -> None:
        self.work, self.run_dir, self.layout, self.launcher = work, run_dir, layout, launcher
        self.before = read_rows(run_dir)
        self.output_file = work / f"output-{number}"
        self._seen: tuple[float, int] = (0.0, -1)
        self._rows: list[dict[str, Any]] = self.before
        self.process = self._begin(command_of(launcher, layout, work / "c.json"))
        self.began = time.monotonic()

    def _begin(self, command: list[str]) -> subprocess.Popen[bytes] | Warm:
        env = environment(self.work)
        with self.output_file.open("wb") as output:
            if self.launcher == "warm":
                return Warm(command, work=self.work, env=env, output=self.output_file)
            none = subprocess.DEVNULL
            return subprocess.Popen(
                command, cwd=self.work, env=env, stdin=none, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        """Whether the launcher still runs; it may exit before its ranks."""
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """Output of the launcher and of all ranks that write to the terminal."""
        return self.output_file.read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        """The complete lines of the journal."""
        with suppress(FileNotFoundError):
            stat = (self.run_dir / NAME).stat()
            if (stat.st_mtime, stat.st_size) != self._seen:
                self._seen, self._rows = (stat.st_mtime, stat.st_size), read_rows(self.run_dir)
        return self._rows

    def resumed_after(self) -> int | None:
        """The step that this start has resumed from; None when it has not got that far."""
        opened = _openings(self.rows())
        if not opened:
            return None
        step = opened[-1]
        kept = [each for each in _openings(self.before) if each <= step]
        return step if len(opened) == len(kept) + 1 else None

    def done(self) -> int:
        resumed_after = self.resumed_after()
        return 0 if resumed_after is None else max([0, *(s for s in steps_of(self.rows()) if s > resumed_after)])

    def ranks(self) -> dict[int, psutil.Process]:
        if self.layout.processes == 1:
            return {0: psutil.Process(self.process.pid)} if self.alive else {}
        found = {}
        if self.launcher == "warm":
            alive = {process.pid: process for process in processes_of(self.work)}
            return {rank: alive[pid] for rank, pid in pids_of_ranks(self.work).items() if pid in alive}
        for process in processes_of(self.work):
            with suppress(psutil.Error, ValueError):
                rank = process.environ().get("RANK")
                if rank is not None and str(TRAIN) in process.cmdline():
                    found[int(rank)] = process
        return found

    def wait_for(self, condition: Callable[[], bool], *, within_s: float) -> bool:
        """Waits until a condition holds; False when the run exits or after a timeout."""
        deadline = time.monotonic() + within_s
        while not condition():
            if not self.alive or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def wait_until_gone(self, within_s: float) -> float | None:
        """Seconds until no process of this run is left; None after a timeout, when the rest are killed."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            if not self.alive and not processes_of(self.work):
                return time.monotonic() - began
            time.sleep(10 * POLL_S)
        self.kill()
        return None

    def kill(self) -> None:
        while self.alive or processes_of(self.work):
            kill_all(self.work)
            with suppress(ProcessLookupError):
                self.process.kill()
            time.sleep(10 * POLL_S)


def steps_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if row["kind"] == "step"]


def _openings(rows: Sequence[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if row["kind"] == "event" and row["event"] in _OPENING]
