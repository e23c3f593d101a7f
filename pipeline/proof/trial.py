"""One rank of one proof: the run's own preparation, engine and loader, without a journal or checkpoints.

Importing this module imports what every rank needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.base.section import parse
from pipeline.checkpoint import named_state
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.config.schema import Config
from pipeline.data.loader import MicroBatch, StepLoader, heldout_batches
from pipeline.engines.base import Engine
from pipeline.engines.build import build_engine
from pipeline.engines.common import refuse_result
from pipeline.engines.objective import CrossEntropy
from pipeline.launch import Launch, process_group
from pipeline.proof.case import Case, CaseResult, write_outcome
from pipeline.run.prepare import PreparedRun, prepare


def go(case: Case, own: Path, *, rank: int, port: int) -> None:
    """Runs a case as one of its ranks; rank 0 writes the outcome.

    Args:
        case: what to run.
        own: the case's directory.
        rank: which rank this process is.
        port: where the ranks meet.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    config = parse(Config, {**case.config, "run": {**case.config["run"], "dir": str(own / "run")}})
    run = resolve(config, world_size=case.processes)
    prepared = prepare(run)
    launch = Launch("proof", rank, case.processes, rank, f"127.0.0.1:{port}")
    with nullcontext() if run.plain else process_group(launch, gpu=None, timeout_s=120.0):
        objective = CrossEntropy(z_loss=config.loss.z_loss)
        engine = build_engine(run, prepared.model, prepared.values, objective, device=torch.device("cpu"))
        outcome = _train(case, own, prepared, engine, _share(run, rank))
        if rank == 0:
            write_outcome(outcome)


def _share(run: ResolvedRun, rank: int) -> dict[str, Any]:
    place = run.topology.coordinates(rank)
    masks = run.config.data.mask_documents
    return {"dp_rank": place["dp"], "cp": run.topology.cp, "cp_rank": place["cp"], "mask_documents": masks}


def _train(case: Case, own: Path, prepared: PreparedRun, engine: Engine, share: dict[str, Any]) -> CaseResult:
    run = prepared.run
    outcome = CaseResult(own, layout=run.layout)
    for batch in _steps(prepared, share, first=1):
        result = refuse_result(batch.step, engine.train_step(batch, lr=run.schedule.lr(batch.step)))
        outcome.losses[batch.step], outcome.norms[batch.step] = result.loss, result.grad_norm
        if batch.step in case.save:
            _save(engine, outcome.state(batch.step))
    sums = engine.evaluate(_heldout(prepared, share))
    if case.again is not None:
        name, done = case.again
        engine.load(CaseResult(own.parent / name).state(done))
        for batch in _steps(prepared, share, first=done + 1):
            outcome.again[batch.step] = engine.train_step(batch, lr=run.schedule.lr(batch.step)).loss
    return replace(outcome, heldout=sums.nats / sums.targets)


def _steps(prepared: PreparedRun, share: dict[str, Any], *, first: int) -> StepLoader:
    run = prepared.run
    return StepLoader(prepared.mixture, run.batch, **share, steps=(first, run.steps), prefetch=1)


def _save(engine: Engine, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    named_state.write(engine.state(), directory)


def _heldout(prepared: PreparedRun, share: dict[str, Any]) -> Iterator[MicroBatch]:
    batch = prepared.run.batch
    # as many samples in every layout, whatever the micro-batch
    return heldout_batches(prepared.heldout[0], batch_size=batch.micro, dp=batch.dp, samples=batch.samples, **share)
