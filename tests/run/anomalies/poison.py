"""Makes steps of real engines non-finite, and compares their state. poison.py CASES.json RESULTS.json on every rank."""

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

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.base import NO_UPDATE
from pipeline.engines.objective import CrossEntropy, Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from tests.engines.layout_worker import make_engine, resolved, step_batch

POISONED, LAST = 3, 5


class _BadGradient(torch.autograd.Function):
    """The identity, with a NaN gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ARG004
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        return gradient * float("nan")


class Poisonous(CrossEntropy):
    """Cross-entropy with a fault on this rank: none, loss (NaN) or gradient (NaN, of a finite loss)."""

    fault = "none"

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        loss = super().__call__(logits, labels, *extra_targets, vocabulary=vocabulary)
        total = loss.total * float("nan") if self.fault == "loss" else loss.total
        return Loss(_BadGradient.apply(total) if self.fault == "gradient" else total, loss.parts)


def local_state(engine: Any) -> dict[str, Tensor]:
    found = {}
    for key, value in engine.state().items():
        parts = value.parts if hasattr(value, "parts") else {(): value}
        found |= {f"{key}{offsets}": part.detach().clone() for offsets, part in parts.items()}
    return found


def evaluate(engine: Any, run: Any) -> float:
    """A held-out loss sum, which also covers the weights used in the forward pass, not only the saved state."""
    batch: list[MicroBatch] = step_batch(run, 99).micro_batches
    return float(engine.evaluate(iter(batch)).nats)


def train_poisoned(run: Any, fault: str) -> dict[str, Any]:
    """Five steps with a fault in the third."""
    objective = Poisonous()
    engine = make_engine(run, objective)
    losses, found = [], {}
    for step in range(1, LAST + 1):
        if step != POISONED:
            losses.append(engine.train_step(step_batch(run, step), lr=1e-3).loss)
            continue
        before, score = local_state(engine), evaluate(engine, run)
        # on one data rank only: all others must notice
        own = run.alone or run.topology.coordinates(dist.get_rank())["dp"] == run.topology.dp - 1
        objective.fault = {"ahead": "loss"}.get(fault, fault) if own else "none"
        closed = {"limits": NO_UPDATE} if fault == "gate" else {}
        begun = engine.begin_step(step_batch(run, step), lr=1e-3, **closed)
        if fault == "ahead":  # the next step is begun before anyone has looked at this one
            objective.fault = "none"
            engine.begin_step(step_batch(run, step + 1), lr=1e-3, after=begun)
        result = begun.result()
        again = engine.train_step(step_batch(run, step), lr=1e-3, **closed) if closed else result
        objective.fault = "none"
        after = local_state(engine)
        same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        found = {"outcome": result.outcome, "loss": str(result.loss), "norm": str(result.grad_norm)}
        found |= {"loss again": str(again.loss), "norm again": str(again.grad_norm)}
        found |= {"same": same, "entries": len(before), "same score": score == evaluate(engine, run)}
    return {**found, "losses": losses}


def train_without_step(run: Any) -> list[float]:
    """Losses of a run without the third step."""
    engine = make_engine(run, Poisonous())
    return [engine.train_step(step_batch(run, s), lr=1e-3).loss for s in range(1, LAST + 1) if s != POISONED]


def main() -> None:
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        run = resolved(case, processes=dist.get_world_size() if several else 1)
        native = ["ahead"] if case["engine"] == "torch" else []
        own = {fault: train_poisoned(run, fault) for fault in ("loss", "gradient", "gate", *native)}
        own["without"] = train_without_step(run)
        results_of_ranks: list[Any] = [own]
        if several:
            results_of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(results_of_ranks, own)
        results[name] = results_of_ranks
    if not several or dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
