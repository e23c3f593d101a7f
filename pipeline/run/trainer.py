"""The training loop: when to step, save, evaluate, exchange and report. An engine runs the steps; no framework here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import TrainingError
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import StepResult
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.checkpoint_saves import CheckpointSaves
from pipeline.run.heldout_evaluation import HeldOutEvaluation
from pipeline.run.instruments import Instruments
from pipeline.run.progress import Progress
from pipeline.run.surroundings import Group, StudentSamples
from pipeline.run.uneven.balance_shares import ShareBalancer, shares_row
from pipeline.runtime.faults.agreement import Agreement, StepFlags
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from pipeline.runtime.launch.log_file import rotate_log
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.mfu import mfu
from pipeline.runtime.metrics.sinks import Sinks
from pipeline.runtime.metrics.step_clock import StepCost

SLOW_STEP_S = 5.0
"""Seconds of a step above which it is finished before the next is begun: a stop signal should not wait for two more."""


@dataclass(frozen=True)
class Trainer:
    """The training loop of one rank.

    Attributes:
        run: the resolved config.
        stepper: runs the training steps, and handles loss spikes and non-finite steps.
        steps: this rank's batches, from the first step to run to the last.
        saves: writes checkpoints.
        evaluation: scores the held-out splits and the tasks.
        signals: stop signals of this process.
        agreement: all-reduces small numbers over all ranks.
        watchdog: is told the phase and step this rank is in.
        sinks: journal and tracking services, for metrics and events; empty on all ranks but rank 0.
        display: progress bar and messages.
        instruments: clock, memory, stragglers, profiler and others that measure the steps.
        progress: the run's progress, kept up to date.
        student: completes a step's batch before it is begun; None where it has all of it from the data.
        group: exchanges with other islands or replicas; None in an ordinary run.
        balancer: divides the samples of steps by the measured speeds of ranks; None in fixed shares.
    """

    run: ResolvedRun
    stepper: GuardedStepper
    steps: Iterable[StepBatch]
    saves: CheckpointSaves
    evaluation: HeldOutEvaluation
    signals: StopSignals
    agreement: Agreement
    watchdog: Watchdog
    sinks: Sinks
    display: TrainingDisplay
    instruments: Instruments
    progress: Progress
    student: StudentSamples | None = None
    group: Group | None = None
    balancer: ShareBalancer | None = None

    def train(self) -> Stop:
        """Trains to the last step or to a stop signal: per step an update, then a checkpoint and an evaluation if due.

        Work is saved before it is evaluated. An evaluation that a stop signal cuts short is made up for at the next
        start.

        Raises:
            CheckpointError: the last checkpoint could not be written. One on the way is tried again at its next time.
            TrainingError: the policy for an anomaly is to stop, or replicas differ.
            Rollback: the policy for an anomaly is to roll back.
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
            save = self.saves.due(step) or time_is_up or last
            stop = self._exchange(step, stop, save=save)
            self._divide_anew(step)
            if stop or last:
                self.saves.save_last(step)
            elif save:
                with self.instruments.clock.excluded():
                    self.saves.save(step)
            if not stop and self.evaluation.due(step):
                stop = self.evaluate(step)
                if stop and not last:  # asked to stop meanwhile
                    stop = self._exchange(step, stop, save=True)
                    self.saves.save_last(step)
            if stop or last:
                return stop
            self.instruments.garbage.collect(step)
            rotate_log()
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
        """Ends an island that was waiting for others: they had finished, or it was asked to stop."""
        stop = self.agreement.requested_stop(self.signals)
        if self.group is not None and not (stop and self.progress.step == self.group.step):
            self.progress.step = self.group.step
            self.saves.save_last(self.progress.step)
            stop = stop or self.evaluate(self.progress.step)
        return stop

    def evaluate(self, step: int, *, written: Collection[str] = ()) -> Stop:
        """Calls `HeldOutEvaluation.evaluate`, outside a step's time."""
        with self.instruments.clock.excluded():
            return self.evaluation.evaluate(step, written=written)

    def _looks_at(self, step: int) -> bool:
        """Whether the state after a step is needed, so that the step is finished before another begins."""
        last = step == self.run.steps
        due = last or self.saves.due(step) or self.evaluation.due(step) or self.stepper.needs_drain(step)
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
        """This rank's flags, which are summed over all ranks with the numbers of a step."""
        slow = self.instruments.clock.last_lap > SLOW_STEP_S
        saves, grew = self.saves, self.instruments.memory.grew
        return StepFlags(self.signals.requested, saves.busy, saves.timer.due, grew, slow).values()

    def _finish_steps(self, *, drain: bool) -> tuple[Stop, bool]:
        """Reports finished steps, all that were begun or all but the one a device works on; advances a save.

        Returns:
            The stop that is requested on any rank, and whether it is time for a checkpoint.
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
        self.saves.advance(busy=out_of_date or any(flags.busy for flags in found))
        due = any(flags.checkpoint_due for flags in found) and not self.saves.pending
        return max(flags.stop for flags in found), due

    @contextmanager
    def _save_finished_first(self) -> Iterator[None]:
        """Lets a TrainingError, which all ranks raise alike, wait for a checkpoint that is being written."""
        try:
            yield
        except TrainingError:
            self.saves.wait()
            raise

    def _cost(self, memory: dict[str, int]) -> StepCost:
        """Cost of the step that has just ended, with its speed over all ranks and the MFU of one device."""
        seconds, waited = self.instruments.clock.lap()
        rate = self.run.batch.tokens / seconds
        own = rate if self.group is None else rate * self.group.own_share
        flops, peak = self.instruments.flops_per_token, self.instruments.peak_flops
        used = mfu(own, flops, peak, self.run.topology.world_size) if flops and peak else None
        return StepCost(seconds, waited, rate, used, memory)

    def _report(self, step: int, result: StepResult) -> None:
        batch, cost = self.run.batch, self._cost(self.instruments.memory.known)
        lr, parts = self.run.schedule.lr(step), result.parts
        if math.isnan(result.loss) and not result.skipped:
            self.sinks.event(step, event="no_targets")
            self.display.say(f"step {step}: no token of its batch is a target (loss mask): it has no loss")
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


def _health(result: StepResult) -> dict[str, Any]:
    """Gradient norm where it is finite, fp16's loss scale, and why an update was skipped."""
    fp16 = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    norm = {"grad_norm": result.grad_norm} if math.isfinite(result.grad_norm) else {}
    return {**({"skipped": True, "outcome": result.outcome} if result.skipped else {}), **norm, **fp16}
