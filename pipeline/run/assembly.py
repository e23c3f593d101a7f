"""Puts a rank's training loop together: journal and services, stepper, group, saves, evaluation and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.memory.memory_copies import MemoryCopies
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.data.loader import StepLoader
from pipeline.data.skips import Skips
from pipeline.run.anomalies.guarded_step import GuardedStepper, Rollback
from pipeline.run.attempts import Attempt
from pipeline.run.batches import RankBatches
from pipeline.run.checkpoint_saves import CheckpointSaves, Progress
from pipeline.run.checkpoint_timer import make_timer
from pipeline.run.groups.group import Group
from pipeline.run.heldout_evaluation import HeldOutEvaluation
from pipeline.run.hooks.hook import HookContext
from pipeline.run.hooks.hooks import make_hooks
from pipeline.run.manifest import RunManifest
from pipeline.run.prepare import PreparedRun
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.trainer import Trainer
from pipeline.run.uploads.uploads import Uploads
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero
from pipeline.runtime.metrics.journal import Journal
from pipeline.runtime.metrics.mlflow_sink import MlflowSink
from pipeline.runtime.metrics.prometheus_file import PrometheusFile
from pipeline.runtime.metrics.sinks import Sink
from pipeline.runtime.metrics.step_clock import StepClock
from pipeline.runtime.metrics.tensorboard_sink import TensorBoardSink
from pipeline.runtime.metrics.user_sink import UserSink
from pipeline.runtime.metrics.wandb_sink import WandbSink

if TYPE_CHECKING:
    from pipeline.run.task_evaluation import TaskEvaluation


def open_services(prepared: PreparedRun, stack: ExitStack) -> list[Sink]:
    """Opens the trackers that the config enables; `stack` closes them. A tracker that is not enabled is not imported.

    Raises:
        ConfigError: the user's own tracker cannot be opened.
    """
    config, written = prepared.run.config, prepared.run.written_config.model_dump(mode="json")
    run_dir, steps = prepared.run_dir, prepared.run.steps
    sinks: list[WandbSink | TensorBoardSink | PrometheusFile | UserSink] = []
    others: list[Sink] = []
    if config.wandb.enabled:
        sinks.append(WandbSink(config.wandb, run_dir, config=written))
    if config.tensorboard.enabled:
        sinks.append(TensorBoardSink(config.tensorboard, run_dir=str(run_dir)))
    if config.prometheus.path is not None:
        sinks.append(PrometheusFile(Path(config.prometheus.path), run_dir, steps=steps))
    for i, function in enumerate(prepared.functions.sinks):
        sinks.append(UserSink(function, run_dir, config=written, field=f"sinks.{i}"))
    if config.mlflow.enabled:
        mlflow = MlflowSink(config.mlflow, run_dir, config=written, steps=steps)
        stack.push(partial(_end, mlflow))
        others.append(mlflow)
    for sink in sinks:
        stack.callback(sink.close)
    return [*sinks, *others]


def _end(sink: MlflowSink, kind: type[BaseException] | None, *_error: object) -> None:
    sink.end(failed=kind is not None and kind is not KeyboardInterrupt)


def open_journal(attempt: Attempt, prepared: PreparedRun, *, from_step: int, stack: ExitStack) -> Journal:
    """Opens `metrics.jsonl` without rows after a step; the attempt records removed rows, `stack` closes the file."""
    journal = Journal(prepared.run_dir, from_step=from_step, on_removed=partial(attempt.lost, from_step))
    stack.callback(journal.close)
    return journal


def make_stepper(here: RankOfRun, *, skips: Skips, after: Rollback | None) -> GuardedStepper:
    """Makes the stepper, with the statistics of the checkpoint.

    Args:
        skips: data that the run leaves out.
        after: the rollback that led back to the checkpoint; None without one.
    """
    run, store = here.run, here.prepared.store

    def has_checkpoint() -> bool:
        return store.start is not None or bool(on_rank_zero(store.checkpoints))

    stepper = GuardedStepper(
        here.engine,
        run.config.anomalies,
        fp16=run.config.fp16.enabled,
        accounts=run.accounts,
        skips=skips,
        record=here.record,
        can_roll_back=has_checkpoint,
    )
    if here.checkpoint is not None:
        stepper.load_state_dict(here.checkpoint.manifest.details.get("anomalies", {}), after=after)
    return stepper


def open_group(here: RankOfRun, stepper: GuardedStepper, batches: RankBatches) -> Group | None:
    """Opens this process's island or replica of the model; None in an ordinary run. Collective."""
    if here.run.config.islands is not None:
        from pipeline.run.groups.islands.build import open_island  # noqa: PLC0415

        return open_island(here, loader=batches.slots)
    if here.run.config.replicas is not None:
        from pipeline.run.groups.replicas.build import open_replica  # noqa: PLC0415

        def load(ranges: Sequence[tuple[int, int]], steps: tuple[int, int]) -> StepLoader:
            return batches.part(ranges, steps, skips=stepper.skips)  # a late joiner takes a living replica's skips

        return open_replica(here, stepper=stepper, load=load)
    return None


def make_trainer(
    here: RankOfRun,
    *,
    stepper: GuardedStepper,
    batches: RankBatches,
    group: Group | None,
    copies: MemoryCopies | None,
    manifest: RunManifest,
    uploads: Uploads,
    journal: Journal | None,
) -> Trainer:
    """Makes the training loop, which continues after the group's step or, without a group, after the checkpoint's.

    Args:
        batches: this rank's batches.
        copies: keeps copies of checkpoints in this node's memory; None to keep no copies.
        uploads: copies checkpoints to an object store.
        journal: no checkpoint is committed before the rows of its steps are in it; None on every rank but rank 0.
    """
    run, attempt = here.run, here.attempt
    ledger = here.checkpoint.manifest.details.get("ledger", ()) if here.checkpoint else ()
    own = (row for row in ledger if row["first_step"] > manifest.begun and "targets" in row)
    targets = {run.accounts.span(row["first_step"]).first_step: row["targets"] for row in own}
    progress = Progress(group.step if group else here.done, targets=targets)
    saves = CheckpointSaves(
        here,
        stepper=stepper,
        writer=_checkpoint_writer(here, copies, journal),
        manifest=manifest,
        uploads=uploads,
        timer=make_timer(run.config.run, here.prepared.run_dir, nodes=attempt.nodes, decides=here.rank == 0),
        progress=progress,
        group=group,
    )
    return Trainer(
        here,
        stepper=stepper,
        steps=group.batches() if group else batches.training(first_step=progress.step + 1, skips=stepper.skips),
        saves=saves,
        evaluation=HeldOutEvaluation(here, batches, saves, _tasks(here)),
        hooks=make_hooks(HookContext(here, StepClock(), group, batches.current)),
        progress=progress,
        group=group,
    )


def _checkpoint_writer(here: RankOfRun, copies: MemoryCopies | None, journal: Journal | None) -> CheckpointWriter:
    zero, wanted = here.run.config.zero_optimization, here.run.config.run.async_checkpoints
    # state on a disk is read into host memory to be written: a second copy there would be too much
    background = wanted and "nvme" not in (zero.offload_optimizer.device, zero.offload_param.device)
    before = journal.require_written if journal is not None else lambda: None
    progress, store = here.watchdog.report_progress, here.prepared.store
    return CheckpointWriter(store, background=background, on_progress=progress, copies=copies, before_commit=before)


def _tasks(here: RankOfRun) -> TaskEvaluation | None:
    """Makes the evaluation of the run's tasks; None without tasks."""
    if not here.prepared.tasks:
        return None
    from pipeline.run.task_evaluation import TaskEvaluation  # noqa: PLC0415

    progress = here.watchdog.report_progress
    return TaskEvaluation(here.run, here.prepared.tasks, here.engine, here.rank, here.agreement.device, progress)
