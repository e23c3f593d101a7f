"""Poisons steps of real engines, and tells what was left of it. Every rank runs poison.py CASES.json RESULTS.json."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.loader import MicroBatch
from pipeline.engines.base import never_update
from pipeline.engines.objective import CrossEntropy, Loss
from pipeline.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from tests.engines.layout_worker import make_engine, resolved, step_batch

POISONED, LAST = 3, 5


class _BadGradient(torch.autograd.Function):
    """The identity, but its gradient is not a number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ARG004
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient * float("nan")


class Poisonous(CrossEntropy):
    """Cross-entropy that can be told to go wrong, on this rank.

    Attributes:
        how: none, loss (which is NaN) or gradient (which is NaN, of a loss that is not).
    """

    how = "none"

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """As `CrossEntropy`."""
        loss = super().__call__(logits, labels, *extra_targets, vocabulary=vocabulary)
        total = loss.total * float("nan") if self.how == "loss" else loss.total
        return Loss(_BadGradient.apply(total) if self.how == "gradient" else total, loss.parts)


def held(engine: Any) -> dict[str, Tensor]:
    """A copy of all that a checkpoint of this rank would hold."""
    found = {}
    for key, value in engine.state().items():
        parts = value._parts if hasattr(value, "_parts") else {(): value}
        found |= {f"{key}{offsets}": part.detach().clone() for offsets, part in parts.items()}
    return found


def evaluated(engine: Any, run: Any) -> float:
    """A held-out sum: what is computed with, not only what is kept, must be as it was."""
    batch: list[MicroBatch] = step_batch(run, 99).micro_batches
    return float(engine.evaluate(iter(batch)).nats)


def poisoned(run: Any, how: str) -> dict[str, Any]:
    """Five steps of which the third goes wrong."""
    objective = Poisonous()
    engine = make_engine(run, objective)
    losses, found = [], {}
    for step in range(1, LAST + 1):
        if step != POISONED:
            losses.append(engine.train_step(step_batch(run, step), lr=1e-3).loss)
            continue
        before, score = held(engine), evaluated(engine, run)
        # on one data rank alone: the others must come to know
        own = run.plain or run.topology.coordinates(dist.get_rank())["dp"] == run.topology.dp - 1
        objective.how = how if own else "none"
        closed = {"update_gate": never_update} if how == "gate" else {}
        result = engine.train_step(step_batch(run, step), lr=1e-3, **closed)
        again = engine.train_step(step_batch(run, step), lr=1e-3, **closed) if closed else result
        objective.how = "none"
        after = held(engine)
        same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        found = {"outcome": result.outcome, "loss": str(result.loss), "norm": str(result.grad_norm)}
        found |= {"loss again": str(again.loss), "norm again": str(again.grad_norm)}
        found |= {"same": same, "entries": len(before), "same score": score == evaluated(engine, run)}
    return {**found, "losses": losses}


def without(run: Any) -> list[float]:
    """Losses of a run that never did the third step."""
    engine = make_engine(run, Poisonous())
    return [engine.train_step(step_batch(run, s), lr=1e-3).loss for s in range(1, LAST + 1) if s != POISONED]


def main() -> None:
    """Runs all cases; rank 0 writes what all ranks found."""
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        run = resolved(case, processes=dist.get_world_size() if several else 1)
        own = {how: poisoned(run, how) for how in ("loss", "gradient", "gate")} | {"without": without(run)}
        everyone: list[Any] = [own]
        if several:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
        results[name] = everyone
    if not several or dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
