"""One rank of a proof's training run: the usual preparation, engine and loader, without journal or checkpoints.

Importing this module imports all dependencies of a rank.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundation.section import parse
from pipeline.checkpoint import named_state
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config
from pipeline.data.loader import StepLoader, heldout_batches
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.base import Engine
from pipeline.engines.build import build_engine
from pipeline.engines.common import require_finite_step
from pipeline.engines.parallel.multi_token import training_loss
from pipeline.models.construction.counter import CPU, normal
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.rectangle import Rectangle, part
from pipeline.plan.proof.case import Case, CaseResult, write_result
from pipeline.run.prepare import PreparedRun, prepare
from pipeline.runtime.launch import Launch, process_group
from pipeline.runtime.metrics.own_time import host_seconds, kernel_seconds, profiled

PROFILED = 3
"""Last steps of a case that are profiled if it is timed."""


def run_rank(case: Case, directory: Path, *, rank: int, port: int, gpu: bool = False) -> None:
    """Runs a case as one of its ranks; rank 0 writes the result.

    Args:
        case: the training run.
        directory: directory of the case.
        rank: rank of this process.
        port: port for the rendezvous of the ranks.
        gpu: whether the rank computes on the GPU of its number.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    config = parse(Config, {**case.config, "run": {**case.config["run"], "dir": str(directory / "run")}})
    run = resolve(config, world_size=case.processes)
    prepared = prepare(run)
    launch = Launch("proof", rank, case.processes, rank, f"127.0.0.1:{port}")
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    with nullcontext() if run.alone else process_group(launch, gpu=device.index, timeout_s=120.0):
        objective = training_loss(config.loss)
        values = _Perturbed(prepared.values, case.noise) if case.noise else prepared.values
        coordinates = run.topology.coordinates(rank)
        loader_arguments = {
            "dp_rank": coordinates["dp"],
            "cp": run.topology.cp,
            "cp_rank": coordinates["cp"],
            "zigzag": run.zigzag,
            "mask_documents": config.data.mask_documents,
        }
        engine = build_engine(run, prepared.model, values, objective, device=device)
        case_result = _train(case, directory, prepared, engine, loader_arguments)
        if rank == 0:
            write_result(case_result)


class _Perturbed:
    """Initial values with relative normal noise, the same in every process.

    Args:
        values: initial values without noise.
        size: standard deviation of the noise, relative to each element.
    """

    def __init__(self, values: ParameterValues, size: float) -> None:
        self._values, self._size = values, size

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> torch.Tensor:
        """The value of a parameter, with noise (see `ParameterValues.value`)."""
        value = self._values.value(name, device=device)
        noise = normal(tuple(value.shape), key=zlib.crc32(name.encode()), device=device)
        return part(value * (1 + self._size * noise), box)

    def buffer(self, name: str) -> torch.Tensor | None:
        """The value of a buffer, without noise (see `ParameterValues.buffer`)."""
        return self._values.buffer(name)


def _train(
    case: Case, directory: Path, prepared: PreparedRun, engine: Engine, loader_arguments: dict[str, Any]
) -> CaseResult:
    run = prepared.run
    case_result = CaseResult(directory, layout=run.layout)
    own_s: list[float] = []
    for batch in _steps(prepared, loader_arguments, first=1):
        profiles = case.timed and batch.step > run.steps - PROFILED
        started = time.perf_counter()
        with ExitStack() as stack:
            spans = stack.enter_context(profiled(gpu=torch.cuda.is_initialized())) if profiles else []
            result = require_finite_step(batch.step, engine.train_step(batch, lr=run.schedule.lr(batch.step)))
            case_result.step_s[batch.step] = time.perf_counter() - started
        own_s += [max(host_seconds(spans), kernel_seconds(spans))] if profiles else []
        case_result.losses[batch.step], case_result.grad_norms[batch.step] = result.loss, result.grad_norm
        if batch.step in case.save:
            _save(engine, case_result.state(batch.step))
    if case.timed:
        case_result.own_s.extend(_of_all_ranks(min(own_s)))
    sums = engine.evaluate(_heldout(prepared, loader_arguments)) if prepared.heldout else None
    if case.resume_from is not None:
        name, saved = case.resume_from
        engine.load(CaseResult(directory.parent / name).state(saved))
        if case.resave:
            _save(engine, case_result.state(saved))
        for batch in _steps(prepared, loader_arguments, first=saved + 1):
            case_result.resumed_losses[batch.step] = engine.train_step(batch, lr=run.schedule.lr(batch.step)).loss
    return case_result if sums is None else replace(case_result, heldout_loss=sums.nats / sums.targets)


def _of_all_ranks(value: float) -> list[float]:
    """The values of all ranks. Collective."""
    if not dist.is_initialized():
        return [value]
    found = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _steps(prepared: PreparedRun, loader_arguments: dict[str, Any], *, first: int) -> StepLoader:
    run = prepared.run
    return StepLoader(prepared.mixture, run.batch, **loader_arguments, steps=(first, run.steps), prefetch=1)


def _save(engine: Engine, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    named_state.write(engine.state(), directory)


def _heldout(prepared: PreparedRun, loader_arguments: dict[str, Any]) -> Iterator[MicroBatch]:
    batch = prepared.run.batch
    # the same number of samples in every layout, whatever the micro-batch size
    return heldout_batches(
        prepared.heldout[0], batch_size=batch.micro, dp=batch.dp, samples=batch.samples, **loader_arguments
    )
