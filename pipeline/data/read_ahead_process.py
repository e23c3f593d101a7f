"""`python -m pipeline.data.read_ahead_process`: downloads spans to the cache of this host for the rank that started it.

Its standard input has one JSON object per line: first the cache; then `plan` (abandons earlier requests), `part`,
`index`, and `now` (the key of a part that the rank waits for). The process reports the outcome of each part, and
warnings. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundation.errors import DataError
from foundation.storage import StorageError, read_ranges
from pipeline.data.read_ahead import Index, fetch_index
from pipeline.data.span_cache import Part, SpanCache

_WORKERS = 2
"""Number of parts downloaded at a time: more would delay the part that is needed first."""
_WAIT_S = (0.2, 1.0)
"""Seconds between checks for room: the first pause, and the longest."""
_RETRY_S = (1.0, 60.0)
"""Seconds between attempts to read a failing store: the first pause, and the longest."""


class _GivenUp(Exception):  # noqa: N818  not an error
    """A part is no longer wanted, or the rank waits for it and it cannot be read at once."""


class ReadAheadProcess:
    """Downloads parts, several at a time, in the order in which they were requested.

    Args:
        cache: cache that stores the parts.
    """

    def __init__(self, cache: SpanCache) -> None:
        self._cache = cache
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._wanted: deque[tuple[int, Part | Index]] = deque()
        self._plan, self._asked, self._needed = 0, 0, -1
        self._numbers: dict[str, int] = {}
        self._early = set[str]()

    def run(self) -> None:
        """Follows the lines of the standard input until its end."""
        self._tell({"ready": True})
        for _ in range(_WORKERS):
            threading.Thread(target=self._work, daemon=True).start()
        for line in sys.stdin:
            message: dict[str, Any] = json.loads(line)
            with self._changed:
                if "plan" in message:
                    self._plan = message["plan"]
                    self._wanted.clear()
                    self._numbers.clear()
                    self._early.clear()
                    self._needed = self._asked
                elif "now" in message:
                    self._need(message["now"])
                elif "index" in message:
                    self._wanted.append((self._plan, Index(*message["index"])))
                else:
                    order, step, spans = message["part"]
                    part = Part(order, step, tuple(map(tuple, spans)))
                    self._asked += 1
                    self._numbers[part.key] = self._asked
                    self._wanted.append((self._plan, part))
                    if part.key in self._early:
                        self._need(part.key)
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._wanted:
                    self._changed.wait()
                plan, wanted = self._wanted.popleft()
            if isinstance(wanted, Index):
                self._fetch_index(plan, wanted)
                continue
            stored = False
            try:
                stored = self._fetch(plan, wanted)
            except _GivenUp:
                pass
            except (DataError, OSError) as error:  # the rank that reads the part meets the error again, and ends
                self._warn(str(error))
            with self._changed:
                if plan == self._plan:
                    self._numbers.pop(wanted.key, None)
            self._tell({"plan": plan, "key": wanted.key, "stored": stored})

    def _fetch(self, plan: int, part: Part) -> bool:
        wait_s = _WAIT_S[0]
        while not self._cache.has(part):
            if not self._cache.make_room(part):
                self._pause(plan, part, wait_s)
                wait_s = min(2 * wait_s, _WAIT_S[1])
                continue
            with self._cache.downloading(part.key, wait=lambda: self._pause(plan, part, 0.0)):
                if not self._cache.has(part):
                    self._store(part, self._download(plan, part))
        return True

    def _store(self, part: Part, data: Sequence[bytes]) -> None:
        try:
            self._cache.write(part, data)
        except OSError as error:
            self._warn(self._cache.shrink(error))

    def _download(self, plan: int, part: Part) -> list[bytes]:
        wait_s = _RETRY_S[0]
        while True:
            try:
                data = read_ranges(part.spans)
            except StorageError as error:
                if error.lasting:
                    raise
                self._warn(
                    f"{str(error).splitlines()[0]}; the download is tried again; training reads data on this host"
                )
                self._pause(plan, part, wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])
                continue
            if any(len(each) != size for each, (_, _, size) in zip(data, part.spans, strict=True)):
                raise _GivenUp  # an object is too short: the rank that reads it reports that
            return data

    def _fetch_index(self, plan: int, index: Index) -> None:
        if plan == self._plan:
            try:
                fetch_index(index)
            except (DataError, OSError) as error:
                self._warn(str(error).splitlines()[0])

    def _pause(self, plan: int, part: Part, seconds: float) -> None:
        """Waits; raises _GivenUp if the part is no longer wanted, or the rank already waits for it or a later part."""
        with self._changed:
            self._changed.wait_for(lambda: plan != self._plan or self._is_late(part), timeout=seconds)
            if plan != self._plan or (seconds and self._is_late(part)):
                raise _GivenUp

    def _is_late(self, part: Part) -> bool:
        return self._numbers.get(part.key, 0) <= self._needed

    def _need(self, key: str) -> None:
        """Notes that the rank waits for a part, perhaps before its request arrives. The rank reads parts in order."""
        if key in self._numbers:
            self._needed = max(self._needed, self._numbers[key])
            self._early.discard(key)
        else:
            self._early.add(key)

    def _warn(self, warning: str) -> None:
        self._tell({"warning": warning})

    def _tell(self, message: dict[str, Any]) -> None:
        with self._writing:
            print(json.dumps(message), flush=True)


def main() -> None:
    """Runs until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # signals go to all processes of a job: the rank decides
    given = json.loads(sys.stdin.readline())
    ReadAheadProcess(SpanCache(Path(given["folder"]), limit=given["limit"])).run()
    os._exit(0)  # its threads may be waiting for a store


if __name__ == "__main__":
    main()
