"""One training session: from a resolved config to a finished run. What train.py and distill.py have in common."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.base.directory import write_manifest
from pipeline.anomalies.guarded_step import GuardedStepper, Rollback
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.store import Checkpoint, CheckpointInfo, on_rank_zero
from pipeline.config.rules import ResolvedRun
from pipeline.config.schema import Config
from pipeline.data.dataset import tokenizer_details
from pipeline.data.loader import StepLoader, heldout_batches
from pipeline.data.skips import NO_SKIPS, Skips, skips_of
from pipeline.engines.base import Engine, Objective
from pipeline.engines.build import build_engine, pick_device
from pipeline.engines.deepspeed.machine import check_machine
from pipeline.faults.agreement import Agreement
from pipeline.faults.progress import progress_by_reading
from pipeline.faults.stop import Stop, StopSignals, leave_in_order
from pipeline.faults.watchdog import Watchdog, watched
from pipeline.launch import Launch, Rendezvous, detect, process_group, stand_by
from pipeline.metrics.console import TrainingDisplay
from pipeline.metrics.journal import Journal, read_rows
from pipeline.metrics.peak import peak_flops
from pipeline.metrics.stragglers import Stragglers, peers_of
from pipeline.metrics.wandb_sink import WandbSink
from pipeline.models.values import ReportsProgress
from pipeline.parallel.assemble import stage_lines
from pipeline.parallel.mesh import Mesh, mesh_of
from pipeline.run.lock import exclusive_run
from pipeline.run.preflight import preflight
from pipeline.run.prepare import PreparedRun, prepare
from pipeline.run.resume import changed_fields, check_shared, refuse_other_curve
from pipeline.run.trainer import Progress, Sink, Trainer


def train(run: ResolvedRun, make_objective: Callable[[torch.device], Objective], *, signals: StopSignals) -> int:
    """Trains from where the newest checkpoint stopped to the end of the run, or to where it is asked to stop.

    Args:
        run: the resolved config.
        make_objective: called with this rank's device; what it returns is minimised.
        signals: what this process is asked from outside.

    Returns:
        The exit code of this rank; see `faults.stop`.

    Raises:
        HeadraceError: anything the user can mend; before work starts wherever it can be known by then.
    """
    launch = detect()
    if launch.rank >= run.topology.world_size:
        stand_by(launch, processes=run.topology.world_size, config=run.config.launch)
        return 0
    launch = replace(launch, world_size=run.topology.world_size)
    _quiet_libraries(launch)
    prepared = prepare(run)
    if run.config.engine == "deepspeed":
        check_machine(run.config)
    device = pick_device(launch)
    meeting: Rendezvous | None = None
    mesh: Mesh | None = None
    answered: str | None = None
    with ExitStack() as stack:
        stack.enter_context(exclusive_run(prepared.run_dir) if launch.rank == 0 else nullcontext())
        signals.take_interrupts()
        if not run.plain:
            meeting = stack.enter_context(process_group(launch, gpu=device.index, config=run.config.launch))
            mesh, answered = _preflight(run, meeting, device)
            check_shared(prepared.run_dir, meeting)
        limits, run_dir = run.config.watchdog, prepared.run_dir
        watchdog = stack.enter_context(watched(launch, meeting, config=limits, run_dir=run_dir))
        with watchdog:
            agreement = Agreement(device)
            stop = Stop(agreement.highest(signals.asked)[0])
            if not stop:
                objective = make_objective(device)
                values = ReportsProgress(prepared.values, watchdog.alive)
                engine = build_engine(run, prepared.model, values, objective, device=device, mesh=mesh)
                writer = _writer(prepared, watchdog)
                session = _Session(prepared, engine, writer, launch, signals, agreement, watchdog)
                stop = session.go(answered)
            elif launch.rank == 0:  # the engine and a checkpoint may take longer to make and read than there is time
                print(f"stopped by {stop} before it had begun: start it again to go on", flush=True)
        return leave_in_order(stop.exit_code, meeting, launcher=launch.launcher)


@dataclass(frozen=True)
class _Session:
    """A run with everything in its place.

    Attributes:
        prepared: what was looked at before.
        engine: ready for its first step.
        writer: of its checkpoints.
        launch: this process's place.
        signals: what it is asked from outside.
        agreement: of all ranks.
        watchdog: is told where this rank is.
    """

    prepared: PreparedRun
    engine: Engine
    writer: CheckpointWriter
    launch: Launch
    signals: StopSignals
    agreement: Agreement
    watchdog: Watchdog

    def go(self, answered: str | None) -> Stop:
        """Loads, tells, trains; goes back to a checkpoint as often as it is ordered to."""
        order: Rollback | None = None
        with ExitStack() as whole:
            services = cache(lambda: _services(self.prepared, whole))
            while True:
                try:
                    with ExitStack() as stack:
                        return self._train(answered, order, services, stack)
                except Rollback as again:
                    order, answered = again.with_traceback(None), None

    def _train(
        self, answered: str | None, order: Rollback | None, services: Callable[[], list[Sink]], stack: ExitStack
    ) -> Stop:
        prepared, run, shown = self.prepared, self.prepared.run, self.launch.rank == 0
        voice = TrainingDisplay(first=0, total=run.steps, shown=shown)
        checkpoint = prepared.store.newest_whole(voice.say, alive=self.watchdog.alive)
        done = checkpoint.step if checkpoint else 0
        if checkpoint is not None:
            refuse_other_curve(checkpoint, prepared.curve, allowed=run.config.run.allow_change)
            with progress_by_reading(self.watchdog.alive):
                self.engine.load(checkpoint.path)
        on_rank_zero(lambda: _tell_run(prepared, done))  # a run killed after its checkpoint has not told yet
        skips = order.skips_from(done) if order else _skips(prepared, checkpoint)
        sinks = [_journal(prepared, stack, from_step=done), *services()] if shown else []
        display = stack.enter_context(TrainingDisplay(first=done, total=run.steps, shown=shown))
        if answered is not None:
            display.say(answered)
        if order is not None:
            display.say(order.told(done))
        else:
            for line in _opening_lines(prepared, self.engine, self.launch, checkpoint):
                display.say(line)
        began = {"event": "resumed" if checkpoint else "started", "world_size": self.launch.world_size}
        for sink in sinks:
            sink.write("event", done, **(order.event(skips) if order else began))
        executed = self._executed(skips, sinks)
        if checkpoint is not None:
            if order is None:
                self._tell_changes(checkpoint, sinks, display)
            executed.load(checkpoint.manifest.details.get("anomalies", {}), after=order)
        training = self._training(done, executed, sinks, display)
        try:
            stop = self._missed(training, done) or training.go()
        except Rollback:
            self.watchdog.at("going back")
            training.settle()
            raise
        except BaseException as error:
            self.watchdog.fail(error)  # before the sinks are closed, which may take long
            raise
        self.watchdog.at("finishing")
        display.say(
            f"stopped by {stop} after step {training.progress.step}: start it again to go on"
            if stop
            else f"finished: {run.steps} steps, in {prepared.run_dir}"
        )
        return stop

    def _tell_changes(self, checkpoint: Checkpoint, sinks: list[Sink], display: TrainingDisplay) -> None:
        """Leaves a trace of what `run.allow_change` let pass."""
        fields = changed_fields(checkpoint.manifest.details["curve"], self.prepared.curve)
        for field, was, now in fields:
            display.say(f"changed since the checkpoint: {field}, was {was!r}, now {now!r}")
        for sink in sinks if fields else ():
            sink.write("event", checkpoint.step, event="changed", fields=[list(row) for row in fields])

    def _missed(self, training: Trainer, done: int) -> Stop:
        """Makes up for an evaluation that was cut short; finds out whether to begin at all."""
        stop = training.stop_asked()
        due = done > 0 and training.evaluation_due(done)
        if stop or not due or on_rank_zero(lambda: _evaluated(self.prepared.run_dir, done)):
            return stop
        return training.evaluate(done)

    def _executed(self, skips: Skips, sinks: list[Sink]) -> GuardedStepper:
        run = self.prepared.run

        def record(step: int, **values: Any) -> None:
            for sink in sinks:
                sink.write("event", step, **values)

        return GuardedStepper(
            self.engine,
            run.config.anomalies,
            fp16=run.config.fp16.enabled,
            samples=run.batch.samples,
            skips=skips,
            record=record,
            may_go_back=lambda: on_rank_zero(lambda: bool(self.prepared.store.all())),
        )

    def _training(self, done: int, executed: GuardedStepper, sinks: list[Sink], display: TrainingDisplay) -> Trainer:
        prepared, run = self.prepared, self.prepared.run
        place = run.topology.coordinates(self.launch.rank)
        share: dict[str, Any] = {
            "dp_rank": place["dp"],
            "cp": run.topology.cp,
            "cp_rank": place["cp"],
            "mask_documents": run.config.data.mask_documents,
        }
        ahead: dict[str, Any] = {"prefetch": run.config.data.prefetch, "pin": torch.cuda.is_available()}
        return Trainer(
            run=run,
            engine=self.engine,
            executed=executed,
            steps=StepLoader(
                prepared.blend, run.batch, **share, steps=(done + 1, run.steps), skips=executed.skips, **ahead
            ),
            heldout=prepared.heldout,
            heldout_batches=lambda dataset: heldout_batches(
                dataset,
                batch_size=run.batch.micro,
                dp=run.topology.dp,
                **share,
                samples=run.config.evaluation.samples,
            ),
            writer=self.writer,
            about=lambda step: _about(prepared, step, executed),
            on_saved=lambda step: _tell_if_possible(prepared, step, display.say) if self.launch.rank == 0 else None,
            signals=self.signals,
            agreement=self.agreement,
            at=self.watchdog.at,
            sinks=sinks,
            display=display,
            flops_per_token=prepared.size.flops_per_token,
            peak_flops=peak_flops(self.engine.device_name, bf16=run.config.bf16.enabled),
            stragglers=self._stragglers(),
            progress=Progress(done),
        )

    def _stragglers(self) -> Stragglers:
        run = self.prepared.run
        peers = peers_of(run.topology, ring=run.config.parallel.context == "ring")
        return Stragglers(run.config.stragglers, peers=peers, rank=self.launch.rank, gpu=torch.cuda.is_available())


def _writer(prepared: PreparedRun, watchdog: Watchdog) -> CheckpointWriter:
    config = prepared.run.config
    # what lies on a disk is brought into host memory to be written: a second copy would be too much
    background = config.run.async_checkpoints and not on_nvme(config)
    return CheckpointWriter(prepared.store, background=background, alive=watchdog.alive)


def on_nvme(config: Config) -> bool:
    """Whether a part of the state lies on a disk between steps."""
    zero = config.zero_optimization
    return "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)


def _evaluated(run_dir: Path, step: int) -> bool:
    return any(row["step"] == step for row in read_rows(run_dir, kind="eval"))


def _skips(prepared: PreparedRun, checkpoint: Checkpoint | None) -> Skips:
    """What data this run passes over. Collective."""
    if checkpoint is None:
        return NO_SKIPS
    details, step = checkpoint.manifest.details, checkpoint.step
    return on_rank_zero(lambda: skips_of(details, read_rows(prepared.run_dir, kind="event"), step=step))


def _about(prepared: PreparedRun, step: int, executed: GuardedStepper) -> CheckpointInfo:
    """What a checkpoint's manifest says."""
    run = prepared.run
    details = {
        "step": step,
        "samples": executed.skips.data_step(step) * run.batch.samples,
        "skips": executed.skips.plain(),
        "anomalies": executed.state(),
        "topology": str(run.topology),
        "engine": run.config.engine,
        "curve": prepared.curve,
        "hf_config": prepared.hf_config,
        "tokenizer": tokenizer_details(prepared.blend.sources[0].manifest),
    }
    return CheckpointInfo(step, run.config.model_dump(mode="json"), prepared.parents, details)


def _tell_run(prepared: PreparedRun, step: int) -> None:
    """Writes the run's manifest: how far it has got."""
    run = prepared.run
    summary = {"step": step, "steps": run.steps, "finished": step == run.steps}
    config = run.config.model_dump(mode="json")
    write_manifest(prepared.run_dir, kind="run", config=config, parents=prepared.parents, details=summary)


def _tell_if_possible(prepared: PreparedRun, step: int, say: Callable[[str], None]) -> None:
    """The same while training, which goes on when the disk is full; a start writes it anew."""
    try:
        _tell_run(prepared, step)
    except OSError as error:
        say(f"warning: the manifest of {prepared.run_dir} cannot be written: {error}")


def _opening_lines(
    prepared: PreparedRun, engine: Engine, launch: Launch, checkpoint: Checkpoint | None
) -> Iterator[str]:
    run, size = prepared.run, prepared.size
    samples = run.steps * run.batch.samples
    epochs = max(prepared.blend.order.epochs(samples))
    yield f"{launch} on {engine.device_name}; {run.layout}"
    yield f"{size.parameters:,} parameters, {run.precision}; {run.batch}"
    yield from stage_lines(run, prepared.model)
    yield (
        f"{run.steps:,} steps = {run.steps * run.batch.tokens:,} tokens,"
        f" {epochs:.2f} epochs of {prepared.blend.tokens:,}"
    )
    if checkpoint is not None:
        yield f"resuming after step {checkpoint.step} from {checkpoint.path}"


def _journal(prepared: PreparedRun, stack: ExitStack, *, from_step: int) -> Sink:
    journal = Journal(prepared.run_dir, from_step=from_step)
    stack.callback(journal.close)
    return journal


def _services(prepared: PreparedRun, stack: ExitStack) -> list[Sink]:
    """Where numbers go besides the journal."""
    if not prepared.run.config.wandb.enabled:
        return []
    wandb_sink = WandbSink(prepared.run.config, prepared.run_dir)
    stack.callback(wandb_sink.close)
    return [wandb_sink]


def _preflight(run: ResolvedRun, meeting: Rendezvous, device: torch.device) -> tuple[Mesh | None, str | None]:
    if meeting.world_size == 1:
        return None, None

    def make() -> Mesh:
        mesh = mesh_of(run, device.type)
        assert mesh is not None
        return mesh

    return preflight(meeting, make, device=device)


def _quiet_libraries(launch: Launch) -> None:
    """Libraries report on every rank; errors and our own lines are what a user needs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch 2.13 deprecates collectives that DeepSpeed 0.19 calls at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING if launch.rank == 0 else logging.ERROR)
