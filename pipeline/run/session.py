"""The life of a training run, in one function: start, connect, decide, allocate, load, train, finish.

`train.py` and `distill.py` call it; they differ only in the objective.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.checkpoint.checkpoint import IMPORTED, Checkpoint
from pipeline.checkpoint.memory.restart_files import RestartFiles
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.loader import StepLoader
from pipeline.data.skips import NO_SKIPS, Skips, skips_of
from pipeline.engines.base import Engine, Objective
from pipeline.engines.build import build_engine, pick_device
from pipeline.engines.parallel.mesh import Mesh
from pipeline.models.construction.initial_values import ReportsProgress, Zeros
from pipeline.models.construction.meta import parameter_shapes
from pipeline.models.sdpa_order import ordered_sdpa
from pipeline.run.anomalies.guarded_step import GuardedStepper, Rollback
from pipeline.run.attempts import Attempt, locked_attempt
from pipeline.run.batches import RankBatches
from pipeline.run.checkpoint_saves import CheckpointSaves
from pipeline.run.checkpoint_timer import make_timer
from pipeline.run.connect import check_device, check_node, connect
from pipeline.run.heldout_evaluation import HeldOutEvaluation
from pipeline.run.instruments import make_instruments
from pipeline.run.manifest import RunManifest
from pipeline.run.measured import measured
from pipeline.run.memory_checkpoints import KeptCopies, kept_copies
from pipeline.run.messages import closing_line, loaded_line, opening_lines, quiet_libraries
from pipeline.run.out_of_memory import explained_out_of_memory
from pipeline.run.prepare import PreparedRun, prepare
from pipeline.run.progress import Progress
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.resume import (
    changes_since,
    describe_changes,
    fresh_optimizer_line,
    learning_rate_change,
    refuse_other_curve,
)
from pipeline.run.staged_data import staged_data
from pipeline.run.surroundings import Group, StudentSamples
from pipeline.run.trainer import Trainer
from pipeline.run.uneven.balance_shares import make_balancer
from pipeline.run.uneven.measure_stages import MeasuredStages
from pipeline.run.uploads.uploads import Uploads
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.progress import progress_from_io
from pipeline.runtime.faults.stop_signals import Stop, StopSignals, coordinate_exit
from pipeline.runtime.faults.watchdog import Watchdog, run_watchdog
from pipeline.runtime.launch import Launch, detect, wait_as_spare
from pipeline.runtime.launch.device import bind_to_gpu, has_gpu, set_up_allocator
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.journal import Journal, read_rows
from pipeline.runtime.metrics.sinks import Sink, Sinks
from pipeline.runtime.metrics.tensorboard_sink import TensorBoardSink
from pipeline.runtime.metrics.wandb_sink import WandbSink

if TYPE_CHECKING:
    from pipeline.run.task_evaluation import TaskEvaluation

_UPLOADING_S = 1.0
"""Seconds between two collectives while the ranks wait for uploads."""
MakeObjective = Callable[[PreparedRun, torch.device, Mesh | None], Objective]


def train(run: ResolvedRun, make_objective: MakeObjective, *, signals: StopSignals) -> int:
    """Trains from the newest checkpoint, or from the start, to the last step or to a stop signal.

    Args:
        run: the resolved config.
        make_objective: called with the run, this rank's device and its process groups; returns the loss to minimize.
        signals: stop signals of this process.

    Returns:
        The exit code of this rank; see `faults.stop_signals`.

    Raises:
        HeadraceError: anything the user can mend; before work starts wherever it can be known by then.
    """
    # Start: find out which rank this is; check data, model and layout. Nothing has been touched when this refuses.
    launch = detect()
    if launch.rank >= run.topology.world_size:
        wait_as_spare(launch, processes=run.topology.world_size, config=run.config.launch)
        return 0
    launch = replace(launch, world_size=run.topology.world_size)
    quiet_libraries(launch)
    gpu = has_gpu(run.config.launch)
    prepared = prepare(run)
    check_node(prepared)
    notes = prepared.notes + set_up_allocator(gpu=gpu)
    device = pick_device(launch, run.config.launch)
    check_device(prepared, device)
    notes += bind_to_gpu(device.index, run.config.launch)
    with ExitStack() as stack:
        notes += filter(None, [stack.enter_context(ordered_sdpa(device))])
        # Connect: lock the run's directory, form the process groups, start the watchdog.
        attempt, uploads = _begin_attempt(prepared, launch, signals, stack)
        rendezvous, mesh, preflight_summary, stages = connect(prepared, launch, device, stack)
        attempt.connected(launch, rendezvous)
        watchdog = stack.enter_context(
            run_watchdog(launch, rendezvous, config=run.config.watchdog, run_dir=prepared.run_dir)
        )
        session = Session(
            stages.applied(prepared) if stages is not None else prepared,
            launch,
            signals,
            Agreement(device),
            watchdog,
            attempt,
            stack.enter_context(kept_copies(run.config.run, say=notes.append)),
            uploads,
            stages,
        )
        with watchdog, explained_out_of_memory(session.prepared, device):
            session.say_all(preflight_summary, *notes)
            stop = session.agreement.requested_stop(signals)
            if stop:  # building the engine and loading a checkpoint may take longer than the grace period
                session.say(f"stopped by {stop} before it had begun: start it again to go on")
            else:
                # Stage: the data is copied to this node's disk where the config says so.
                clean_up = stack.enter_context(
                    staged_data(
                        run.config.data,
                        prepared.mixture,
                        prepared.heldout,
                        say=session.say,
                        progress=watchdog.report_progress,
                    )
                )
                # Decide: resume from the newest whole checkpoint, or begin at step 1.
                checkpoint = session.newest_checkpoint()
                # Allocate: initial values are drawn only where no checkpoint is about to overwrite them.
                engine = session.allocate(make_objective, device=device, mesh=mesh, checkpoint=checkpoint)
                services = session.open_services(stack)
                # Load, then train: step, save, evaluate. A rollback loads an older checkpoint and trains on from there.
                rollback: Rollback | None = None
                while True:
                    session.load(engine, checkpoint)
                    try:
                        stop = session.train(engine, services, checkpoint, rollback)
                        break
                    except Rollback as order:
                        rollback = order.with_traceback(None)
                    checkpoint = session.newest_checkpoint()
                clean_up(not stop)
        # Finish: the ranks leave together; the exit code says whether to start the run again.
        return coordinate_exit(
            attempt.will_end(stop.exit_code, f"stopped by {stop}, saved" if stop else "finished"),
            rendezvous,
            launcher=launch.launcher,
        )


def _begin_attempt(
    prepared: PreparedRun, launch: Launch, signals: StopSignals, stack: ExitStack
) -> tuple[Attempt, Uploads]:
    """Locks the run's directory, takes its lease where it is in an object store, and handles Ctrl-C from then on."""
    uploads = Uploads(prepared.run.config, first=launch.rank == 0, signals=signals)
    attempt = stack.enter_context(locked_attempt(prepared.run_dir, launch, holding=uploads))
    signals.handle_interrupts()
    return attempt, uploads


@dataclass(frozen=True)
class Session:
    """One rank of a run while it trains: its run, its connections and its services.

    Attributes:
        prepared: the run: its data, its model on meta, its checkpoints.
        launch: launcher and rank of this process.
        signals: stop signals of this process.
        agreement: all-reduces small numbers over all ranks.
        watchdog: is told the phase and step this rank is in.
        attempt: is told when training begins.
        copies: checkpoint copies in this node's memory.
        uploads: copies checkpoints and journals to an object store.
        stages: speeds of the pipeline stages, where they were measured.
    """

    prepared: PreparedRun
    launch: Launch
    signals: StopSignals
    agreement: Agreement
    watchdog: Watchdog
    attempt: Attempt
    copies: KeptCopies
    uploads: Uploads
    stages: MeasuredStages | None = None

    def __post_init__(self) -> None:
        self.attempt.tell_ranks = self.watchdog.report_error

    def say(self, line: str | None) -> None:
        """Prints a line on rank 0; nothing for None."""
        if line is not None:
            TrainingDisplay(first=0, total=self.prepared.run.steps, shown=self._first).say(line)

    def say_all(self, *lines: str | None) -> None:
        """Prints lines on rank 0; nothing for None."""
        for line in lines:
            self.say(line)

    @cached_property
    def files(self) -> RestartFiles:
        """Finds and opens the files of checkpoints: copies in memory, or the run's directory. Collective at first."""
        master, _, port = self.launch.master.rpartition(":")
        return RestartFiles(
            self.copies.memory,
            master=master,
            port=int(port),
            warn=lambda line: print(line, file=sys.stderr, flush=True),
            on_progress=self.watchdog.report_progress,
        )

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold; None where the run has none. Collective.

        Raises:
            CheckpointError: there are checkpoints and all are damaged, or the newest whole one is of another run.
        """
        store, progress = self.prepared.store, self.watchdog.report_progress
        checkpoint = store.newest_intact(self.say, on_progress=progress, files=self.files)
        if checkpoint is not None:
            refuse_other_curve(checkpoint, self.prepared.curve, allowed=self.prepared.run.config.run.allow_change)
        return checkpoint

    def allocate(
        self, make_objective: MakeObjective, *, device: torch.device, mesh: Mesh | None, checkpoint: Checkpoint | None
    ) -> Engine:
        """Builds the engine: initialized or loaded from `model.path`; zeros when a checkpoint follows. Collective."""
        prepared, objective = self.prepared, make_objective(self.prepared, device, mesh)
        values = prepared.values if checkpoint is None else Zeros(parameter_shapes(prepared.model))
        reporting = ReportsProgress(values, self.watchdog.report_progress)
        return build_engine(prepared.run, prepared.model, reporting, objective, device=device, mesh=mesh)

    def open_services(self, stack: ExitStack) -> list[Sink]:
        """Opens the tracking services that the config enables, on rank 0 only; `stack` closes them."""
        config = self.prepared.run.config
        sinks: list[WandbSink | TensorBoardSink] = []
        if self._first and config.wandb.enabled:
            sinks.append(WandbSink(config.wandb, self.prepared.run_dir, config=config.model_dump(mode="json")))
        if self._first and config.tensorboard.enabled:
            sinks.append(TensorBoardSink(config.tensorboard, run_dir=str(self.prepared.run_dir)))
        for sink in sinks:
            stack.callback(sink.close)
        return [*sinks]

    def load(self, engine: Engine, checkpoint: Checkpoint | None) -> None:
        """Loads parameters and optimizer state from a checkpoint, if there is one. Collective.

        The optimizer starts afresh where the checkpoint is of another kind, which `run.allow_change` allows.
        """
        if checkpoint is None:
            return
        fresh, began = fresh_optimizer_line(checkpoint, self.prepared.curve), time.monotonic()
        self.say(fresh)
        with (
            progress_from_io(self.watchdog.report_progress),
            self.files.opened(checkpoint.path, checkpoint.manifest.files) as opened,
        ):
            engine.load(checkpoint.path, fresh_optimizer=fresh is not None, files=opened)
        read, warnings = self.files.report()
        seconds = time.monotonic() - began
        self.attempt.record("loaded", step=checkpoint.step, seconds=seconds, read=read, warnings=warnings)
        if self.copies.memory is not None:
            self.say(loaded_line(read))

    def train(
        self, engine: Engine, services: Sequence[Sink], checkpoint: Checkpoint | None, rollback: Rollback | None
    ) -> Stop:
        """Trains from the step after the checkpoint to the last step or to a stop signal. Collective.

        Args:
            engine: holds the state of the checkpoint, or the initial one.
            services: sinks besides `metrics.jsonl`.
            checkpoint: the checkpoint that the run resumes from; None at the start.
            rollback: the rollback that led back to the checkpoint; None without one.

        Raises:
            Rollback: a loss spike or a non-finite step is to be undone; the run has a checkpoint to load.
            TrainingError: the run cannot go on.
        """
        prepared, run, done = self.prepared, self.prepared.run, checkpoint.step if checkpoint else 0
        details = checkpoint.manifest.details if checkpoint else {}
        manifest = RunManifest(prepared, self.launch.rank, self.stages, details.get(IMPORTED))
        on_rank_zero(partial(manifest.write, done))  # a run killed right after its checkpoint has not written it yet
        skips = rollback.skips_from(done) if rollback else self._recorded_skips(checkpoint)
        with ExitStack() as stack:
            sinks = Sinks([self._open_journal(stack, from_step=done), *services] if self._first else [])
            stack.callback(sinks.close)
            display = stack.enter_context(TrainingDisplay(first=done, total=run.steps, shown=self._first))
            stepper = GuardedStepper(
                engine,
                run.config.anomalies,
                fp16=run.config.fp16.enabled,
                samples=run.batch.samples,
                skips=skips,
                record=sinks.event,
                can_roll_back=self._has_checkpoint,
            )
            if checkpoint is not None:
                stepper.load_state_dict(checkpoint.manifest.details.get("anomalies", {}), after=rollback)
            self._announce(engine, checkpoint, rollback, sinks=sinks, display=display, skips=skips)
            batches = RankBatches(prepared, self.launch.rank)
            here = RankOfRun(
                run=run,
                rank=self.launch.rank,
                curve=prepared.curve,
                engine=engine,
                agreement=self.agreement,
                signals=self.signals,
                watchdog=self.watchdog,
                record=sinks.event,
                say=display.say,
                checkpoint=checkpoint,
                stack=stack,
            )
            group = self._open_group(here, stepper, batches)
            if group is not None:
                if stop := group.start():
                    return stop
                done = group.step
            trainer = self._trainer(here, stepper, batches, manifest, group, Progress(done), sinks, display)
            self.attempt.training(done)
            try:
                with explained_out_of_memory(prepared, self.agreement.device):
                    stop = self.agreement.requested_stop(self.signals)
                    stop = stop or self._missed_evaluation(trainer, done) or trainer.train()
            except Rollback:
                self.watchdog.enter_phase("rolling back")
                trainer.saves.wait()
                raise
            except BaseException as error:
                self.watchdog.report_error(error)  # before the sinks are closed, which may take long
                raise
            self._finish(trainer, stop, sinks, display, device_name=engine.device_name)
            return stop

    def _finish(
        self, trainer: Trainer, stop: Stop, sinks: Sinks, display: TrainingDisplay, *, device_name: str
    ) -> None:
        """Records what the attempt measured, uploads what is left, and says how the run ended. Collective.

        Raises:
            TrainingError: the store takes nothing for too long, or another process has taken the run over.
        """
        prepared, step = self.prepared, trainer.progress.step
        self.watchdog.enter_phase("finishing")
        times, rank = trainer.instruments.times, self.launch.rank
        found = measured(prepared, times, self.agreement, rank=rank, device_name=device_name)
        self.attempt.record("measured", step=step, **found)
        self._finish_uploads(sinks, display)
        display.say(closing_line(stop, step=step, steps=prepared.run.steps, run_dir=prepared.run_dir))
        if (goodput := self.attempt.account()) is not None:
            display.say(goodput)

    def _finish_uploads(self, sinks: Sinks, display: TrainingDisplay) -> None:
        """Waits until everything is uploaded. Collective.

        Raises:
            TrainingError: the store takes nothing for too long, or another process has taken the run over.
        """
        if self.uploads.url is None:
            return
        self.watchdog.enter_phase("uploading")
        while not on_rank_zero(lambda: self.uploads.finish(sinks.event, display.say, seconds=_UPLOADING_S)):
            self.watchdog.report_progress()

    def _trainer(
        self,
        here: RankOfRun,
        stepper: GuardedStepper,
        batches: RankBatches,
        manifest: RunManifest,
        group: Group | None,
        progress: Progress,
        sinks: Sinks,
        display: TrainingDisplay,
    ) -> Trainer:
        """Makes the loop with its saves, its evaluation and its instruments."""
        prepared, run, engine, stack = self.prepared, here.run, here.engine, here.stack
        first = progress.step + 1
        steps = group.batches() if group else batches.training(first_step=first, skips=stepper.skips)
        balancer = make_balancer(run, engine, batches.current, gpu=self.agreement.device.type == "cuda", stack=stack)
        saves = CheckpointSaves(
            every=run.config.run.checkpoint_every,
            last=run.steps,
            engine=engine,
            stepper=stepper,
            writer=self._checkpoint_writer(),
            manifest=manifest,
            uploads=self.uploads,
            timer=make_timer(run.config.run, prepared.run_dir, nodes=self.attempt.nodes, decides=self._first),
            progress=progress,
            watchdog=self.watchdog,
            sinks=sinks,
            display=display,
            group=group,
        )
        evaluation = HeldOutEvaluation(
            every=run.config.evaluation.every,
            last=run.steps,
            engine=engine,
            batches=batches,
            saves=saves,
            signals=self.signals,
            agreement=self.agreement,
            watchdog=self.watchdog,
            sinks=sinks,
            display=display,
            tasks=self._tasks(here),
        )
        return Trainer(
            run=run,
            stepper=stepper,
            steps=steps,
            saves=saves,
            evaluation=evaluation,
            signals=self.signals,
            agreement=self.agreement,
            watchdog=self.watchdog,
            sinks=sinks,
            display=display,
            instruments=make_instruments(
                prepared, engine, self.agreement.device, rank=self.launch.rank, say=display.say, stack=stack
            ),
            progress=progress,
            student=self._student(engine),
            group=group,
            balancer=balancer,
        )

    def _open_group(self, here: RankOfRun, stepper: GuardedStepper, batches: RankBatches) -> Group | None:
        """Opens this process's island or replica of the model; None in an ordinary run. Collective."""
        if self.prepared.run.config.islands is not None:
            from pipeline.run.groups.islands.build import open_island  # noqa: PLC0415

            return open_island(here, loader=batches.slots)
        if self.prepared.run.config.replicas is not None:
            from pipeline.run.groups.replicas.build import open_replica  # noqa: PLC0415

            def load(ranges: Sequence[tuple[int, int]], steps: tuple[int, int]) -> StepLoader:
                return batches.part(ranges, steps, skips=stepper.skips)  # a late comer takes those of a living replica

            return open_replica(here, stepper=stepper, load=load)
        return None

    def _student(self, engine: Engine) -> StudentSamples | None:
        """Makes the student's own samples in an on-policy distillation; None in other runs."""
        if self.prepared.run.config.distill is None:
            return None
        from pipeline.run.distillation.on_rank import make_samples  # noqa: PLC0415

        return make_samples(
            self.prepared,
            engine,
            rank=self.launch.rank,
            device=self.agreement.device,
            on_progress=self.watchdog.report_progress,
        )

    def _tasks(self, here: RankOfRun) -> TaskEvaluation | None:
        """Makes the evaluation of the run's tasks; None without any."""
        if not self.prepared.tasks:
            return None
        from pipeline.run.task_evaluation import TaskEvaluation  # noqa: PLC0415

        progress = self.watchdog.report_progress
        return TaskEvaluation(here.run, self.prepared.tasks, here.engine, here.rank, self.agreement.device, progress)

    @property
    def _first(self) -> bool:
        return self.launch.rank == 0

    def _announce(
        self,
        engine: Engine,
        checkpoint: Checkpoint | None,
        rollback: Rollback | None,
        *,
        sinks: Sinks,
        display: TrainingDisplay,
        skips: Skips,
    ) -> None:
        """Prints and records how this attempt begins: started, resumed (and what has changed since), or rolled back."""
        if rollback is not None:
            assert checkpoint is not None
            display.say(rollback.message(checkpoint.step))
            sinks.event(checkpoint.step, **rollback.event(skips))
            return
        for line in opening_lines(self.prepared, engine, self.launch, checkpoint):
            display.say(line)
        if self.stages is not None:
            display.say(self.stages.line())
            sinks.event(checkpoint.step if checkpoint else 0, event="stages", **self.stages.row())
        if checkpoint is None:
            sinks.event(0, event="started", world_size=self.launch.world_size)
            return
        sinks.event(checkpoint.step, event="resumed", world_size=self.launch.world_size)
        fields = changes_since(checkpoint, self.prepared.curve)
        for line in describe_changes(fields):  # what `run.allow_change` allows leaves a trace
            display.say(f"changed since the checkpoint: {line}")
        rates = learning_rate_change(checkpoint, checkpoint.manifest.details["curve"], self.prepared.curve)
        if rates:
            display.say(rates)
        if fields:
            sinks.event(checkpoint.step, event="changed", fields=[list(row) for row in fields])

    def _recorded_skips(self, checkpoint: Checkpoint | None) -> Skips:
        """The data that the run leaves out from the checkpoint on, from its manifest and the journal. Collective."""
        if checkpoint is None:
            return NO_SKIPS
        return on_rank_zero(partial(_skips_after, checkpoint, self.prepared.run_dir))

    def _missed_evaluation(self, trainer: Trainer, done: int) -> Stop:
        """Evaluates after step `done` where that is due and was cut short: work is saved before it is evaluated."""
        if done == 0 or not trainer.evaluation.due(done):
            return Stop.NO
        written = on_rank_zero(partial(_written, trainer.evaluation.kinds, self.prepared.run_dir, done))
        return Stop.NO if written.issuperset(trainer.evaluation.kinds) else trainer.evaluate(done, written=written)

    def _has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to roll back to. Collective."""
        return bool(on_rank_zero(self.prepared.store.checkpoints))

    def _open_journal(self, stack: ExitStack, *, from_step: int) -> Journal:
        lost = partial(self.attempt.lost, from_step)
        journal = Journal(self.prepared.run_dir, from_step=from_step, on_removed=lost)
        stack.callback(journal.close)
        return journal

    def _checkpoint_writer(self) -> CheckpointWriter:
        config = self.prepared.run.config
        zero = config.zero_optimization
        on_nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
        # state on a disk is brought into host memory to be written: a second copy of it would be too much
        background = config.run.async_checkpoints and not on_nvme
        copies = self.copies.copier(rank=self.launch.rank, ranks_here=self.files.ranks_here)
        progress = self.watchdog.report_progress
        return CheckpointWriter(self.prepared.store, background=background, on_progress=progress, copies=copies)


def _skips_after(checkpoint: Checkpoint, run_dir: Path) -> Skips:
    return skips_of(checkpoint.manifest.details, read_rows(run_dir, kind="event"), step=checkpoint.step)


def _written(kinds: Sequence[str], run_dir: Path, step: int) -> set[str]:
    """The kinds of rows, of those given, that the journal has of a step."""
    return {row["kind"] for row in read_rows(run_dir, kind=kinds) if row["step"] == step}
