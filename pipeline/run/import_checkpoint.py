"""`headrace import CHECKPOINT RUN_DIR --config FILE`: makes a run that continues from another trainer's checkpoint."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foundation.directory import fingerprint_of
from foundation.errors import CheckpointError, ConfigError
from foundation.paths import is_url
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.importing.find import check_known, open_checkpoint
from pipeline.checkpoint.importing.hyperparameters import compare_params, compare_rates
from pipeline.checkpoint.importing.match import check_config, matched_state
from pipeline.checkpoint.importing.source import SourceCheckpoint, TargetModel, stored
from pipeline.checkpoint.named_state import LOSS_SCALE, OPTIMIZER_STEP
from pipeline.checkpoint.new_run import free_run_dir, upload_run
from pipeline.checkpoint.save import save_streamed
from pipeline.config.accounts import StepAccounts
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import resolve
from pipeline.data.skips import NO_SKIPS, Skip, Skips
from pipeline.engines.common import matrices_of
from pipeline.engines.loss_scale import LossScaler
from pipeline.models.decayed import is_decayed
from pipeline.run.manifest import RunManifest
from pipeline.run.prepare import PreparedRun, prepare


@dataclass(frozen=True)
class Imported:
    """A checkpoint made from another trainer's checkpoint.

    Attributes:
        checkpoint: the written checkpoint.
        lines: report for people: values that were taken, values that differ, and values that were left out.
    """

    checkpoint: Checkpoint
    lines: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    """Imports a checkpoint, and prints which values were taken and which were not.

    Raises:
        DataError: the run has checkpoints already.
    """
    from rich.progress import DownloadColumn, Progress  # noqa: PLC0415

    out = arguments.out.rstrip("/") if is_url(arguments.out) else arguments.out
    run_dir = free_run_dir(out)
    overrides = [*arguments.overrides, f"run.dir={out}"]
    folder = Path(arguments.tokens)
    check_known(folder)
    resolved = resolve(read_config(arguments.config, overrides).config, world_size=arguments.processes or 1)
    with Progress(*Progress.get_default_columns(), DownloadColumn(), transient=True) as bar:
        task = bar.add_task("writing tensors", total=None)
        imported = import_checkpoint(
            folder,
            prepare(resolved),
            lambda done, total: bar.update(task, completed=done, total=total),
            step=arguments.step,
        )
    for line in imported.lines:
        print(line)
    if is_url(out):
        upload_run(run_dir, out)
    command = ["headrace", "train", "--config", str(arguments.config)]
    command += [word for override in overrides for word in ("--set", override)]
    print(f"output: {out if is_url(out) else imported.checkpoint.path}; it goes on with: {shlex.join(command)}")
    return 0


def import_checkpoint(
    folder: Path, prepared: PreparedRun, progress: Any = lambda *_: None, *, step: int | None = None
) -> Imported:
    """Writes a checkpoint from which `headrace train` resumes.

    Args:
        folder: a checkpoint of another trainer.
        prepared: the run, which has no checkpoint yet.
        progress: called with (bytes written, all bytes).
        step: number of optimizer steps that the checkpoint was trained for; None for the number that it records.

    Raises:
        ConfigError: the run has fewer steps than the checkpoint.
        CheckpointError: the checkpoint has another model or optimizer, or does not record its step.
    """
    settings, wanted = prepared.run.config, TargetModel.of(prepared.model, prepared.hf_config)
    source = _with_step(open_checkpoint(folder, wanted), step)
    if not 0 < source.step < prepared.run.steps:
        why = f"{source.path} is of step {source.step:,}"
        raise ConfigError("run.steps", prepared.run.steps, why=why, remedy=f"use more than {source.step:,}")
    if prepared.stages:
        prepared = prepared.stages[prepared.run.accounts.stage(source.step)]
    check_config(source, wanted)
    matrices = matrices_of(prepared.model, settings.optimizer)
    kind = settings.optimizer.kind
    tensors = matched_state(source, wanted, lambda name: kind.of(matrix=name in matrices))
    counter = source.step if source.optimizer_step is None else source.optimizer_step
    if kind.counts_steps:
        tensors[OPTIMIZER_STEP] = stored(torch.tensor(float(counter)))
    scaler = LossScaler(settings.fp16)
    if scaler.enabled:
        own = source.loss_scale
        tensors[LOSS_SCALE] = stored(scaler.to_tensor() if own is None else torch.tensor(own, dtype=torch.float64))
    skips = _skips(source, accounts=prepared.run.accounts)
    origin = {"kind": source.kind, "path": str(source.path), "step": source.step, "fingerprint": _print_of(source.path)}
    manifest = RunManifest(prepared, 0, imported=origin)
    info = manifest.checkpoint(source.step, skips=skips, anomalies={})
    checkpoint = save_streamed(prepared.store, info, tensors, progress)
    manifest.write(source.step)
    return Imported(checkpoint, tuple(_lines(source, prepared, skips)))


def _skips(source: SourceCheckpoint, *, accounts: StepAccounts) -> Skips:
    """Returns the data to skip: the run continues after as many samples as the checkpoint was trained on."""
    per_step = accounts.samples_in(source.step + 1)
    ahead = -(-((source.samples or 0) - accounts.samples(source.step)) // per_step)
    samples = None if accounts.constant_batch else ahead * per_step
    return Skips((Skip(source.step + 1, ahead, samples),)) if ahead > 0 else NO_SKIPS


def _print_of(folder: Path) -> str:
    """Computes a fingerprint of a folder's file names and sizes; the written checkpoint has content checksums."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return fingerprint_of([(str(path.relative_to(folder)), path.stat().st_size) for path in files])


def _lines(source: SourceCheckpoint, prepared: PreparedRun, skips: Skips) -> Iterator[str]:
    trained = "" if source.samples is None else f", {source.samples:,} samples"
    yield f"{source.path}: {source.kind}, step {source.step:,}{trained}"
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in source.weights.values()})
    states = ", ".join(source.states) or "no optimizer state"
    counter = "" if source.optimizer_step is None else f", optimizer step {source.optimizer_step:g}"
    masters = "" if dtypes == ["float32"] else " (no fp32 master weights: their rounding stays)"
    decays = _decays(prepared)
    yield f"taken: {len(decays)} weights in {', '.join(dtypes)}{masters}, {states}{counter}"
    settings, lr = prepared.run.config.optimizer, prepared.run.schedule.lr(source.step + 1)
    yield from compare_rates(source, settings.params, lr=lr, parameters=[*decays])
    yield from compare_params(source, settings.params, decays=decays, l2=settings.kind.l2_decay)
    yield f"data: {_position(source, prepared, skips)}; the order of its own sampler is not taken"
    for text in source.left_out:
        yield f"not taken: {text}"


def _decays(prepared: PreparedRun) -> dict[str, float]:
    """Returns the weight decay of every parameter in the run."""
    decay = prepared.run.config.optimizer.params.weight_decay
    named = prepared.model.named_parameters()
    return {name: decay if is_decayed(prepared.model, name, parameter) else 0.0 for name, parameter in named}


def _with_step(source: SourceCheckpoint, given: int | None) -> SourceCheckpoint:
    """Returns the checkpoint with the step that the user gives, or else with its recorded step.

    Raises:
        CheckpointError: it records no step, or several.
    """
    if given is not None or source.answers is None:
        return source if given is None else replace(source, step=given)
    told = ", ".join(f"{name}: {step:,}" for name, step in source.answers.items())
    why = f"does not tell one step ({told})" if told else "records no step"
    raise CheckpointError(f"{source.path} {why}\n  try: --step N, the optimizer steps that it has made")


def _position(source: SourceCheckpoint, prepared: PreparedRun, skips: Skips) -> str:
    """Tells where in the data the run continues."""
    samples = skips.samples(source.step + 1, prepared.run.accounts)[0]
    text = f"goes on with sample {samples:,} of this run's order"
    if source.samples is None or samples == source.samples:
        return text
    batch = prepared.run.accounts.samples_in(source.step + 1)
    return f"{text}, by whole batches of {batch:,}; it was trained on {source.samples:,}"
