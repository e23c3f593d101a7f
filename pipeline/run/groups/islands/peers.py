"""The process group of one rank with the same rank of the other islands, formed anew when the islands change.

It is torchft's `ProcessGroupGloo` on an interface of our choice; torch's own group takes the interface of the host's
name, and its TCP store listens on all interfaces. If there is a secret, the members prove to each other that they have
it before anything is sent. The bytes are not encrypted. Every message is followed by its checksum; if it does not
match, the receiver asks for the message again. TCP's 16-bit checksum misses what a damaged relay has rewritten.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import TCPStore

from foundation.errors import HeadraceError

CHUNK_BYTES = 32 << 20
"""Largest number of bytes in one message of a state, since the time-out is per message."""

_ATTEMPTS = 3
"""Number of times a message is sent; the exchange fails if it arrives damaged each time."""

_RIGHT, _DAMAGED = (torch.tensor([value] * 8, dtype=torch.uint8) for value in (0x5A, 0xA5))
"""Verdicts of a receiver on a message. All 64 bits differ, so a damaged verdict can still be recognized."""

_VALUES, _SUM, _VERDICT = 0, 1, 2
"""Tags of a message, of its checksum, and of the receiver's verdict on it."""


class ExchangeError(HeadraceError):
    """An exchange with other islands or replicas failed: one has died or does not answer. It is then repeated."""


class PeerStore:
    """The store through which a quorum's process groups are formed; one per rank of an island.

    Args:
        bind: address to listen on.
    """

    def __init__(self, bind: str) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((bind.strip("[]"), 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            descriptor = os.dup(listener.fileno())
        timeout = timedelta(seconds=60)
        # libuv takes the listener over; the old server would bind to all interfaces
        self._store = TCPStore(
            bind, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
        )
        self.address = f"{bind}:{port}"


class Peers:
    """Connections to the other islands. Every call raises ExchangeError if a peer does not answer in time.

    Args:
        bind: address of this host on which peers connect.
        timeout_s: seconds after which a message counts as failed.
        secret: secret shared by all islands; empty without a secret.

    Attributes:
        rank: rank of this island in the quorum.
        size: number of islands.
        bytes_sent: bytes of values sent to other islands since this was last set to 0, repetitions included, without
            the 16 bytes of each message's checksum and verdict.
        damaged: number of messages that arrived here with a wrong checksum and were requested again.
    """

    def __init__(self, *, bind: str, timeout_s: float, secret: bytes) -> None:
        self._group = _make_group(bind, timeout_s)
        self._secret = secret
        self.rank, self.size, self.bytes_sent, self.damaged = 0, 1, 0, 0
        self._sent, self._received = Counter[int](), Counter[int]()  # number of messages in this group, by island

    def form(self, store: str, *, quorum: int, attempt: str, rank: int, size: int) -> None:
        """Forms the group of a quorum; closes the previous group.

        Args:
            store: HOST:PORT of the store of one of the quorum's islands.
            quorum: number of the quorum.
            attempt: name of this attempt to form the group, equal on all islands.
            rank: rank of this island in the group.
            size: number of islands.
        """
        self.rank, self.size = rank, size
        self._sent.clear()
        self._received.clear()
        if size > 1:
            with _failures():
                self._group.configure(f"{store}/{attempt}", str(rank), rank, size, quorum_id=quorum)
                self._prove(attempt)

    def all_to_all(self, values: Tensor) -> Tensor:
        """Sends part i of `values` to island i; returns the received parts, in the islands' order.

        Args:
            values: contiguous, dim 0 a multiple of the number of islands.
        """
        received = torch.empty_like(values)
        self._swap(values.chunk(self.size), received.chunk(self.size))
        return received

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Gathers the values of all islands, of equal shape and dtype, in the order of the islands."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        self._swap([values] * self.size, gathered)
        return gathered

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Sends `sent[i]` to island i and receives `received[i]` from it, for all islands at the same time.

        Receives are posted first. gloo sends nothing before it knows that the other side receives. That notice would
        queue up behind this side's data on the same connection, and the two directions would take turns, as in gloo's
        own all-to-all. gloo's all-gather uses a ring, with size - 1 round trips instead of one.
        """
        received[self.rank].copy_(sent[self.rank])
        others = [island for island in range(self.size) if island != self.rank]
        self._deliver({island: sent[island] for island in others}, {island: received[island] for island in others})

    def send(self, values: Tensor, *, to: int) -> None:
        """Sends bytes (uint8 [n]) to one island."""
        for part in values.split(CHUNK_BYTES):
            self._deliver({to: part}, {})

    def receive(self, values: Tensor, *, source: int) -> None:
        """Receives bytes (uint8 [n]) from one island, in place."""
        for part in values.split(CHUNK_BYTES):
            self._deliver({}, {source: part})

    def _deliver(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        """Sends and receives at the same time, by island, and repeats messages that arrive with a wrong checksum.

        A checksum includes the number of the message. So a repeated message is not taken for the next one, even if
        sender and receiver misread a verdict.

        Raises:
            ExchangeError: a peer does not answer, or a message arrives damaged for the `_ATTEMPTS`th time.
        """
        sent = {island: values.contiguous() for island, values in sent.items()}
        self._sent.update(sent.keys())
        self._received.update(received.keys())
        for _ in range(_ATTEMPTS):
            sums = {island: torch.empty(8, dtype=torch.uint8) for island in received}
            own = {island: _checksum(values, self._sent[island]) for island, values in sent.items()}
            self._transfer((_VALUES, sent, received), (_SUM, own, sums))
            self.bytes_sent += sum(values.nbytes for values in sent.values())
            wrong = {
                island
                for island, values in received.items()
                if not torch.equal(_checksum(values, self._received[island]), sums[island])
            }
            self.damaged += len(wrong)
            verdicts = {island: torch.empty(8, dtype=torch.uint8) for island in sent}
            mine = {island: _DAMAGED if island in wrong else _RIGHT for island in received}
            self._transfer((_VERDICT, mine, verdicts))
            sent = {island: sent[island] for island, said in verdicts.items() if not _is_right(said)}
            received = {island: received[island] for island in wrong}
            if not sent and not received:
                return
        among = ", ".join(str(island) for island in sorted({*sent, *received}))
        raise ExchangeError(f"messages to or from member {among} arrived damaged {_ATTEMPTS} times: check its network")

    def _transfer(self, *messages: tuple[int, dict[int, Tensor], dict[int, Tensor]]) -> None:
        """Sends and receives (tag, values to send by island, buffers for values to receive by island)."""
        with _failures():
            works = [self._group.recv([to], island, tag) for tag, _, room in messages for island, to in room.items()]
            works += [self._group.send([of], island, tag) for tag, sent, _ in messages for island, of in sent.items()]
            for work in works:
                work.wait()

    def close(self) -> None:
        """Closes the connections; a group may be formed again."""
        self._group.shutdown()

    def _prove(self, attempt: str) -> None:
        """Proves by answers to random challenges that this member has the secret, and checks the others' answers.

        Raises:
            ExchangeError: a member has another secret.
        """
        if not self._secret:
            return
        own = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)
        challenges = b"".join(bytes(each.tolist()) for each in self.all_gather(own))
        answer = torch.frombuffer(bytearray(self._answer(challenges, attempt, self.rank)), dtype=torch.uint8)
        for rank, given in enumerate(self.all_gather(answer)):
            if not hmac.compare_digest(bytes(given.tolist()), self._answer(challenges, attempt, rank)):
                raise ExchangeError(f"member {rank} of the exchange has another secret_file")

    def _answer(self, challenges: bytes, attempt: str, rank: int) -> bytes:
        return hmac.new(self._secret, challenges + f"{attempt} {rank}".encode(), hashlib.sha256).digest()


def _checksum(values: Tensor, number: int) -> Tensor:
    """Computes XXH3 of a contiguous tensor's bytes and the number of the message: uint8 [8]."""
    data = values.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(data.data, seed=number)), dtype=torch.uint8)


def _is_right(verdict: Tensor) -> bool:
    """Tells whether a verdict is nearer to `_RIGHT` than to `_DAMAGED`."""
    differing = int.from_bytes(bytes((verdict ^ _RIGHT).tolist()), "big").bit_count()
    return differing < 4 * len(_RIGHT)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Packs tensors into bytes, uint8 [n], on the CPU."""
    parts = [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack(values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes bytes from `pack` into tensors of the same shapes and dtypes, in place."""
    sizes = [each.nbytes for each in tensors]
    for part, target in zip(values.split(sizes), tensors, strict=True):
        # the bytes of a part need not be aligned for its dtype
        target.detach().copy_(part.clone().view(target.dtype).view(target.shape))


class _failures:  # noqa: N801  used as a keyword of a `with`
    """Turns torch's errors about a dead peer into an ExchangeError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, (RuntimeError, TimeoutError, ConnectionError)):
            text = (str(error) or repr(error)).splitlines()[0]
            raise ExchangeError(f"a member does not answer: {text}") from None


def _make_group(bind: str, timeout_s: float) -> Any:
    """Makes torchft's gloo group, listening on `bind` only."""
    from torch.distributed import ProcessGroupGloo as Gloo  # noqa: PLC0415
    from torchft.process_group import ProcessGroupGloo  # noqa: PLC0415

    class BoundGloo(ProcessGroupGloo):  # type: ignore[misc]
        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            options: Any = getattr(Gloo, "_Options")()  # noqa: B009  torch has no type for it
            options._devices = [Gloo.create_device(hostname=bind.strip("[]"))]
            options._timeout = timedelta(seconds=timeout_s)
            group = torch.distributed.ProcessGroup(store, rank, world_size)
            group._set_default_backend(torch.distributed.ProcessGroup.BackendType.GLOO)
            backend = Gloo(store, rank, world_size, options)
            backend._set_sequence_number_for_group()
            kind = torch.distributed.ProcessGroup.BackendType.GLOO
            group._register_backend(torch.device("cpu"), kind, backend)
            return group

    return BoundGloo(timeout=timedelta(seconds=timeout_s))
