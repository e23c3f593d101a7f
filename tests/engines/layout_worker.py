"""Runs layouts of an engine beside the one-process reference and tells how far apart they are.

Every rank runs trial.py CASES.json DIRECTORY, where `plain.py` has left the references, and will go on from the states
of the layouts. A case is a dict of config keys; `steps` is taken out. The micro-batches are made by hand, so that
nothing but the engines is compared.
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.base.section import parse
from pipeline.checkpoint import named_state
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.config.schema import Config
from pipeline.data.loader import IGNORE, MicroBatch, StepBatch
from pipeline.engines.base import Objective
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.objective import CrossEntropy
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.meta import build_meta
from pipeline.models.values import InitByName, ParameterValues
from tests.parity.matrix import model_of

SAMPLES, LENGTH, VOCABULARY, SAVED, LAST = 8, 32, 64, 2, 4
MODEL = {**model_of({"tied": True}), "vocab_size": VOCABULARY}
SAME = ("bf16", "fp16", "loss", "model", "gradient_clipping", "optimizer", "train_micro_batch_size_per_gpu")
"""Keys that the reference shares with a layout; the last because fp16 may overflow in a large micro-batch only."""


def reference_case(case: dict[str, Any]) -> dict[str, Any]:
    """The reference of a case, as a case."""
    return {key: case[key] for key in SAME if key in case}


def reference_directory(case: dict[str, Any]) -> str:
    """Where, in a trial's directory, the reference of a case leaves its curve and its state."""
    shared = json.dumps([reference_case(case), case.get("steps", LAST)], sort_keys=True)
    return f"reference-{zlib.crc32(shared.encode())}"


def layout_directory(name: str) -> str:
    """Where, in a trial's directory, a layout leaves its state."""
    return f"own-{zlib.crc32(name.encode())}"


@dataclass(frozen=True)
class Curve:
    """What a run did: losses and norms of its steps, sum of an evaluation, gradients of the first step by name."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    nats: float
    gradients: dict[str, Tensor]


def resolved(case: dict[str, Any], *, processes: int) -> ResolvedRun:
    """A run of a case on so many processes."""
    config = {
        "engine": "torch",
        "data": {"sources": [{"path": "none"}], "sequence_length": LENGTH},
        "train_batch_size": SAMPLES,
        "optimizer": {"params": {"lr": 3e-3, "betas": [0.0, 0.95], "weight_decay": 0.1}},
        "run": {"dir": "none", "steps": 20},
        **case,
        "model": {"config": {**MODEL, **case.get("model", {})}},
    }
    return resolve(parse(Config, config), world_size=processes)


def make_engine(run: ResolvedRun, objective: Objective | None = None) -> Any:
    """An engine of the run, for its own objective unless another is given."""
    hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
    model = build_meta(hf, dtype=model_dtype(run.config), attn_implementation="sdpa" if run.plain else ATTENTION_NAME)
    objective, plain = objective or CrossEntropy(z_loss=run.config.loss.z_loss), InitByName(model, seed=3)
    values: ParameterValues = plain
    if not run.plain and run.config.engine == "torch":
        values = OneParameterAtATime(plain, lingering=0)
    elif not run.plain and run.config.zero_optimization.stage == 3:
        values = OneParameterAtATime(plain, lingering=1)  # one may live on for a moment, in a message that is under way
    return build_engine(run, model, values, objective, device=torch.device("cpu"))


class OneParameterAtATime:
    """Values of parameters of which no more than `lingering` may still be held when the next is asked for."""

    def __init__(self, values: ParameterValues, *, lingering: int) -> None:
        self._values, self._lingering, self._given = values, lingering, list[StorageWeakRef]()

    def value(self, name: str) -> Tensor:
        """The full value."""
        held = sum(not given.expired() for given in self._given)
        assert held <= self._lingering, f"{held} parameters before {name} are still held whole"
        value = self._values.value(name)
        self._given.append(StorageWeakRef(value.untyped_storage()))
        return value


def step_batch(run: ResolvedRun, step: int) -> StepBatch:
    """This rank's part of a step of tokens that can be learnt, a tenth of which are no targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 5, (SAMPLES, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORE
    place = run.topology.coordinates(0 if run.plain else dist.get_rank())
    own = LENGTH // run.topology.cp
    piece = slice(place["cp"] * own, (place["cp"] + 1) * own)
    micros = []
    for number in range(run.batch.accumulation):
        first = (number * run.batch.dp + place["dp"]) * run.batch.micro
        rows = torch.arange(first, first + run.batch.micro)
        filling, rows = rows >= SAMPLES, rows.clamp(max=SAMPLES - 1)
        own_labels = labels[rows, piece].masked_fill(filling[:, None], IGNORE)
        micros.append(MicroBatch(tokens[rows, :-1][:, piece].contiguous(), own_labels))
    return StepBatch(step, micros, int((labels != IGNORE).sum()))


def train(run: ResolvedRun, engine: Any, *, first: int, last: int, save: Path | None = None) -> Curve:
    """Trains from one step to another; evaluates in the middle, when nothing may change by it, and at the end."""
    results, gradients = [], {}
    for step in range(first, last + 1):
        results.append(engine.train_step(step_batch(run, step), lr=3e-4 * step))
        if step == 1:
            gradients = dict(first_moments(engine))
        if step == SAVED and save is not None:
            engine.evaluate(iter(step_batch(run, 98).micro_batches))
            save.mkdir(exist_ok=True)
            named_state.write(engine.state(), save)
    nats = engine.evaluate(iter(step_batch(run, 99).micro_batches)).nats
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    return Curve(losses, norms, [r.skipped for r in results], nats, gradients)


def first_moments(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Name -> first moment, as a full tensor that is zero where another rank holds it; beta 0 makes it the gradient."""
    state = engine._named_state()
    for key, held in state.items():
        if key.startswith("exp_avg/"):
            full = torch.zeros(held.shape)
            for offsets, part in held._parts.items():
                full[tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
            yield key.removeprefix("exp_avg/"), full


def compare(run: ResolvedRun, expected: Curve, saved: Path, own: Path) -> dict[str, Any]:
    """How far a layout is from the reference, relatively, the largest over steps, names and ranks; and its losses.

    Args:
        run: of the layout.
        expected: what the reference did.
        saved: the reference's state after step `SAVED`.
        own: where this layout's is to be.
    """
    steps = len(expected.losses)
    found = train(run, make_engine(run), first=1, last=steps, save=own)
    resumed = make_engine(run)
    resumed.load(saved)
    there = train(run, resumed, first=SAVED + 1, last=LAST)
    assert found.skipped == expected.skipped, (found.skipped, expected.skipped)
    return {
        "gradient": max(
            gradient_difference(found.gradients.get(name), full) for name, full in expected.gradients.items()
        ),
        "loss": largest_difference_over_ranks(found.losses, expected.losses),
        "norm": largest_difference_over_ranks(found.norms, expected.norms),
        "evaluation": largest_difference_over_ranks([found.nats], [expected.nats]),
        "resumed": largest_difference_over_ranks(there.losses, expected.losses[SAVED:LAST]),
        "skipped": sum(found.skipped),
        "share": weight_share(resumed, expected),
        "losses": found.losses,
    }


def weight_share(engine: Any, expected: Curve) -> float:
    """This rank's part of the weights; of DeepSpeed's engine it is not asked."""
    if not hasattr(engine, "_parts"):
        return float("nan")
    return float(sum(p.master.numel() for p in engine._parts) / sum(g.numel() for g in expected.gradients.values()))


def gradient_difference(parts: Tensor | None, full: Tensor) -> float:
    """Joins a tensor's parts over the ranks and tells how far it is from the full one, relative to its norm."""
    parts = torch.zeros_like(full) if parts is None else parts
    copies = (parts != 0).float()
    for tensor in (parts, copies):
        dist.all_reduce(tensor)
    return float((parts / copies.clamp(min=1) - full).norm() / full.norm().clamp(min=1e-30))


def largest_difference_over_ranks(found: list[float], expected: list[float]) -> float:
    """Largest relative difference, of the rank where it is largest; steps that were skipped have no norm."""
    worst = torch.tensor(largest_difference(found, expected), dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Largest relative difference."""
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if torch.tensor([f, e]).isfinite().all()]
    return max((abs(f - e) / abs(e) for f, e in pairs), default=0.0)


def main() -> None:
    """Runs all cases beside what `plain` has left; rank 0 writes what was found."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results, work = {}, Path(sys.argv[2])
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        saved = work / reference_directory(case)
        expected = torch.load(saved / "curve.pt", weights_only=False)
        layout = {key: value for key, value in case.items() if key != "steps"}
        try:
            run = resolved(layout, processes=dist.get_world_size())
            results[name] = compare(run, expected, saved, work / layout_directory(name))
        except Exception as error:
            error.add_note(f"in the layout: {name}")
            raise
    if dist.get_rank() == 0:
        (work / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
