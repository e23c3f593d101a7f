"""Copies a run's finished files to an object store, in a process of its own: packages of stores keep Python busy.

Checkpoints are uploaded one at a time: the files, then the manifest. Among waiting checkpoints only the newest and
those of `run.keep_every` are kept, so a store slower than the saves gets fewer checkpoints. Hard links hold a waiting
checkpoint, which the run may delete meanwhile. Small files are uploaded before and after each checkpoint, and at the
end, so the store has the rows of a checkpoint's steps.

Failed uploads are repeated without limit, after 1 to 60 s; rank 0 decides how long it waits at its end.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from foundation.directory import MANIFEST, Manifest, write_json
from foundation.errors import DataError
from foundation.lease import Lease, LeaseLostError, renew
from foundation.remote_directory import local_manifest, read_remote_manifest
from foundation.remote_publish import NotArrivedError, publish
from foundation.remote_run import (
    CHECKPOINTS,
    UPLOADS,
    RemoteCheckpoint,
    is_small,
    remote_checkpoints,
)
from foundation.storage import StorageError, delete, objects_below, upload
from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.checkpoint.pins import pinned_steps_in_store
from pipeline.runtime.metrics.sinks import JournalRow
from pipeline.runtime.metrics.times import iso_time

T = TypeVar("T")
Tell = Callable[[JournalRow], None]
"""Function that reports an event to rank 0."""
LINKS = ".uploading"
"""Folder of hard links in the run's directory."""
_POLL_S, _RATE_S = 0.2, 30.0
_FIRST_RETRY_S, _LAST_RETRY_S, _TELL_S = 1.0, 60.0, 60.0


@dataclass(frozen=True)
class UploadTerms:
    """The checkpoints that stay in the store.

    Attributes:
        keep: number of newest checkpoints; None for all.
        keep_every: divisor of the steps whose checkpoints are never deleted; None for no such steps.
    """

    keep: int | None
    keep_every: int | None

    def for_ever(self, step: int) -> bool:
        """Tells whether a step's checkpoint is never deleted."""
        return self.keep_every is not None and step % self.keep_every == 0


@dataclass(frozen=True)
class _Waiting:
    """A finished checkpoint that is not yet in the store.

    Attributes:
        step: the checkpoint's last step.
        text: bytes of its manifest.
        manifest: its parsed manifest.
        links: folder with hard links to its files.
    """

    step: int
    text: bytes
    manifest: Manifest
    links: Path


@dataclass
class _State:
    """State of the uploads, for `headrace status` (`row`)."""

    durable_step: int | None = None
    durable_at: float | None = None
    uploading: int | None = None
    failing_since: float | None = None
    error: str | None = None
    left: dict[int, int] = field(default_factory=dict)
    sent: deque[tuple[float, int]] = field(default_factory=deque)

    def rate(self) -> float:
        """Computes the bytes per second sent in the last `_RATE_S` seconds."""
        now = time.monotonic()
        while self.sent and now - self.sent[0][0] > _RATE_S:
            self.sent.popleft()
        seconds = now - self.sent[0][0] if self.sent else 0.0
        return sum(count for _, count in self.sent) / max(seconds, 1.0)

    def row(self) -> JournalRow:
        """Returns step and time of the newest checkpoint in the store, the backlog, bytes per second, and errors."""
        left = dict(self.left)
        return {
            "time": iso_time(time.time()),
            "durable_step": self.durable_step,
            "durable_at": None if self.durable_at is None else iso_time(self.durable_at),
            "uploading": self.uploading,
            "waiting": sorted(step for step in left if step != self.uploading),
            "backlog_bytes": sum(left.values()),
            "bytes_per_second": round(self.rate()),
            "failing_since": None if self.failing_since is None else iso_time(self.failing_since),
            "error": self.error,
        }


class Uploader:
    """Uploads the files of one run.

    Args:
        url: the run's URL.
        run_dir: the run's directory on this host.
        lease: this process's lease on the run.
        terms: the checkpoints that stay in the store.
        tell: reports events to rank 0.

    Attributes:
        ending: set at the end of the run: first the backlog is uploaded (`backlog`) or dropped, then the small files
            are uploaded.
    """

    def __init__(self, url: str, run_dir: Path, *, lease: Lease, terms: UploadTerms, tell: Tell) -> None:
        self._url, self._run_dir, self._lease, self._terms, self._tell = url, run_dir, lease, terms, tell
        self._state, self._lock = _State(), threading.RLock()
        self._known: dict[int, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._versions: dict[str, tuple[int, int]] = {}
        self._lost, self._renewing = threading.Event(), threading.Lock()
        self._renewed_at = time.monotonic()
        self._told_at: float | None = None
        self.ending: Literal["no", "backlog", "now"] = "no"

    def run(self) -> None:
        """Uploads until it is to end, and returns the lease.

        Raises:
            LeaseLostError: another process has taken over the lease.
        """
        shutil.rmtree(self._run_dir / LINKS, ignore_errors=True)
        threading.Thread(target=self._renew_always, name="lease", daemon=True).start()
        self._patiently(self._look_at_store)
        threading.Thread(target=self._look_always, name="checkpoints", daemon=True).start()
        self._upload_small()
        while self.ending != "now":
            ending = self.ending
            self._find_checkpoints()
            if (waiting := self._take()) is not None:
                self._upload(waiting)
            elif ending == "backlog":
                self.ending = "no"
                self._tell({"event": "backlog_done", **self._row()})
            else:
                self._check()
                time.sleep(_POLL_S)
        self._upload_small()
        self._patiently(partial(self._renew, released=True))

    def _take(self) -> _Waiting | None:
        """Takes the oldest checkpoint out of the queue, so that no newer one supersedes it; None without one."""
        with self._lock:
            if not self._waiting:
                return None
            first = self._waiting.pop(0)
            self._state.uploading = first.step
            return first

    def _look_always(self) -> None:
        while self.ending != "now":
            self._find_checkpoints()
            time.sleep(_POLL_S)

    def _look_at_store(self) -> None:
        remote = remote_checkpoints(self._url)
        local = dict(finished_checkpoints(self._run_dir))
        for each in remote:
            if each.step in local and each.step not in self._known:
                self._known[each.step] = read_remote_manifest(each.url)[0]
        if remote:
            self._state.durable_step = remote[0].step

    def _find_checkpoints(self) -> None:
        """Queues finished checkpoints that the store lacks; drops queued checkpoints that newer ones supersede."""
        with self._lock:
            for step, path in reversed(finished_checkpoints(self._run_dir)):
                self._note(step, path)
            for old in self._waiting[:-1]:
                if not self._terms.for_ever(old.step):
                    self._waiting.remove(old)
                    self._forget(old)
                    self._tell({"event": "upload_skipped", "step": old.step, "newer": self._waiting[-1].step})

    def _note(self, step: int, path: Path) -> None:
        try:
            text, manifest = local_manifest(path)
        except DataError:  # deleted just now, or damaged: the next start reports it
            return
        if self._known.get(step) == text:
            return
        self._known[step] = text
        links = self._link(path, manifest)
        if links is not None:
            self._waiting.append(_Waiting(step, text, manifest, links))
            self._state.left[step] = manifest.bytes + len(text)  # the manifest comes last: until then all waits

    def _link(self, path: Path, manifest: Manifest) -> Path | None:
        """Makes hard links to a checkpoint's files; None if it was deleted meanwhile."""
        links = self._run_dir / LINKS / f"{path.name}-{manifest.fingerprint[:16]}"
        shutil.rmtree(links, ignore_errors=True)
        try:
            links.mkdir(parents=True)
            for name in (*manifest.files, MANIFEST):
                os.link(path / name, links / name)
        except FileNotFoundError:
            shutil.rmtree(links, ignore_errors=True)
            return None
        except OSError:  # no hard links here: a checkpoint deleted during its upload is given up
            shutil.rmtree(links, ignore_errors=True)
            return path
        return links

    def _forget(self, waiting: _Waiting) -> None:
        with self._lock:
            self._state.left.pop(waiting.step, None)
        if waiting.links.parent.name == LINKS:
            shutil.rmtree(waiting.links, ignore_errors=True)

    def _upload(self, waiting: _Waiting) -> None:
        began, step = time.monotonic(), waiting.step

        def done(count: int) -> None:
            with self._lock:
                self._state.left[step] = max(0, self._state.left.get(step, 0) - count)

        try:
            url = self._free_name(step)
            self._upload_small()  # the store needs the rows of a checkpoint's steps
            send = partial(publish, waiting.links, url, progress=done, sent=self._sent, trying=self._patiently)
            self._patiently(send, retry=NotArrivedError)
            self._state.durable_step, self._state.durable_at = step, time.time()
            self._forget(waiting)
        except _EndedError:
            return
        except StorageError:
            raise
        except DataError as error:  # the checkpoint's files are gone
            self._tell({"event": "upload_failed", "step": step, "why": _first_line(error)})
            self._forget(waiting)
            return
        finally:
            self._state.uploading = None
        seconds = round(time.monotonic() - began, 3)
        told = {"step": step, "url": url, "bytes": waiting.manifest.bytes, "seconds": seconds}
        self._tell({"event": "uploaded", **told, **self._row()})
        self._upload_small()
        with suppress(_EndedError):
            self._patiently(self._delete_old)

    def _free_name(self, step: int) -> str:
        """Finds an unused URL for a checkpoint; a repeated step may have a checkpoint from its first training."""
        base = f"{self._url}/{CHECKPOINTS}/step-{step:08d}.{self._lease.number}"
        names = [base, *(f"{base}.{again}" for again in range(2, 1000))]
        taken = {each.url for each in self._patiently(partial(remote_checkpoints, self._url))}
        return next(name for name in names if name not in taken)

    def _delete_old(self) -> None:
        """Deletes checkpoints that are not kept, manifest first, so none is visible in part."""
        if self._terms.keep is None:
            return
        steps: list[RemoteCheckpoint] = remote_checkpoints(self._url)
        pinned = pinned_steps_in_store(self._url)
        for old in steps[self._terms.keep :]:
            if not self._terms.for_ever(old.step) and old.step not in pinned:
                names = sorted(objects_below(old.url), key=lambda name: name != MANIFEST)
                for name in names:
                    delete(f"{old.url}/{name}")

    def _upload_small(self) -> None:
        """Uploads changed small files; the run's manifest only once the store has a checkpoint."""
        paths = [path for path in self._run_dir.rglob("*") if is_small(path, self._run_dir)]
        if self._state.durable_step is None:
            paths = [path for path in paths if path != self._run_dir / MANIFEST]
        for path in sorted(paths, key=lambda path: path.name == MANIFEST):
            with suppress(_EndedError, FileNotFoundError):
                self._patiently(partial(self._upload_changed, path))

    def _upload_changed(self, path: Path) -> None:
        name, found = path.relative_to(self._run_dir).as_posix(), path.stat()
        version = found.st_size, found.st_mtime_ns
        if self._versions.get(name) != version:
            upload(path, f"{self._url}/{name}", progress=self._sent)
            self._versions[name] = version

    def _sent(self, count: int) -> None:
        with self._lock:
            self._state.sent.append((time.monotonic(), count))

    def _patiently(self, act: Callable[[], T], *, retry: type[DataError] = StorageError) -> T:
        """Calls a function until it succeeds in the store; first renews a lease that may have expired.

        Args:
            act: the function.
            retry: error besides StorageError after which the function is called again.

        Raises:
            LeaseLostError: another process has taken over the lease.
            _EndedError: the process is to end without further attempts.
        """
        delay = _FIRST_RETRY_S
        while True:
            self._check()
            try:
                if time.monotonic() - self._renewed_at > self._lease.silent_s:  # this process was paused (SIGSTOP)
                    self._renew()
                result = act()
            except (StorageError, retry) as error:
                self._failed(error)
            else:
                self._state.failing_since = self._state.error = None
                return result
            end = time.monotonic() + delay
            delay = min(2 * delay, _LAST_RETRY_S)
            while time.monotonic() < end:
                self._check()
                time.sleep(_POLL_S)

    def _failed(self, error: DataError) -> None:
        with self._lock:
            self._state.failing_since = self._state.failing_since or time.time()
            self._state.error = _first_line(error)
            now = time.monotonic()
            if self._told_at is not None and now - self._told_at < _TELL_S:
                return
            self._told_at = now
        self._tell({"event": "upload_failing", **self._row()})

    def _row(self) -> JournalRow:
        with self._lock:
            return self._state.row()

    def _check(self) -> None:
        if self._lost.is_set():
            raise LeaseLostError(f"{self._url}: another process has taken it over\n  try: nothing; it goes on there")
        if self.ending == "now" and self._state.uploading is not None:
            raise _EndedError

    def _renew_always(self) -> None:
        told = 0.0
        while True:
            try:
                self._renew()
            except LeaseLostError:
                self._lost.set()
                return
            except StorageError as error:
                self._failed(error)
            else:
                if not self._state.left:  # otherwise an upload shows whether the store works
                    self._state.failing_since = self._state.error = None
            if self._state.left and time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                self._tell({"event": "uploads", **self._row()})
            time.sleep(self._lease.interval_s)

    def _renew(self, *, released: bool = False) -> None:
        row = self._row()
        with self._renewing:
            try:
                if not self._lease.released:
                    began = time.monotonic()
                    self._lease = renew(self._url, self._lease, status=row, released=released)
                    self._renewed_at = began
            finally:
                with suppress(OSError):
                    write_json(self._run_dir / UPLOADS, asdict(replace(self._lease, status=row)))


class _EndedError(Exception):
    """The process is to end without its backlog."""


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
