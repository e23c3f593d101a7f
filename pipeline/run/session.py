"""The life of a training run, in one function: start, connect, decide, allocate, load, train, finish.

`train.py` and `distill.py` call it; they differ only in the objective.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from pipeline.checkpoint.checkpoint import IMPORTED, Checkpoint
from pipeline.checkpoint.memory.restart_files import RestartFiles
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.base import Engine, Objective
from pipeline.engines.build import build_engine
from pipeline.engines.parallel.mesh import Mesh
from pipeline.models.construction.initial_values import ReportsProgress, Zeros
from pipeline.models.construction.meta import parameter_shapes
from pipeline.models.sdpa_order import ordered_sdpa
from pipeline.run.anomalies.guarded_step import Rollback
from pipeline.run.assembly import make_stepper, make_trainer, open_group, open_journal, open_services
from pipeline.run.attempts import Attempt, locked_attempt
from pipeline.run.batches import RankBatches, recorded_skips
from pipeline.run.branch import origin_details
from pipeline.run.connect import check_and_prepare, connect
from pipeline.run.heldout_evaluation import is_unfinished
from pipeline.run.manifest import RunManifest
from pipeline.run.memory_checkpoints import KeptCopies, kept_copies
from pipeline.run.messages import announce, closing_line, loaded_line, quiet_libraries
from pipeline.run.out_of_memory import explained_out_of_memory
from pipeline.run.prepare import PreparedRun
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.resume import begins_afresh
from pipeline.run.same_run import fresh_optimizer_line, refuse_other_curve
from pipeline.run.staged_data import staged_data
from pipeline.run.trainer import Trainer
from pipeline.run.uneven.measure_stages import MeasuredStages
from pipeline.run.uploads.uploads import Uploads
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.progress import progress_from_io
from pipeline.runtime.faults.stop_signals import Stop, StopSignals, coordinate_exit
from pipeline.runtime.faults.watchdog import Watchdog, run_watchdog
from pipeline.runtime.launch import Launch, detect, wait_as_spare
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.sinks import Sink, Sinks

_UPLOADING_S = 1.0
"""Seconds between collectives while the ranks wait for uploads."""
MakeObjective = Callable[[PreparedRun, torch.device, Mesh | None], Objective]


def train(run: ResolvedRun, make_objective: MakeObjective, *, signals: StopSignals) -> int:
    """Trains from the newest checkpoint, or from the start, to the last step or to a stop signal.

    Args:
        run: the resolved config.
        make_objective: called with the run, this rank's device and its process groups; returns the loss to minimize.
        signals: stop signals of this process.

    Returns:
        The exit code of this rank (`faults.stop_signals`).

    Raises:
        HeadraceError: any error that the user can correct, raised before work starts wherever possible.
    """
    # Start: find out which rank this is; check data, model and layout. An error here leaves everything untouched.
    launch = detect()
    if launch.rank >= run.topology.world_size:
        wait_as_spare(launch, processes=run.topology.world_size, config=run.config.launch)
        return 0
    launch = replace(launch, world_size=run.topology.world_size)
    quiet_libraries(launch)
    prepared, device, notes = check_and_prepare(run, launch)
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
            for line in (preflight_summary, *notes):
                session.say(line)
            stop = session.agreement.requested_stop(signals)
            if stop:  # building the engine and loading a checkpoint may take longer than the grace period
                session.say(f"stopped by {stop} before it had begun: start it again to go on")
            else:
                stop = _train_stages(session, make_objective, device=device, mesh=mesh, stack=stack)
        # Finish: the ranks leave together; the exit code says whether to start the run again.
        return coordinate_exit(
            attempt.will_end(stop.exit_code, f"stopped by {stop}, saved" if stop else "finished"),
            rendezvous,
            launcher=launch.launcher,
        )


def _train_stages(
    first: Session, make_objective: MakeObjective, *, device: torch.device, mesh: Mesh | None, stack: ExitStack
) -> Stop:
    """Trains the stages of a run one after another, each from a checkpoint; a run without stages is one. Collective."""
    # Stage: the data is copied to this node's disk if the config asks for it.
    clean_up = [stack.enter_context(first.staged(each)) for each in first.prepared.stages or (first.prepared,)]
    # Decide: resume from the newest intact checkpoint, or begin: at step 1, or with another run's state.
    first.pin_start()
    checkpoint = first.newest_checkpoint()
    services = open_services(first.prepared, stack) if first.launch.rank == 0 else []
    session, engine, rollback, border = first, None, None, False
    while True:
        here = first.at(checkpoint, border=border)
        if engine is None or here.prepared is not session.prepared:
            # Allocate: initial values are drawn only where no checkpoint is about to overwrite them.
            if engine is not None:
                engine.close()
            session, engine = here, None  # the memory of the stage before is free by now
            gc.collect()
            groups = mesh if here.prepared.run.same_mesh(first.prepared.run) else None  # else they are formed anew
            engine = here.allocate(make_objective, device=device, mesh=groups, checkpoint=checkpoint)
        # Load, then train: step, save, evaluate. A rollback loads an older checkpoint and continues from there.
        session.load(engine, checkpoint)
        try:
            stop, border = session.train(engine, services, checkpoint, rollback, border=border), True
            rollback = None
            if stop or session.is_last:
                break
        except Rollback as order:
            rollback, border = order.with_traceback(None), False
        checkpoint = first.newest_checkpoint()
    for each in clean_up:
        each(not stop)
    return stop


def _begin_attempt(
    prepared: PreparedRun, launch: Launch, signals: StopSignals, stack: ExitStack
) -> tuple[Attempt, Uploads]:
    """Locks the run's directory, takes its lease if it is in an object store, and handles Ctrl-C from then on."""
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
        watchdog: watchdog that gets this rank's phase and step.
        attempt: journal of attempts, which records when training begins.
        copies: checkpoint copies in this node's memory.
        uploads: copies checkpoints and journals to an object store.
        stages: speeds of the pipeline stages, if measured.
        opened: the one object of `files`, which the sessions of all stages share; empty before its first use.
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
    opened: list[RestartFiles] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attempt.tell_ranks = self.watchdog.report_error

    def say(self, line: str | None) -> None:
        """Prints a line on rank 0; does nothing for None."""
        if line is not None:
            self._display(first=0).say(line)

    @property
    def files(self) -> RestartFiles:
        """Finds and opens checkpoint files: copies in memory, or the run's directory. The first use is collective."""
        if not self.opened:
            master, _, port = self.launch.master.rpartition(":")
            self.opened.append(
                RestartFiles(
                    self.copies.memory,
                    master=master,
                    port=int(port),
                    warn=lambda line: print(line, file=sys.stderr, flush=True),
                    on_progress=self.watchdog.report_progress,
                )
            )
        return self.opened[0]

    @property
    def is_last(self) -> bool:
        """Whether no stage of the run follows."""
        return self.prepared.run.last_step == self.prepared.run.steps

    def staged(self, prepared: PreparedRun) -> AbstractContextManager[Callable[[bool], None]]:
        """Copies a stage's data to this node's disk if the config asks for it; see `staged_data`."""
        data, progress = prepared.run.config.data, self.watchdog.report_progress
        return staged_data(data, prepared.mixture, prepared.heldout, say=self.say, progress=progress)

    def at(self, checkpoint: Checkpoint | None, *, border: bool) -> Session:
        """Returns the session of the stage that goes on after a checkpoint; this one without stages. Collective.

        A stage whose last evaluation was cut short is taken up once more, and trains no step.

        Args:
            checkpoint: the checkpoint; None at the beginning.
            border: whether this process has just trained the stage that ends there.
        """
        stages, done = self.prepared.stages or (self.prepared,), 0 if checkpoint is None else checkpoint.step
        accounts = self.prepared.run.accounts
        number, ended = accounts.stage(done + 1), accounts.stage(max(1, done))
        own = checkpoint is None or not self.begins_with(checkpoint)
        if own and not border and number != ended and is_unfinished(stages[ended], done):
            number = ended
        return self if not number else replace(self, prepared=stages[number])

    def newest_checkpoint(self) -> Checkpoint | None:
        """Finds the newest checkpoint with correct checksums; None if the run has no checkpoint. Collective.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest intact one belongs to another run.
        """
        store, progress = self.prepared.store, self.watchdog.report_progress
        checkpoint = store.newest_intact(self.say, on_progress=progress, files=self.files)
        if checkpoint is not None and not self.begins_with(checkpoint):
            refuse_other_curve(checkpoint, self.prepared.curve, allowed=self.prepared.run.config.run.allow_change)
        return checkpoint

    def pin_start(self) -> None:
        """Keeps the checkpoint with which the run begins, if any, from the retention of its own run. Collective."""
        if (origin := self.prepared.origin) is not None:
            self.say(on_rank_zero(partial(origin.pin, self.prepared.run.config.run.dir)))

    def begins_with(self, checkpoint: Checkpoint) -> bool:
        """Tells whether a checkpoint is the one of another run with which this run begins."""
        start = self.prepared.store.start
        return start is not None and checkpoint.path == start.path

    def allocate(
        self, make_objective: MakeObjective, *, device: torch.device, mesh: Mesh | None, checkpoint: Checkpoint | None
    ) -> Engine:
        """Builds the engine with initial values, or with zeros if a checkpoint is loaded next. Collective."""
        prepared, objective = self.prepared, make_objective(self.prepared, device, mesh)
        values = prepared.values if checkpoint is None else Zeros(parameter_shapes(prepared.model))
        reporting = ReportsProgress(values, self.watchdog.report_progress)
        return build_engine(prepared.run, prepared.model, reporting, objective, device=device, mesh=mesh)

    def load(self, engine: Engine, checkpoint: Checkpoint | None) -> None:
        """Loads parameters and optimizer state from a checkpoint, if there is one. Collective.

        The optimizer starts afresh if the checkpoint's optimizer is of another kind and `run.allow_change` allows it.
        """
        if checkpoint is None:
            return
        fresh, began = fresh_optimizer_line(checkpoint, self.prepared.curve), time.monotonic()
        if (name := begins_afresh(self.prepared.run, checkpoint.step)) is not None:
            fresh = f"the optimizer's state starts at zero, as stage '{name}' says (optimizer_states)"
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
        self,
        engine: Engine,
        services: Sequence[Sink],
        checkpoint: Checkpoint | None,
        rollback: Rollback | None,
        *,
        border: bool = False,
    ) -> Stop:
        """Trains from the step after the checkpoint to the stage's last step or to a stop signal. Collective.

        Args:
            engine: engine with the checkpoint's state, or the initial state.
            services: sinks besides `metrics.jsonl`.
            checkpoint: checkpoint from which the run resumes; None at the start.
            rollback: the rollback that led back to the checkpoint; None without one.
            border: whether this process has trained the stage before.

        Raises:
            Rollback: a loss spike or a non-finite step is to be undone; the run has a checkpoint to load.
            TrainingError: the run cannot go on.
        """
        details, done = (checkpoint.manifest.details, checkpoint.step) if checkpoint else ({}, 0)
        branch = origin_details(checkpoint.manifest, self.prepared.origin) if checkpoint is not None else None
        imported = None if checkpoint is not None and self.begins_with(checkpoint) else details.get(IMPORTED)
        manifest = RunManifest(self.prepared, self.launch.rank, self.stages, imported, branch)
        on_rank_zero(partial(manifest.write, done))  # a run killed right after its checkpoint has no manifest yet
        skips = rollback.skips_from(done) if rollback else recorded_skips(checkpoint, self.prepared.run_dir)
        with ExitStack() as stack:
            journal = open_journal(self.attempt, self.prepared, from_step=done, stack=stack) if self._first else None
            sinks = Sinks([*services] if journal is None else [journal, *services])
            stack.callback(sinks.close)
            here = RankOfRun(
                prepared=self.prepared,
                rank=self.launch.rank,
                engine=engine,
                agreement=self.agreement,
                signals=self.signals,
                watchdog=self.watchdog,
                attempt=self.attempt,
                sinks=sinks,
                display=stack.enter_context(self._display(first=done)),
                checkpoint=checkpoint,
                stack=stack,
            )
            stepper = make_stepper(here, skips=skips, after=rollback)
            announce(here, self.launch, rollback, skips=skips, stages=self.stages, border=border)
            batches = RankBatches(self.prepared, self.launch.rank)
            group = open_group(here, stepper, batches)
            if group is not None and (stop := group.start()):
                return stop
            trainer = make_trainer(
                here,
                stepper=stepper,
                batches=batches,
                group=group,
                copies=self.copies.copier(rank=self.launch.rank, ranks_here=self.files.ranks_here),
                manifest=manifest,
                uploads=self.uploads,
                journal=journal,
            )
            self.attempt.training(trainer.progress.step)
            try:
                with explained_out_of_memory(self.prepared, self.agreement.device):
                    stop = trainer.train()
            except Rollback:
                self.watchdog.enter_phase("rolling back")
                trainer.saves.wait()
                raise
            except BaseException as error:
                self.watchdog.report_error(error)  # before the sinks are closed, which may take long
                raise
            self._finish(trainer, stop)
            return stop

    def _finish(self, trainer: Trainer, stop: Stop) -> None:
        """Ends the hooks, uploads the backlog, and prints how the run ended. Collective.

        Raises:
            TrainingError: the store accepts nothing for too long, or another process has taken over the run.
        """
        here, prepared, step = trainer.here, self.prepared, trainer.progress.step
        self.watchdog.enter_phase("finishing")
        trainer.hooks.end(step)
        if not stop and not self.is_last:
            return
        if self.uploads.url is not None:
            self.watchdog.enter_phase("uploading")
            while not on_rank_zero(lambda: self.uploads.finish(here.record, here.say, seconds=_UPLOADING_S)):
                self.watchdog.report_progress()
        here.say(closing_line(stop, step=step, steps=prepared.run.steps, run_dir=prepared.run_dir))
        if (goodput := self.attempt.account()) is not None:
            here.say(goodput)

    @property
    def _first(self) -> bool:
        return self.launch.rank == 0

    def _display(self, *, first: int) -> TrainingDisplay:
        run = self.prepared.run
        return TrainingDisplay(first=first, total=run.steps, shown=self._first, tokens=run.accounts.tokens)
