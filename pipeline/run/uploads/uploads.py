"""Rank 0's side of the uploads of a run: the lease, the uploading process, and its events."""

from __future__ import annotations

import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from foundation.errors import ConfigError, TrainingError
from foundation.lease import Lease, LeaseLostError, LeaseTakenError, newest_lease, take_lease, wait_until_free
from foundation.paths import is_url
from foundation.remote_publish import check_can_write
from foundation.remote_run import UPLOADS, claim, is_own, pull, working_directory
from foundation.storage import patiently
from pipeline.config.sections.run import Config
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.metrics.sinks import JournalRow

_END_S, _AFTER_AN_ERROR_S = 120.0, 20.0
"""Seconds for uploading the last small files at the end of a run, and after an error."""
_SAY_S = 10.0
_GIVE_UP = 10
"""Number of lease times without progress after which an ended run gives up its backlog."""


class Record(Protocol):
    """Records an event of a step."""

    def __call__(self, step: int, **values: Any) -> None: ...


class Uploads:
    """Uploads of a run whose directory is a URL; without effect for other runs, and on ranks other than 0.

    In its block this process holds the run's lease in the store, and the directory on this host is up to date.

    Args:
        first: whether this is rank 0.
        signals: stop signals of this process, by which a lost lease stops the run.

    Raises:
        ConfigError: another process trains this run, or the store is unsuitable for a run.
        StorageError: the store cannot be read, listed, written to or deleted from.
    """

    def __init__(self, config: Config, *, first: bool, signals: StopSignals) -> None:
        section = config.run
        self.url = section.dir if is_url(section.dir) else None
        self._active, self._signals = first and self.url is not None, signals
        self._run_dir = working_directory(section.dir)
        keep = section.keep_checkpoints if section.keep_in_bucket is None else section.keep_in_bucket
        self._keep, self._keep_every = (None if keep == "all" else keep), section.keep_every
        self._silent_s = config.watchdog.heartbeat_timeout
        self._lease: Lease | None = None
        self._process: subprocess.Popen[str] | None = None
        self._told: queue.Queue[JournalRow] = queue.Queue()
        self._started = self._said = 0.0
        self._lost = self._asked = False
        self._progress: tuple[Any, float] = (None, time.monotonic())

    def __enter__(self) -> Uploads:
        """Takes the lease, and starts the uploading process."""
        if self._active:
            assert self.url is not None
            self._lease = _taken(self.url, silent_s=self._silent_s)
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Uploads the small files for the last time, and returns the lease."""
        if self._process is None:
            return
        self._send("end")
        try:
            self._process.wait(_END_S if error is None else _AFTER_AN_ERROR_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            print(
                f"WARNING: {self.url} does not have the newest rows of the journals: {self._state().get('error')};"
                f" they are in {self._run_dir}",
                file=sys.stderr,
                flush=True,
            )

    def report(self, record: Record, say: Callable[[str], None]) -> None:
        """Records and prints the uploading process's events since the last call; none on ranks other than 0."""
        for event in self._events():
            if event["event"] == "lease_lost":
                self._lost = True
                self._signals.requested = max(self._signals.requested, Stop.TERMINATE)
            if event["event"] == "backlog_done":
                self._asked = False
                continue
            step = int(event.pop("step", None) or event.get("durable_step") or 0)
            record(step, **event)
            line = _line(event, step, self.url)
            if line is not None:
                say(line)

    def finish(self, record: Record, say: Callable[[str], None], *, seconds: float) -> bool:
        """Waits some seconds for the end of all uploads; returns whether everything is uploaded. On rank 0.

        Raises:
            TrainingError: the store has accepted nothing for ten times `watchdog.heartbeat_timeout`.
            LeaseLostError: another process has taken over the lease.
        """
        if self._process is None:
            return True
        if not self._asked:
            self._asked = True
            self._send("backlog")
        end = time.monotonic() + seconds
        while self._asked and time.monotonic() < end:
            time.sleep(0.05)
            self.report(record, say)
            if self._lost:
                why = f"{self.url}: another process has taken the run over"
                raise LeaseLostError(
                    f"{why}; what is newer here is in {self._run_dir}\n  try: nothing; it goes on there"
                )
        if self._asked:
            self._still_waiting(say)
        return not self._asked

    def _still_waiting(self, say: Callable[[str], None]) -> None:
        state, now = self._state(), time.monotonic()
        sending = state.get("time") if state.get("bytes_per_second") else None  # a large file may not be done yet
        seen = state.get("backlog_bytes"), state.get("durable_step"), sending
        if seen != self._progress[0]:
            self._progress = seen, now
        if now - self._progress[1] > _GIVE_UP * self._silent_s:
            newest = state.get("durable_step")
            raise TrainingError(
                f"{self.url} does not have the last checkpoint: {state.get('error') or 'nothing is sent'}\n"
                f"  its newest is of step {newest}; all is in {self._run_dir}\n"
                f"  try: start the run again on this host, which uploads it, once the store can be written to"
            )
        if now - self._said > _SAY_S:
            self._said = now
            rate = f"{state.get('bytes_per_second', 0) / 1e6:,.1f} MB/s"
            failing = f"; it fails: {state['error']}" if state.get("error") else ""
            say(f"uploading to {self.url}: {state.get('backlog_bytes', 0) / 1e6:,.1f} MB are left, {rate}{failing}")

    def _state(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, KeyError):
            found: dict[str, Any] = json.loads((self._run_dir / UPLOADS).read_text())["status"]
            return found
        return {}

    def _events(self) -> Iterator[JournalRow]:
        if self._process is None:
            return
        assert self._lease is not None
        ended = self._process.poll() is not None and not self._lost
        if ended and time.monotonic() - self._started > self._lease.interval_s:
            yield {"event": "upload_restarted", "code": self._process.returncode}
            self._start()
            if self._asked:
                self._send("backlog")
        with suppress(queue.Empty):
            while True:
                yield self._told.get_nowait()

    def _start(self) -> None:
        assert self._lease is not None
        self._started = time.monotonic()
        command = [sys.executable, "-m", "pipeline.run.uploads"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        given = {"url": self.url, "run_dir": str(self._run_dir), "lease": asdict(self._lease)}
        self._send(json.dumps({**given, "keep": self._keep, "keep_every": self._keep_every}))
        threading.Thread(target=self._listen, args=(self._process,), name="uploads", daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                self._told.put(json.loads(line))

    def _send(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # the process has died: the next check starts another
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()


def _taken(url: str, *, silent_s: float) -> Lease:
    patiently(partial(check_can_write, url))
    token = secrets.token_hex(16)
    try:
        before = patiently(partial(newest_lease, url))
        if before is not None and not is_own(url, before):
            wait_until_free(url, before, say=lambda line: print(line, file=sys.stderr, flush=True))
        pull(url, locked=True)
        claim(url, token)
        return patiently(partial(take_lease, url, before, token=token, silent_s=silent_s))
    except LeaseTakenError as error:
        why = str(error).splitlines()[0].removeprefix(f"{url}: ")
        raise ConfigError("run.dir", url, why=why, remedy="wait for it, end it, or choose another run.dir") from None


def _line(event: JournalRow, step: int, url: str | None) -> str | None:
    """Returns the line to print for an event; None without a line."""
    make = _LINES.get(event["event"])
    return None if make is None else make({**event, "step": step, "run": url})


def _uploaded(event: JournalRow) -> str:
    size, rate = event["bytes"] / 1e6, event["bytes"] / 1e6 / max(event["seconds"], 1e-3)
    return f"step {event['step']}: checkpoint uploaded to {event['url']} ({size:,.1f} MB, {rate:,.1f} MB/s)"


def _failing(event: JournalRow) -> str:
    newest = f"the newest there is of step {event['durable_step']}" if event["durable_step"] else "it has none yet"
    left = f"{event['backlog_bytes'] / 1e6:,.1f} MB wait"
    return f"WARNING: {event['error']}\n  training goes on, and it is tried again; {newest}, and {left}"


_LINES: dict[str, Callable[[JournalRow], str]] = {
    "uploaded": _uploaded,
    "upload_failing": _failing,
    "upload_skipped": lambda event: (
        f"step {event['step']}: checkpoint not uploaded: the store is slower, and that of step {event['newer']} newer"
    ),
    "upload_failed": lambda event: f"WARNING: step {event['step']}: checkpoint not uploaded: {event['why']}",
    "upload_restarted": lambda event: (
        f"WARNING: the process that uploads to {event['run']} ended with code {event['code']}; it is started again"
    ),
    "lease_lost": lambda event: f"WARNING: {event['why']}: this run stops",
}
