"""Runs many short trainings with `prepare` in one launch, to start processes once: worker.py CASES.json OUT.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from pipeline.own_loop import prepare

SAMPLES, FEATURES, BATCH = 64, 8, 16


class Collectives(TorchDispatchMode):
    """Records the dtypes of what is all-gathered and reduce-scattered within it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            self.dtypes.setdefault(name, set()).add(str(args[0].dtype))
        return func(*args, **(kwargs or {}))


def data() -> tuple[Tensor, Tensor]:
    """Inputs [64, 8] and targets [64, 3]; the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, torch.sin(inputs @ torch.randn(FEATURES, 3, generator=generator))


def network(kind: str, *, seed: int = 11) -> nn.Module:
    """A small network with blocks that can be gathered one by one; "norm" has BatchNorm, "tied" a shared matrix.

    "experts" has experts of which only the chosen ones run.
    """
    torch.manual_seed(seed)
    if kind == "tied":
        return Tied()
    if kind == "experts":
        layers = nn.ModuleList([Experts(), Experts()])
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Sequential(*layers), nn.Linear(16, 3))
    middle: nn.Module = nn.BatchNorm1d(16) if kind == "norm" else nn.LayerNorm(16)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    # a bias before BatchNorm has no gradient but rounding errors, which Adam would make steps of
    first = nn.Linear(FEATURES, 16, bias=kind != "norm")
    return nn.Sequential(first, middle, nn.GELU(), *blocks, nn.Linear(16, 3))


class Tied(nn.Module):
    """Uses one matrix twice, and has a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(FEATURES, 16), nn.Linear(FEATURES, 16), nn.Linear(16, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) + self.second(x))


class Experts(nn.Module):
    """A layer in which every sample goes to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = 2 * (x[:, 0] > 0).int() + (x[:, 1] > 0).int(), x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return out


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """What the user brings; None leaves it to the config."""
    if kind == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2) if kind == "adamw" else None


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Trains a case and returns the mean loss of every update, norms and what became of the model."""
    # where the ranks' own weights differ, rank 0's count
    model = network(case.get("network", "plain"), seed=11 + int(os.environ.get("RANK", "0")))
    optimizer = optimizer_of(case.get("optimizer", "adamw"), model)
    scheduler = None
    if case.get("user_schedule"):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    engine, _, loader = prepare(model, optimizer, loader, config=case["config"], scheduler=scheduler)
    done = engine.load(case["load"]) if "load" in case else 0
    losses, norms, rates, now = [], [], [], []
    saved, collectives = None, Collectives()
    for _epoch in range(case.get("epochs", 2)):
        for x, y in loader:
            with collectives:
                now.append(float(engine.backward(nn.functional.mse_loss(engine(x), y))))
            if engine.step():
                losses.append(sum(now) / len(now))
                norms.append(engine.grad_norm)
                rates.append(engine._groups()[0]["lr"])
                now = []
        if "save" in case and saved is None:
            saved = str(engine.save(case["save"]))
    buffers = {name: value.tolist() for name, value in model.named_buffers()}
    if "save_model" in case:
        engine.save_model(case["save_model"])
    seen = engine.gather_for_metrics({"x": x, "rank": torch.tensor(engine.rank)}) if case.get("gather") else None
    gathered = None if seen is None else {"x": seen["x"].tolist(), "rank": seen["rank"].tolist()}
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "done": done,
        "buffers": buffers,
        "dtypes": dtypes,
        "gathered": gathered,
        "collectives": {name: sorted(seen) for name, seen in collectives.dtypes.items()},
    }


def main() -> None:
    """Runs all cases; a failed case has its error in place of results."""
    cases, out = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, case in cases.items():
        out[name] = run(case)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
