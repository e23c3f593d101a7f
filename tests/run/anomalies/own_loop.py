"""A custom training loop in which the loss of one update is NaN. own_loop.py CASES.json RESULTS.json on every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from foundation.errors import TrainingError
from pipeline.own_loop import prepare
from tests.own_loop.worker import BATCH, data, network, optimizer_of

BAD_UPDATE = 2


def local_state(engine: Any) -> list[Tensor]:
    found = []
    for piece in engine._state_entries():
        found += [piece.shard(piece.holder.data), *(v for v in piece.state.values() if torch.is_tensor(v))]
    parts = [list(each.parts.values()) if hasattr(each, "parts") else [each] for each in found]
    return [part.detach().clone() for each in parts for part in each]


def train(config: dict[str, Any], mode: str) -> dict[str, Any]:
    """Some updates, of which one is "poisoned" or "left out"."""
    model = network("plain", seed=11)
    engine, _, loader = prepare(
        model, optimizer_of("adamw", model), DataLoader(TensorDataset(*data()), batch_size=BATCH), config=config
    )
    losses, found = [], {"raised": False, "same": False}
    for number, (x, y) in enumerate(loader):
        if number == BAD_UPDATE and mode == "left out":
            continue
        before = local_state(engine)  # FSDP2 gathers weights for the forward pass
        loss = nn.functional.mse_loss(engine(x), y)
        if number != BAD_UPDATE or mode != "poisoned":
            losses.append(float(engine.backward(loss)))
            engine.step()
            continue
        engine.backward(loss * (float("nan") if dist.get_rank() == 1 else 1.0))
        try:
            engine.step()
        except TrainingError:
            after = local_state(engine)
            found = {"raised": True, "same": all(map(torch.equal, before, after)), "entries": len(before)}
    return {**found, "losses": losses}


def main() -> None:
    results: dict[str, Any] = {}
    for name, config in json.loads(Path(sys.argv[1]).read_text()).items():
        own = {mode: train(config, mode) for mode in ("poisoned", "left out")}
        results_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results_of_ranks, own)
        results[name] = results_of_ranks
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
