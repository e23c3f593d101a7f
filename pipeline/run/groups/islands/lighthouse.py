"""Quorums of islands, from torchft's lighthouse: the living islands and their addresses.

The lighthouse forms a quorum when every island whose heartbeat it receives has asked for one, or when its join time-out
is over. torchft has no authentication, so an island's report carries a message authentication code under the shared
secret, and reports without a valid code are left out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

from foundation.errors import ConfigError, TrainingError
from pipeline.run.groups.islands.ledger import PlainReport

HEARTBEAT_S = 1.0
_ASK_S = 3600.0
_RETRY_S = 1.0
_HEARTBEAT_LIMIT, _HEARTBEAT_RETRY_S = timedelta(seconds=1.5), 0.5
"""Time limit of a heartbeat, and seconds until the next try: a lost heartbeat must not end membership (after 5 s)."""
_TICK_S = 1.0


class LighthouseReport(Protocol):
    """Report of a group of processes that asks for a quorum."""

    @property
    def name(self) -> str:
        """Name of the group."""
        ...

    def plain(self) -> PlainReport:
        """Converts the fields to JSON."""
        ...


R = TypeVar("R", bound=LighthouseReport)


@dataclass(frozen=True)
class Quorum(Generic[R]):
    """The islands that have asked for a quorum together.

    Attributes:
        number: number of the quorum, which grows with every change of the members.
        formed: time in ns by the lighthouse's clock, which distinguishes quorums with equal members.
        members: reports of the members.
        stores: HOST:PORT of each member's store, in the order of `members`.
        refused: identifiers of members whose report has no valid authentication code.
    """

    number: int
    formed: int
    members: tuple[R, ...]
    stores: tuple[str, ...]
    refused: tuple[str, ...]

    def store_of(self, name: str) -> str:
        """Returns HOST:PORT of a member's store."""
        return self.stores[[each.name for each in self.members].index(name)]


class LighthouseMember(Generic[R]):
    """An island's connection to the lighthouse: sends heartbeats from a thread, and asks for quorums.

    Args:
        address: HOST:PORT of the lighthouse.
        store: HOST:PORT of this island's store.
        secret: secret shared by all islands; empty without a secret.
        parse: parses a report from JSON.
    """

    def __init__(
        self, address: str, name: str, *, store: str, secret: bytes, parse: Callable[[PlainReport], R]
    ) -> None:
        self._parse = parse
        self._address, self._name, self._store, self._secret = address, name, store, secret
        # to the lighthouse a restarted island is a new one; of two with one name the later counts
        self._id = f"{name}:{time.time_ns():020d}"
        self._closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="lighthouse", daemon=True).start()

    def ask(self, member: R) -> Future[Quorum[R]]:
        """Asks for the next quorum; repeats the request until the lighthouse answers."""
        future = Future[Quorum[R]]()
        # a daemon: the lighthouse does not answer an island that has left, and exit would wait for a pool's thread
        threading.Thread(target=self._answer, args=(member, future), name="quorum", daemon=True).start()
        return future

    def close(self) -> None:
        """Stops the heartbeats: the other islands no longer wait for this one."""
        self._closed.set()

    def _answer(self, member: R, future: Future[Quorum[R]]) -> None:
        try:
            future.set_result(self._ask(member))
        except BaseException as error:
            future.set_exception(error)

    def _ask(self, member: R) -> Quorum[R]:
        from torchft.coordination import LighthouseClient  # noqa: PLC0415

        data = json.dumps(member.plain(), sort_keys=True)
        data_and_code = {"report": data, "code": _code(self._secret, self._id, self._store, data)}
        while True:
            try:
                client = LighthouseClient(self._address_url, timedelta(seconds=10))
                found = client.quorum(
                    self._id,
                    timedelta(seconds=_ASK_S),
                    address=self._store,
                    store_address=self._store,
                    step=0,
                    world_size=1,
                    shrink_only=False,
                    data=cast("dict[Any, object]", data_and_code),
                )
                created = found.created
                formed = int(created.seconds) * 10**9 + int(created.nanos)
                return authenticated(
                    int(found.quorum_id), formed, found.participants, secret=self._secret, parse=self._parse
                )
            except (RuntimeError, TimeoutError, ConnectionError):
                if self._closed.wait(_RETRY_S):
                    raise

    @property
    def _address_url(self) -> str:
        return f"http://{self._address}"

    def _send_heartbeats(self) -> None:
        from torchft.coordination import LighthouseClient  # noqa: PLC0415

        client = None
        while not self._closed.wait(HEARTBEAT_S if client else 0):
            try:
                client = client or LighthouseClient(self._address_url, _HEARTBEAT_LIMIT)
                client.heartbeat(self._id, _HEARTBEAT_LIMIT)
            except (RuntimeError, TimeoutError, ConnectionError):
                client = None
                self._closed.wait(_HEARTBEAT_RETRY_S)


def answer_of(asked: Future[Quorum[R]] | None, *, group: str) -> Quorum[R] | None:
    """Returns the requested quorum; None if it has not come within a second. Call it on the rank that has asked.

    Args:
        asked: the result of `LighthouseMember.ask`.
        group: kind of the asking group, for the message: island or replica.

    Raises:
        TrainingError: the lighthouse failed.
    """
    assert asked is not None
    try:
        return asked.result(_TICK_S)
    except NotYet:
        return None
    except RuntimeError as error:
        raise TrainingError(f"the lighthouse failed: {error}\n  try: start it again, then this {group}") from None


def authenticated(
    number: int, formed: int, participants: Sequence[Any], *, secret: bytes, parse: Callable[[PlainReport], R]
) -> Quorum[R]:
    """Returns the members of a quorum with valid codes; of two with one name the one started last.

    Args:
        number: number of the quorum.
        formed: time when it was formed, in ns by the lighthouse's clock.
        participants: torchft's `QuorumMember`s.
        secret: shared by all islands.
        parse: parses a report from JSON; raises KeyError, TypeError or ValueError for anything else.
    """
    found: dict[str, tuple[str, R, str]] = {}
    refused: list[str] = []
    for each in sorted(participants, key=lambda each: str(each.replica_id)):
        member = None
        with suppress(KeyError, TypeError, ValueError, RecursionError):
            data, code = str(each.data["report"]), str(each.data["code"])
            if hmac.compare_digest(code, _code(secret, each.replica_id, each.store_address, data)):
                member = parse(json.loads(data))
        if member is None or member.name != str(each.replica_id).rpartition(":")[0]:
            refused.append(str(each.replica_id))
            continue
        found[member.name] = (str(each.replica_id), member, str(each.store_address))
    entries = [found[name] for name in sorted(found)]
    return Quorum(
        number, formed, tuple(each[1] for each in entries), tuple(each[2] for each in entries), tuple(sorted(refused))
    )


def refuse_other_secret(quorum: Quorum[R], *, name: str, field: str = "islands") -> None:
    """Refuses to begin beside islands with another secret, since it is unknown which secret is wrong.

    Args:
        quorum: the quorum with this island.
        field: name of the config's section.

    Raises:
        ConfigError: islands have another secret; the error names them.
    """
    if quorum.refused:
        others = ", ".join(each.rpartition(":")[0] for each in quorum.refused)
        why = f"what {others} reported at the lighthouse does not verify with the secret of {name}"
        remedy = f"give all {field} the same {field}.secret_file, and each run a lighthouse of its own"
        raise ConfigError(f"{field}.secret_file", why=why, remedy=remedy)


def _code(secret: bytes, *parts: str) -> str:
    return hmac.new(secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()
