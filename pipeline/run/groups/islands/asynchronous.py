"""An island that exchanges with the holder of the outer state, without waiting for others (asynchronous mode).

Steps count the slots of all islands: slot k is step k + 1, so the learning rate follows all islands' tokens. After its
round an island sends its pseudo-gradient, and takes the newest weights and the next slots. It waits only at the end,
for the last rounds of the others: all islands end with the same weights.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foundation.errors import ConfigError
from pipeline.run.groups.islands.context import IslandContext, Loader
from pipeline.run.groups.islands.holder import OuterShard
from pipeline.run.groups.islands.holder_server import pack_shard, unpack_shard
from pipeline.run.groups.islands.ledger import Ledger, Tail
from pipeline.run.groups.islands.local import LocalIsland
from pipeline.run.groups.islands.outer import gather
from pipeline.run.groups.islands.peers import ExchangeError
from pipeline.run.groups.islands.quantize import BLOCK, dequantize, quantize
from pipeline.run.groups.islands.report import over_ranks, report_failure, report_update
from pipeline.run.groups.islands.wire import Header, HolderClient, WrongSecretError
from pipeline.runtime.faults.stop_signals import Stop

_AGAIN_S, _BEAT_S = 0.5, 1.0
T = TypeVar("T")


class AsynchronousIsland(LocalIsland):
    """An island in asynchronous mode. Every method is collective over the ranks of the island.

    Args:
        context: the island's rank and run.
        connect: connects a client to the holder.
        loader: makes this rank's batches.
        step: number of steps in the engine's state.
    """

    def __init__(
        self, context: IslandContext, *, connect: Callable[[], HolderClient], loader: Loader, step: int
    ) -> None:
        super().__init__(context, loader=loader, step=step)
        self._client, self._sent, self._closed = connect(), 0, threading.Event()
        self._session = self._ranks.from_first(lambda: uuid.uuid4().hex)
        if context.rank == 0:
            threading.Thread(target=self._send_heartbeats, args=(connect(),), name="heartbeat", daemon=True).start()

    def start(self) -> Stop:
        """Implements `LocalIsland.start`."""
        return self._exchange_with_holder(committing=False)

    def exchange(self, step: int) -> Stop:
        """Implements `LocalIsland.exchange`."""
        self.step = step
        return self._exchange_with_holder(committing=True)

    def close(self) -> None:
        """Implements `LocalIsland.close`."""
        self._closed.set()
        if self._context.rank == 0:
            with suppress(ExchangeError):
                self._call("leave")
        self._client.close()

    def _exchange_with_holder(self, *, committing: bool) -> Stop:
        """Sends any pseudo-gradient until the holder has it, and takes the holder's state.

        If the pseudo-gradient may not have arrived, it joins again: the holder tells whether the round is still open.
        """
        began, waited, commit = time.monotonic(), 0.0, committing
        self._context.watchdog.enter_phase("exchanging with other islands", self.step)
        while True:
            try:
                answer = self._commit() if commit else self._join()
                state = answer["state"]
                if state == "upload":
                    self._upload()
                elif state in ("take", "end"):
                    self._take(answer, began=began, waited=waited)
                    return Stop.NO
                elif state == "keep" and not committing:
                    return Stop.NO
                commit = state == "keep"
                waits = state == "wait"
            except ExchangeError as error:
                report_failure(self._context, self.step, str(error))
                commit, waits = False, True
            if waits:
                self._context.watchdog.enter_phase("waiting for other islands", self.step)
                time.sleep(_AGAIN_S)
                waited += _AGAIN_S
            self._context.watchdog.report_progress()
            if self._ranks.stopped():
                return self._ranks.stop

    def _join(self) -> Header:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        values: Header = {"layout": self._context.layout, "ranks": ranks, "total": self._context.total}
        try:
            answer = self._ranks.from_first(lambda: self._call("join", **values, ledger=self.ledger.plain()))
        except WrongSecretError as error:
            remedy = "give all islands and their lighthouse the same islands.secret_file"
            raise ConfigError("islands.secret_file", why=str(error), remedy=remedy) from None
        if answer["state"] == "refused":
            others = ", ".join(answer["islands"])
            why = f"{others} train another curve than {self.name}, or split the model over their ranks in another way"
            remedy = "the same config, engine, ZeRO stage, parallel section and number of processes on all islands"
            raise ConfigError("islands", why=why, remedy=remedy)
        return answer

    def _upload(self) -> None:
        shard = pack_shard(OuterShard(*self._outer.tensors()))
        self._on_all_ranks(lambda: self._call("upload", shard, rank=self._context.rank))

    def _commit(self) -> Header:
        """Sends the pseudo-gradients of all ranks, and asks the holder to apply them."""
        deal, compressed = self.ledger.deal, self._context.section.compress == "int8"
        assert deal is not None
        with self._context.engine.edit_state() as state:
            gradient = self._outer.pseudo_gradient(gather(state))
        payload, left, count = gradient, None, gradient.numel()
        if compressed:
            padded = torch.nn.functional.pad(gradient + self._outer.error, (0, -count % BLOCK))
            payload = quantize(padded)
            left = (padded - dequantize(payload))[:count]
        body = payload.contiguous().view(-1).view(torch.uint8)
        values = {"rank": self._context.rank, "count": count, "int8": compressed}
        self._on_all_ranks(lambda: self._call("push", body, **values))
        self._sent = body.numel()
        answer = self._ranks.from_first(lambda: self._call("commit", first=deal.first))
        if left is not None and answer["state"] != "rejoin":
            self._outer.error.copy_(left)
        return answer

    def _take(self, answer: Header, *, began: float, waited: float) -> None:
        """Takes the newest outer state, and the next round."""
        before = self.ledger.deal
        shard = self._on_all_ranks(self._pull)
        for own, new in zip(self._outer.tensors(), shard, strict=True):
            own.copy_(new)
        with self._context.engine.edit_state() as state:
            self._outer.write(state)
        self.ledger = Ledger.from_plain(answer["ledger"])
        deal = self.ledger.deal
        assert deal is not None
        step, self.step = self.step, deal.step
        costs = {
            "bytes_sent": int(over_ranks(self._context, self._sent)),
            "wait_seconds": waited,
            "seconds": time.monotonic() - began - waited,
        }
        committed = dict(answer["committed"])
        done = before if before is not None and committed.pop("first", None) == before.first else None
        lost = [Tail(*each) for each in answer["lost"]]
        costs |= committed if done else {}
        report_update(self._context, step, self.ledger, done=done, islands=answer["islands"], lost=lost, **costs)

    def _pull(self) -> OuterShard:
        client_answer, payload = self._client.call(self._header("pull", rank=self._context.rank))
        if client_answer["state"] != "taken":
            raise ExchangeError("the holder does not know this island any more")
        return unpack_shard(payload)

    def _on_all_ranks(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns; an ExchangeError on any rank is raised on all. Collective."""
        failure, value = None, None
        try:
            value = action()
        except ExchangeError as error:
            failure = str(error)
        if self._ranks.agreed(failure is not None):
            raise ExchangeError(failure or "on another rank of this island")
        assert value is not None
        return value

    def _call(self, what: str, payload: torch.Tensor | None = None, **values: Any) -> Header:
        return self._client.call(self._header(what, **values), payload)[0]

    def _header(self, what: str, **values: Any) -> Header:
        return {"do": what, "name": self.name, "session": self._session, **values}

    def _send_heartbeats(self, client: HolderClient) -> None:
        while not self._closed.wait(_BEAT_S):
            with suppress(ExchangeError):
                client.call(self._header("beat"))
        client.close()
