"""An exchange in a thread, concurrent with the training loop's inner steps."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from pipeline.run.groups.islands.exchange import Exchange, Exchanged, Snapshot
from pipeline.run.groups.islands.ledger import Member
from pipeline.run.groups.islands.ranks import Ranks, ThreadRanks


class Background:
    """Tries an exchange until it succeeds on all ranks of the island, like the training loop; begins at once.

    Args:
        exchange: this rank's exchange.
        member: report with which the island asks for a quorum.
        snapshot: copy of the island's inner weights.
        group: gloo process group over all ranks of the island; None for one process.

    Attributes:
        seconds: seconds from the beginning to the end of the successful attempt.
    """

    def __init__(self, exchange: Exchange, *, member: Member, snapshot: Snapshot, group: Any) -> None:
        self._exchange, self._member, self.snapshot = exchange, member, snapshot
        self._cancelled, self._wanted = threading.Event(), threading.Event()
        self._future, self.seconds = Future[Exchanged | None](), 0.0
        ranks = ThreadRanks(group, self._cancelled)
        # a daemon: an error in the training loop must not wait for other islands
        self._thread = threading.Thread(target=self._run, args=(ranks,), name="exchange", daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        """Waits up to `seconds` for the end; returns whether the exchange has ended on this rank."""
        return bool(wait([self._future], timeout=seconds).done)

    @property
    def failed(self) -> bool:
        """Whether the exchange has ended with an error on this rank, which `result` raises."""
        return self._future.done() and self._future.exception() is not None

    def cancel(self) -> None:
        """Gives up waiting for other islands, but finishes an exchange that has begun. Call it on all ranks."""
        self._cancelled.set()

    def result(self) -> Exchanged | None:
        """Returns the result of the exchange once it has ended; None where the exchange was given up.

        Raises:
            TrainingError: the lighthouse failed.
        """
        self._wanted.set()
        self._thread.join()
        return self._future.result()

    def _run(self, ranks: Ranks) -> None:
        try:
            exchanged = self._exchanged(ranks)
        except BaseException as error:
            self._future.set_exception(error)
            return
        self._future.set_result(exchanged)
        if exchanged is not None:
            self._exchange.keep_waiting(exchanged, self._wanted)

    def _exchanged(self, ranks: Ranks) -> Exchanged | None:
        began = time.monotonic()
        while (quorum := self._exchange.ask(self._member, ranks)) is not None:
            exchanged = self._exchange.attempt(quorum, self.snapshot, ranks)
            if exchanged is not None:
                self.seconds = time.monotonic() - began
                return exchanged
            if ranks.stopped():  # the only chance to stop if the lighthouse answers at once
                break
        return None
