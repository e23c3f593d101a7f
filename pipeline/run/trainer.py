"""The training loop: steps, checkpoints, held-out evaluations, metrics. An engine runs the steps; no framework here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import CheckpointError, TrainingError
from pipeline.checkpoint.checkpoint import CheckpointInfo
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.save import CheckpointWriter, SaveResult, checkpoint_or_error
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.base import Engine, EvaluationSums, StepResult
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.checkpoint_timer import CheckpointTimer
from pipeline.run.instruments import Instruments
from pipeline.run.manifest import RunManifest
from pipeline.run.surroundings import Group, HeldOutBatches, StudentSamples
from pipeline.run.uneven.balance_shares import ShareBalancer, shares_row
from pipeline.runtime.faults.agreement import Agreement, StepFlags
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from pipeline.runtime.launch.host_copy import HostCopy
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.mfu import mfu
from pipeline.runtime.metrics.perplexity import bits_per_byte, perplexity, show_bits_per_byte
from pipeline.runtime.metrics.sinks import Sinks
from pipeline.runtime.metrics.step_clock import StepCost, Stopwatch

SLOW_STEP_S = 5.0
"""Seconds of a step above which it is finished before the next is begun: a stop signal should not wait for two more."""


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: the last finished step.
        begun: the last step that was begun; what the ranks have said with it is of that moment.
        advanced: the last step begun when a save was advanced: what was said until then is out of date.
        agreed: the last step begun when the peak of memory was agreed on.
        slow: steps take so long that no device needs to work ahead.
    """

    step: int
    begun: int = 0
    advanced: int = 0
    agreed: int = 0
    slow: bool = False


@dataclass(frozen=True)
class Trainer:
    """The training loop of one rank.

    Attributes:
        run: the resolved config.
        engine: runs evaluations, and hands out its state for checkpoints.
        stepper: runs the training steps, and handles loss spikes and non-finite steps.
        steps: this rank's batches, from the first step to run to the last.
        heldout: the held-out splits, and this rank's batches of them.
        writer: writes checkpoints.
        manifest: writes the run's manifest, and describes a checkpoint for its own.
        signals: stop signals of this process.
        agreement: all-reduces small numbers over all ranks.
        watchdog: is told the phase and step this rank is in.
        sinks: where metrics and events go; empty on all ranks but rank 0.
        display: progress bar and messages.
        instruments: what measures the steps.
        progress: kept up to date.
        timer: when a checkpoint is due by time.
        student: completes a step's batch before it is begun; None where it has all of it from the data.
        blocked: the time in which the loop waited for checkpoints.
        group: exchanges with other islands or replicas; None in an ordinary run.
        balancer: divides the samples of steps by the measured speeds of ranks; None in fixed shares.
    """

    run: ResolvedRun
    engine: Engine
    stepper: GuardedStepper
    steps: Iterable[StepBatch]
    heldout: HeldOutBatches
    writer: CheckpointWriter
    manifest: RunManifest
    signals: StopSignals
    agreement: Agreement
    watchdog: Watchdog
    sinks: Sinks
    display: TrainingDisplay
    instruments: Instruments
    progress: Progress
    timer: CheckpointTimer
    student: StudentSamples | None = None
    blocked: Stopwatch = field(default_factory=Stopwatch)
    group: Group | None = None
    balancer: ShareBalancer | None = None

    def train(self) -> Stop:
        """Trains to the last step or to a stop signal: per step an update, then a checkpoint and an evaluation if due.

        Work is saved before it is evaluated. An evaluation that a stop signal cuts short is made up for at the next
        start.

        Raises:
            CheckpointError: the last checkpoint could not be written. One on the way is tried again at its next time.
            TrainingError, Rollback: see `GuardedStepper.train`.
        """
        if self.balancer is not None:
            self.sinks.event(self.progress.step, event="shares", **shares_row(self.balancer.shares))
        for batch in self.instruments.clock.timed(self.instruments.stragglers.timed(self.steps)):
            step, last = batch.step, batch.step == self.run.steps
            with self._save_finished_first():
                self._begin(batch)
            stop, time_is_up = self._finish_steps(drain=self.progress.slow or self._looks_at(step))
            if stop or time_is_up:  # of a step before, perhaps: the newest is finished, too
                later, _ = self._finish_steps(drain=True)
                stop = max(stop, later)
            self._report_stragglers(step)
            save = self._checkpoint_due(step) or time_is_up or last
            stop = self._exchange(step, stop, save=save)
            self._divide_anew(step)
            if stop or last:
                self._save_last(step)
            elif save:
                self._save(step)
            if not stop and self.evaluation_due(step):
                stop = self.evaluate(step)
                if stop and not last:  # asked to stop meanwhile
                    stop = self._exchange(step, stop, save=True)
                    self._save_last(step)
            if stop or last:
                return stop
            self.instruments.garbage.collect(step)
            self.watchdog.enter_phase("reading data", step + 1)
        return self._end_between_steps()

    def _exchange(self, step: int, stop: Stop, *, save: bool) -> Stop:
        if self.group is None:
            return stop
        with self.instruments.clock.excluded() if self.group.excluded_from_step_time else nullcontext():
            if not stop and self.group.due(step):
                stop = self.group.exchange(step)
            return self.group.settle(step, stop) if stop or save else stop

    def _end_between_steps(self) -> Stop:
        """The end of an island that was waiting for others: they had finished, or it was asked to stop."""
        stop = self.agreement.requested_stop(self.signals)
        if self.group is not None and not (stop and self.progress.step == self.group.step):
            self.progress.step = self.group.step
            self._save_last(self.progress.step)
            stop = stop or self.evaluate(self.progress.step)
        return stop

    def wait_for_checkpoint(self) -> None:
        """Waits for a checkpoint that is being written. Collective."""
        with self.blocked.running():
            self._report_saved(self.writer.wait())
        self.writer.wait_for_copy()

    def evaluation_due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        every = self.run.config.evaluation.every
        return step == self.run.steps or bool(every and step % every == 0)

    def _checkpoint_due(self, step: int) -> bool:
        every = self.run.config.run.checkpoint_every
        return every != "auto" and bool(every and step % every == 0)

    def evaluate(self, step: int) -> Stop:
        """Held-out loss, perplexity and bits per byte over all sources, each token counting once.

        A source without a target in what is evaluated of it, which a loss mask may leave, does not enter; without any
        source there is no result. Ends early, and without a result, when the run is asked to stop.
        """
        with self.instruments.clock.excluded():
            return self._evaluate(step)

    def _evaluate(self, step: int) -> Stop:
        started = time.perf_counter()
        scored: list[tuple[TokenDataset, EvaluationSums]] = []
        interruptible = _Interruptible(self)
        for dataset in self.heldout.heldout:
            sums = self.engine.evaluate(interruptible.batches(self.heldout.evaluation(dataset)))
            if interruptible.cut_short:
                return interruptible.stop
            scored.append((dataset, sums))
        self._report_no_targets(step, [dataset for dataset, sums in scored if not sums.targets])
        if scored := [(dataset, sums) for dataset, sums in scored if sums.targets]:
            self._report_evaluation(step, scored, seconds=time.perf_counter() - started)
        return interruptible.stop

    def _report_no_targets(self, step: int, datasets: Sequence[TokenDataset]) -> None:
        if datasets:
            names = [dataset.label for dataset in datasets]
            left = (
                "the evaluation is skipped"
                if len(names) == len(self.heldout.heldout)
                else "the means are of the others"
            )
            self.sinks.event(step, event="no_targets", datasets=names)
            why = f"the loss mask leaves no target in the held-out windows of {', '.join(names)}"
            self.display.say(f"step {step}: {why}: {left}; more evaluation.samples may help")

    def _report_evaluation(
        self, step: int, scored: Sequence[tuple[TokenDataset, EvaluationSums]], *, seconds: float
    ) -> None:
        targets = sum(sums.targets for _, sums in scored)
        loss, per_byte = sum(sums.nats for _, sums in scored) / targets, _bits_per_byte(scored)
        row = {"loss": loss, "perplexity": perplexity(loss)}
        if per_byte is not None:
            row["bits_per_byte"] = per_byte
        self.sinks.write("eval", step, **row, targets=targets, seconds=seconds)
        self.display.say(
            f"step {step}: held-out loss {loss:.4f}, perplexity {row['perplexity']:.2f},"
            f" {show_bits_per_byte(per_byte)} bits per byte ({targets:,} tokens, {seconds:.1f} s)"
        )

    def _looks_at(self, step: int) -> bool:
        """Whether the state after a step is looked at, so that the step is finished before another begins."""
        last = step == self.run.steps
        due = last or self._checkpoint_due(step) or self.evaluation_due(step) or self.stepper.needs_drain(step)
        # a profile has the kernels of its own steps only
        due = due or (self.group is not None and self.group.due(step))
        profiled = self.instruments.profiler.begins_with(step + 1) or self.instruments.stragglers.profiles(step + 1)
        return due or profiled or self.instruments.profiler.ends_with(step)

    def _begin(self, batch: StepBatch) -> None:
        """Begins a step."""
        step = batch.step
        self.watchdog.enter_phase("training", step)
        self.progress.begun = step
        with self.instruments.clock.excluded():
            self.instruments.profiler.begin(step)
        if self.balancer is not None:
            self.balancer.begin(batch)
        with self.instruments.profiler.step(step), self.instruments.stragglers.measured(step):
            if self.student is not None:
                self.watchdog.enter_phase("generating", step)
                batch = self.student.complete(batch)
                self.watchdog.enter_phase("training", step)
            self.stepper.begin(batch, lr=self.run.schedule.lr(step), host_values=self._flags)

    def _flags(self) -> list[float]:
        """What this rank says with the numbers of a step."""
        slow = self.instruments.clock.last_lap > SLOW_STEP_S
        own = StepFlags(self.signals.requested, self.writer.busy, self.timer.due, self.instruments.memory.grew, slow)
        return own.values()

    def _finish_steps(self, *, drain: bool) -> tuple[Stop, bool]:
        """Reports the steps that are finished, all of them or those that a device at work leaves; advances a save.

        Returns:
            The stop that is requested of any rank, and whether it is time for a checkpoint.
        """
        found: list[StepFlags] = []
        with self._save_finished_first():
            for step, result in self.stepper.finished(drain=drain):
                self.progress.step = step
                found.append(StepFlags.agreed(result.host_sums))
                self.progress.slow = found[-1].slow
                if found[-1].memory_grew and step > self.progress.agreed:
                    self.instruments.memory.agree(self.agreement)
                    self.progress.agreed = self.progress.begun
                self._report(step, result)
                with self.instruments.clock.excluded():
                    self.instruments.profiler.finish(step)
        if not found:
            return Stop.NO, False
        out_of_date = self.progress.step <= self.progress.advanced
        self._advance_save(busy=out_of_date or any(flags.busy for flags in found))
        due = any(flags.checkpoint_due for flags in found) and not self.writer.pending
        return max(flags.stop for flags in found), due

    @contextmanager
    def _save_finished_first(self) -> Iterator[None]:
        """A TrainingError, which all ranks raise alike, waits for a checkpoint that is being written."""
        try:
            yield
        except TrainingError:
            self.wait_for_checkpoint()
            raise

    def _advance_save(self, *, busy: bool) -> None:
        if self.writer.pending and not busy:
            self.progress.advanced = self.progress.begun
            self._report_saved(self.writer.advance())

    def _cost(self, memory: dict[str, int]) -> StepCost:
        """What the step took that has just ended, with its speed over all ranks and the MFU of one device."""
        seconds, waited = self.instruments.clock.lap()
        rate = self.run.batch.tokens / seconds
        own = rate if self.group is None else rate * self.group.own_share
        flops, peak = self.instruments.flops_per_token, self.instruments.peak_flops
        used = mfu(own, flops, peak, self.run.topology.world_size) if flops and peak else None
        return StepCost(seconds, waited, rate, used, memory)

    def _report(self, step: int, result: StepResult) -> None:
        batch, cost = self.run.batch, self._cost(self.instruments.memory.known)
        lr, parts = self.run.schedule.lr(step), result.parts
        if self.student is not None:
            parts = self.student.figures(step, parts, seconds=cost.seconds)
        self.sinks.write(
            "step",
            step,
            samples=step * batch.samples,
            tokens=step * batch.tokens,
            loss=result.loss,
            **parts,
            lr=lr,
            **_health(result),
            **cost.row(),
        )
        graphs, compile_s = self.instruments.compilations()
        self.instruments.times.add(cost.seconds, compiled=bool(graphs))
        if graphs:
            self.sinks.event(step, event="compiled", graphs=graphs, seconds=compile_s)
            self.display.say(f"step {step}: {graphs} graphs compiled in {compile_s:.1f} s")
        self.display.step(step, loss=result.loss, grad_norm=result.grad_norm, lr=lr, cost=cost)

    def _save(self, step: int) -> None:
        """Starts writing a checkpoint once the previous one is written. A failure is reported, and training goes on."""
        with self.instruments.clock.excluded(), self.blocked.running():
            self._begin_checkpoint(step)

    def _begin_checkpoint(self, step: int) -> None:
        self.watchdog.enter_phase("saving", step)
        self.timer.restart()
        self._report_saved(self.writer.wait())
        self.sinks.flush()  # a checkpoint has the rows of its steps, even if the process is killed next
        try:
            self.writer.begin(self._described(step), self._state)
        except CheckpointError as error:
            self._report_saved(SaveResult(step, None, str(error).splitlines()[0], 0.0, 0.0))

    def _described(self, step: int) -> CheckpointInfo:
        return self.manifest.checkpoint(step, self.stepper, groups=self.group.details() if self.group else None)

    @property
    def _state(self) -> Callable[[], State]:
        return self.engine.state if self.group is None else self.group.state

    def _save_last(self, step: int) -> None:
        """Writes the checkpoint after which the run ends, unless it is written already.

        A run that is to go on finds a copy of it in memory.
        """
        if self.group is not None and step < self.run.steps:
            self.group.leave()
        with self.blocked.running():
            self._write_last(step)
        if step == self.run.steps:
            self.writer.stop_copy()
        else:
            self.writer.wait_for_copy()

    def _write_last(self, step: int) -> None:
        self.watchdog.enter_phase("saving", step)
        previous = self.writer.wait()
        self._report_saved(previous)
        if previous is not None and previous.step == step and previous.checkpoint is not None:
            return
        self.sinks.flush()
        self.writer.begin(self._described(step), self._state)
        saved = self.writer.wait()
        assert saved is not None
        self._report_saved(saved, last=True)
        checkpoint_or_error(saved)

    def _report_saved(self, saved: SaveResult | None, *, last: bool = False) -> None:
        if saved is None:
            return
        times = {"seconds": saved.seconds, "waited_seconds": saved.waited_s, "blocked_seconds": self.blocked.take()}
        if saved.checkpoint is not None:
            self.manifest.write_if_possible(saved.step, self.display.say)
            self.sinks.event(saved.step, event="checkpoint", path=str(saved.checkpoint.path), **times)
            self._report_not_copied(saved)
            decision = self.timer.saved(waited_s=saved.waited_s, seconds=saved.seconds)
            if decision is not None:
                self.sinks.event(saved.step, event="checkpoint_interval", **decision.row())
                self.display.say(f"step {saved.step}: {decision}")
            self.sinks.flush()
            return
        self.sinks.event(saved.step, event="checkpoint_failed", why=saved.failure, **times)
        if not last:  # that one is an error
            self.display.say(
                f"WARNING: the checkpoint of step {saved.step} could not be written: {saved.failure}\n"
                f"  training goes on; nothing since the checkpoint before is safe: free space there"
            )

    def _report_not_copied(self, saved: SaveResult) -> None:
        if saved.not_copied:
            ranks = sorted(saved.not_copied)
            why = saved.not_copied[ranks[0]]
            self.sinks.event(saved.step, event="checkpoint_not_copied", ranks=ranks, why=why)
            files = f"warning: {len(ranks)} checkpoint files were not copied into memory (rank {ranks[0]}: {why})"
            self.display.say(f"{files}; a restart reads them from the run's directory")

    def _divide_anew(self, step: int) -> None:
        change = None if self.balancer is None else self.balancer.update(step)
        if change is not None:
            self.sinks.event(step, event="shares", **change.row())
            self.display.say(change.line(step))

    def _report_stragglers(self, step: int) -> None:
        report = self.instruments.stragglers.report(step)
        if report is not None:
            self.sinks.event(step, event="stragglers", **report.row())
            for line in report.lines():
                self.display.say(line)


class _Interruptible:
    """Ends an evaluation between two batches when a stop is requested, on all ranks at the same batch.

    What the ranks say at a batch is read when the next one is due: no device is waited for.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.stop, self.cut_short = trainer, Stop.NO, False
        self._said: HostCopy | None = None

    def batches(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields batches until the run is asked to stop; what was asked during the last one cuts nothing short."""
        for batch in batches:
            self._trainer.watchdog.enter_phase("evaluation")
            self._listen()
            if self.stop:
                self.cut_short = True
                return
            own = (self._trainer.signals.requested, self._trainer.writer.busy)
            self._said = self._trainer.agreement.begin_max(*own)
            yield batch
        self._listen()

    def _listen(self) -> None:
        if self._said is not None:
            stop, busy = self._said.read()
            self._said, self.stop = None, max(self.stop, Stop(int(stop)))
            self._trainer._advance_save(busy=bool(busy))  # a save under way is committed before the evaluation ends


def _bits_per_byte(scored: Sequence[tuple[TokenDataset, EvaluationSums]]) -> float | None:
    """Bits per byte over all datasets; None where one has a loss mask, whose loss is not that of the whole text."""
    if any(dataset.masked for dataset, _ in scored):
        return None
    nats = sum(sums.nats / sums.targets * dataset.tokens for dataset, sums in scored)
    tokens, text_bytes = sum(dataset.tokens for dataset, _ in scored), sum(dataset.bytes for dataset, _ in scored)
    return bits_per_byte(nats / tokens, tokens=tokens, text_bytes=text_bytes)


def _health(result: StepResult) -> dict[str, Any]:
    """Gradient norm where it is finite, fp16's loss scale, and why an update was skipped."""
    fp16 = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    norm = {"grad_norm": result.grad_norm} if math.isfinite(result.grad_norm) else {}
    return {**({"skipped": True, "outcome": result.outcome} if result.skipped else {}), **norm, **fp16}
