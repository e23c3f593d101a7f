"""Messages between the same ranks of two replicas: plain JSON and tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pipeline.run.groups.islands.peers import Peers, pack


def send(peers: Peers, header: dict[str, Any], tensors: Sequence[Tensor], *, to: Sequence[int]) -> None:
    """Sends the same message to some peers, one tensor after another: the host has a copy of one at a time.

    Raises:
        ExchangeError: one does not answer.
    """
    head = _bytes(json.dumps({"header": header, "sizes": [each.nbytes for each in tensors]}).encode())
    size = torch.tensor([head.numel()], dtype=torch.int64).view(torch.uint8)
    for part in chain((size, head), (pack([each]) for each in tensors)):
        for rank in to if part.numel() else ():
            peers.send(part, to=rank)


def receive(peers: Peers, *, source: int) -> tuple[dict[str, Any], Tensor]:
    """Receives a message: its header, and the bytes of its tensors, as `unpack` takes them.

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
