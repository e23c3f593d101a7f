"""Messages between the same ranks of two replicas, and the state that a joining replica takes from a living one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.format.shard_table import all_parts
from pipeline.data.skips import Skips
from pipeline.engines.base import Engine
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.groups.islands.peers import Peers, pack, unpack
from pipeline.run.groups.replicas.deal import ReplicaMember


def digest(stepper: GuardedStepper) -> str:
    """Computes a digest of the last losses, gradient norms and skipped data; it differs if replicas have diverged."""
    text = json.dumps([stepper.state_dict(), stepper.skips.plain()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def send_state(
    peers: Peers, member: ReplicaMember, engine: Engine, stepper: GuardedStepper, *, to: Sequence[int]
) -> None:
    """Sends the state of this rank to the same ranks of replicas that join late.

    Args:
        peers: the process group.
        member: this replica's report.
        engine: engine with weights and optimizer states.
        stepper: stepper with the statistics of loss spikes, and the skips.
        to: ranks in the process group.

    Raises:
        ExchangeError: a peer does not answer.
    """
    header = {
        **{key: getattr(member, key) for key in ("step", "exchanges", "commit")},
        "anomalies": stepper.state_dict(),
        "skips": stepper.skips.plain(),
    }
    with engine.edit_state() as state:
        send_message(peers, header, all_parts(state), to=to)


def take_state(
    header: dict[str, Any], packed: Tensor, member: ReplicaMember, engine: Engine, stepper: GuardedStepper
) -> ReplicaMember:
    """Takes the state that `send_state` has sent.

    Args:
        header, packed: the received message (see `receive_message`).
        member: this replica's report.
        engine, stepper: engine and stepper of this rank, which take the state.

    Returns:
        This replica's new report, without the result of the last exchange.
    """
    with engine.edit_state() as state:
        unpack(packed, all_parts(state))
    stepper.load_state_dict(header["anomalies"])
    stepper.skips = Skips.of(header["skips"])
    place = {key: header[key] for key in ("step", "exchanges", "commit")}
    return replace(member, **place, before=None, state=digest(stepper))


def send_message(peers: Peers, header: dict[str, Any], tensors: Sequence[Tensor], *, to: Sequence[int]) -> None:
    """Sends one message to several peers, tensor by tensor: the host has a copy of only one at a time.

    Raises:
        ExchangeError: a peer does not answer.
    """
    head = _bytes(json.dumps({"header": header, "sizes": [each.nbytes for each in tensors]}).encode())
    size = torch.tensor([head.numel()], dtype=torch.int64).view(torch.uint8)
    for part in chain((size, head), (pack([each]) for each in tensors)):
        for rank in to if part.numel() else ():
            peers.send(part, to=rank)


def receive_message(peers: Peers, *, source: int) -> tuple[dict[str, Any], Tensor]:
    """Receives a message: its header, and the bytes of its tensors, for `unpack`.

    Raises:
        ExchangeError: the peer does not answer.
    """
    size = torch.empty(8, dtype=torch.uint8)
    peers.receive(size, source=source)
    head = torch.empty(int(size.view(torch.int64)), dtype=torch.uint8)
    peers.receive(head, source=source)
    found: dict[str, Any] = json.loads(bytes(head.numpy()))
    body = torch.empty(sum(found["sizes"]), dtype=torch.uint8)
    for part in body.split(found["sizes"]):
        if part.numel():  # a rank's shard of a small tensor may be empty
            peers.receive(part, source=source)
    return found["header"], body


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
