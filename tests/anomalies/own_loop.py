"""A loop of one's own in which one update's loss is not a number. own_loop.py CASES.json RESULTS.json on every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headrace.base.errors import TrainingError
from pipeline.own_loop import prepare
from tests.own_loop.worker import BATCH, data, network, optimizer_of

BAD = 2


def held(engine: Any) -> list[Tensor]:
    """This rank's fp32 weights and optimizer state, copied."""
    found = []
    for piece in engine._pieces():
        found += [piece.shard(piece.holder.data), *(v for v in piece.state.values() if torch.is_tensor(v))]
    parts = [list(each._parts.values()) if hasattr(each, "_parts") else [each] for each in found]
    return [part.detach().clone() for each in parts for part in each]


def trained(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Some updates, of which one is poisoned, left out, or neither."""
    model = network("plain", seed=11)
    engine, _, loader = prepare(
        model, optimizer_of("adamw", model), DataLoader(TensorDataset(*data()), batch_size=BATCH), config=config
    )
    losses, found = [], {"raised": False, "same": False}
    for number, (x, y) in enumerate(loader):
        if number == BAD and how == "left out":
            continue
        before = held(engine)  # FSDP2 gathers weights for the forward pass
        loss = nn.functional.mse_loss(engine(x), y)
        if number != BAD or how != "poisoned":
            losses.append(float(engine.backward(loss)))
            engine.step()
            continue
        engine.backward(loss * (float("nan") if dist.get_rank() == 1 else 1.0))
        try:
            engine.step()
        except TrainingError:
            after = held(engine)
            found = {"raised": True, "same": all(map(torch.equal, before, after)), "entries": len(before)}
    return {**found, "losses": losses}


def main() -> None:
    """Runs all cases; rank 0 writes what all ranks found."""
    results: dict[str, Any] = {}
    for name, config in json.loads(Path(sys.argv[1]).read_text()).items():
        own = {how: trained(config, how) for how in ("poisoned", "left out")}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        results[name] = everyone
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
