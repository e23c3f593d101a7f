"""Messages between the same ranks of two replicas: plain JSON and tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.islands.peers import Peers, pack


def send(peers: Peers, header: dict[str, Any], tensors: Sequence[Tensor], *, to: Sequence[int]) -> None:
    """Sends the same message to some peers.

    Raises:
        ExchangeError: one does not answer.
    """
    head, body = _bytes(json.dumps(header).encode()), pack(tensors)
    sizes = torch.tensor([head.numel(), body.numel()], dtype=torch.int64).view(torch.uint8)
    for rank in to:
        for part in (sizes, head, body):
            peers.send(part, to=rank)


def receive(peers: Peers, *, source: int) -> tuple[dict[str, Any], Tensor]:
    """Receives a message: its header, and the bytes of its tensors, as `unpack` takes them.

    Raises:
        ExchangeError: the peer does not answer.
    """
    sizes = torch.empty(16, dtype=torch.uint8)
    peers.receive(sizes, source=source)
    parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.view(torch.int64).tolist()]
    for part in parts:
        peers.receive(part, source=source)
    header: dict[str, Any] = json.loads(bytes(parts[0].numpy()))
    return header, parts[1]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
