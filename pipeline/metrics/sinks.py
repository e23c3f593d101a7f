"""Where the metrics of a run go: `metrics.jsonl`, W&B and any other service, written to as one."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

_Row = tuple[str, int, dict[str, Any]]
"""Kind, step and values."""


class Sink(Protocol):
    """Takes rows of metrics."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records a row of a kind: "step", "eval" or "event"."""
        ...


class Sinks:
    """All sinks of this rank, written to by a thread, since a file system or a service may take seconds.

    Every rank but rank 0 has none, and no thread. Rows are written in order, at once unless a sink is slow. Close it
    before its sinks are closed.

    Args:
        sinks: each gets every row, in this order.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self._rows: queue.Queue[_Row | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write_rows, name="metrics", daemon=True)
        if self._sinks:
            self._thread.start()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Hands a row to every sink.

        Raises:
            Exception: what a sink has raised at an earlier row.
        """
        if self._sinks:
            self._raise_error()
            self._rows.put((kind, step, values))

    def event(self, step: int, **values: Any) -> None:
        """Hands a row of the kind "event" to every sink."""
        self.write("event", step, **values)

    def flush(self) -> None:
        """Returns when every sink has the rows so far.

        Raises:
            Exception: what a sink has raised.
        """
        if self._sinks:
            self._rows.join()
            self._raise_error()

    def close(self) -> None:
        """Flushes, and ends the thread; an error of a sink is printed."""
        if self._thread.is_alive():
            self._rows.put(None)
            self._thread.join()
        if self._error is not None:
            print(f"warning: metrics are incomplete: {self._error!r}", file=sys.stderr, flush=True)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_rows(self) -> None:
        while (row := self._rows.get()) is not None:
            kind, step, values = row
            try:
                for sink in self._sinks:
                    sink.write(kind, step, **values)
            except Exception as error:
                self._error = error
            finally:
                self._rows.task_done()
