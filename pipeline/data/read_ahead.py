"""Read-ahead of spans in object stores, in the order of samples, by a separate process for each rank.

The clients of object stores keep Python busy for milliseconds per request; in the training process, training would
wait. The read-ahead process downloads parts to the cache of this host (`span_cache`) as far ahead as the cache has
room, and the rank reads them there. If that process has ended or could not store a part, the rank reads the store
without the cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from foundation.directory import sha256_of_file, whole_file
from foundation.errors import DataError
from foundation.storage import download
from pipeline.data.span_cache import Part, SpanCache

_AT_ONCE = 16
"""Largest number of parts that are requested from the process and not yet stored."""
_LOOK_S, _SAY_S = 0.2, 60.0


@dataclass(frozen=True)
class Index:
    """The index of a shard, to be copied to this host.

    Attributes:
        url: URL of the object.
        path: path of the copy on this host.
        sha256: SHA-256 of the file, in hexadecimal.
    """

    url: str
    path: str
    sha256: str


class ReadAhead:
    """Reads parts ahead, in the order in which training needs them.

    Args:
        cache: cache that stores the parts.
        order: name of the tokens and the order of samples.
    """

    def __init__(self, cache: SpanCache, order: str) -> None:
        self.cache, self.order = cache, order
        self._process: subprocess.Popen[str] | None = None
        self._sending, self._changed = threading.Lock(), threading.Condition()
        self._asked: dict[str, str | None] = {}
        self._plan, self._said = 0, -_SAY_S
        self._ready = False
        self._reader = ExitStack()

    def begin(self, wanted: Iterable[Part | Index], *, step: int) -> None:
        """Starts downloading the data of all steps from `step` on, in order; abandons the plan begun before.

        Args:
            wanted: parts and indexes in order; a thread takes them as the cache has room.
            step: first step to read.
        """
        with self._changed:
            self._plan += 1
            self._asked.clear()
            self._changed.notify_all()
        self._reader.close()
        try:
            self._at = self._reader.enter_context(self.cache.reader(self.order, step))
            self._start()
        except OSError as error:
            self._say(f"{self.cache.folder} cannot be used as a cache: {error}")
            return
        self._send({"plan": self._plan})
        threading.Thread(target=self._feed, args=(iter(wanted), self._plan), name="read-ahead", daemon=True).start()

    def at(self, step: int) -> None:
        """Announces that this process no longer needs the steps before `step`."""
        with suppress(OSError):
            self._at(step)

    def read(self, part: Part) -> memoryview | None:
        """Returns the data of a downloaded part; None if it could not be stored, or the process is not ready yet.

        Raises:
            CancelledError: another plan was begun, or the reader was closed.
        """
        told, plan = False, self._plan
        while True:
            state = self._asked.get(part.key, "waiting")
            data = self.cache.read(part)
            if data is not None:
                return data
            with self._changed:
                if self._plan != plan:
                    raise CancelledError
                if not told:  # the process gives up a part that it cannot get at once, and goes on with later parts
                    told = True
                    self._send({"now": part.key})
                # a part reported as stored is damaged, or was evicted by a process that does not know this reader
                if state in (None, "stored") or not self._ready or not self._alive():
                    return None
                self._changed.wait(_LOOK_S)

    def store(self, part: Part, data: Sequence[bytes]) -> None:
        """Stores a part that this process has read itself, for the other ranks, if there is room."""
        try:
            self.cache.write(part, data)
        except OSError as error:
            self._say(self.cache.shrink(error))

    def close(self) -> None:
        """Ends the process."""
        with self._changed:
            self._plan += 1
            self._changed.notify_all()
        self._reader.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _feed(self, wanted: Iterator[Part | Index], plan: int) -> None:
        for each in wanted:
            with self._changed:
                while self._plan == plan and self._alive() and self._waiting() >= _AT_ONCE:
                    self._changed.wait(1.0)
                if self._plan != plan or not self._alive():
                    return
                if isinstance(each, Part):
                    self._asked[each.key] = "waiting"
            self._send({"part" if isinstance(each, Part) else "index": astuple(each)})

    def _waiting(self) -> int:
        return sum(state == "waiting" for state in self._asked.values())

    def _start(self) -> None:
        if self._alive():
            return
        self._ready = False
        command = [sys.executable, "-m", "pipeline.data.read_ahead_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._send({"folder": str(self.cache.folder), "limit": self.cache.limit})
        threading.Thread(target=self._listen, args=(self._process,), name="read-ahead", daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told: dict[str, Any] = json.loads(line)
            if "ready" in told:
                self._ready = True
            elif "warning" in told:
                self._say(told["warning"])
            elif told["plan"] == self._plan:
                with self._changed:
                    self._asked[told["key"]] = "stored" if told["stored"] else None
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _say(self, warning: str) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_S:
            self._said = now
            print(f"WARNING: {warning}", file=sys.stderr, flush=True)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._sending, suppress(OSError):  # the process has ended: spans are read without it
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def fetch_index(index: Index) -> None:
    """Copies the index of a shard to this host, unless the host has it.

    Raises:
        DataError: the checksum differs from the manifest's.
        StorageError: the store cannot be read.
    """
    path = Path(index.path)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        download(index.url, partial)
        if sha256_of_file(partial) != index.sha256:
            why = "has another checksum than the manifest says: it was damaged or overwritten"
            raise DataError(f"{index.url} {why}\n  try: copy the dataset there again")
