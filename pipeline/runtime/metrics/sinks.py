"""Sinks of the metrics of a run: `metrics.jsonl`, W&B and any other service, behind one interface."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

JournalRow = dict[str, Any]
"""A row of a journal: of `metrics.jsonl`, `attempts.jsonl` or `faults.jsonl`."""

HELD_OUT, TASK = "eval", "task/"
"""Kind of the rows of held-out evaluations; prefix of the kind of a task's rows, before the task's name."""

SOURCES = "sources"
"""Key of a held-out row for the loss of every source, by name; absent with one source."""

_Row = tuple[str, int, JournalRow]
"""Kind, step and values."""


class Sink(Protocol):
    """Takes rows of metrics."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records a row of a kind: "step", "eval", "task/NAME" or "event"."""
        ...


class OneWarning:
    """Calls functions that write to a tracker. The first failure is a warning, and training continues.

    Args:
        text: Subject of the warning and what it failed to do; the error follows it.
    """

    def __init__(self, text: str) -> None:
        self._text, self._warned = text, False

    def __call__(self, action: Callable[[], Any]) -> bool:
        """Calls a function; returns whether it succeeded."""
        try:
            action()
        except Exception as error:  # errors of clients, of the connection, of disks, and of the user's code
            if not self._warned:
                text = f"{self._text} ({' '.join(repr(error).split())[:200]}): rows are in metrics.jsonl"
                print(f"warning: {text}", file=sys.stderr, flush=True)
            self._warned = True
            return False
        return True


class Sinks:
    """All sinks of this rank. A thread writes to each, since a file system or a service may take seconds.

    Every rank but rank 0 has none. A sink gets its rows in order, at once unless it is slow, and does not wait for
    other sinks. Close this object before its sinks.

    Args:
        sinks: sinks that get every row.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._threads = [_SinkThread(sink) for sink in sinks]

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Hands a row to every sink.

        Raises:
            Exception: a sink failed at an earlier row.
        """
        for thread in self._threads:
            thread.raise_error()
            thread.rows.put((kind, step, values))

    def event(self, step: int, **values: Any) -> None:
        """Hands a row of the kind "event" to every sink."""
        self.write("event", step, **values)

    def flush(self) -> None:
        """Waits until every sink has the rows so far.

        Raises:
            Exception: a sink failed.
        """
        for thread in self._threads:
            thread.rows.join()
            thread.raise_error()

    def close(self) -> None:
        """Flushes, and ends the threads; an error of a sink is printed."""
        for thread in self._threads:
            thread.rows.put(None)
        for thread in self._threads:
            thread.join()
            if thread.error is not None:
                print(f"warning: metrics are incomplete: {thread.error!r}", file=sys.stderr, flush=True)


class _SinkThread(threading.Thread):
    """Writes rows to one sink.

    Attributes:
        rows: rows to be written; None ends the thread.
        error: error of the sink, until it is raised again; None without one.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(name="metrics", daemon=True)
        self._sink = sink
        self.error: BaseException | None = None
        self.rows: queue.Queue[_Row | None] = queue.Queue()
        self.start()

    def raise_error(self) -> None:
        """Raises the sink's error again, in the thread that hands rows over."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def run(self) -> None:
        while (row := self.rows.get()) is not None:
            kind, step, values = row
            try:
                self._sink.write(kind, step, **values)
            except Exception as error:
                self.error = error
            finally:
                self.rows.task_done()
