"""The training loop: when to step, exchange, save, evaluate and stop. An engine runs the steps; no framework here.

Everything else that happens in a run is a hook, a file in `pipeline/run/hooks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

from pipeline.data.micro_batch import StepBatch
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.checkpoint_saves import CheckpointSaves, Progress
from pipeline.run.groups.group import Group
from pipeline.run.heldout_evaluation import HeldOutEvaluation
from pipeline.run.hooks.hooks import Hooks
from pipeline.run.rank_of_run import RankOfRun
from pipeline.runtime.faults.agreement import StepFlags
from pipeline.runtime.faults.stop_signals import Stop


@dataclass(frozen=True)
class Trainer:
    """The training loop of one rank.

    Attributes:
        here: this rank of the run.
        stepper: runs the training steps, and handles loss spikes and non-finite steps.
        steps: this rank's batches, from the first step to run to the last.
        saves: writes checkpoints.
        evaluation: scores the held-out splits and the tasks.
        hooks: hooks that observe and adjust the steps.
        progress: the run's progress, kept up to date.
        group: exchanges with other islands or replicas; None in an ordinary run.
    """

    here: RankOfRun
    stepper: GuardedStepper
    steps: Iterable[StepBatch]
    saves: CheckpointSaves
    evaluation: HeldOutEvaluation
    hooks: Hooks
    progress: Progress
    group: Group | None = None

    def train(self) -> Stop:
        """Trains to the last step of the run or of its stage, or to a stop signal.

        Work is saved before it is evaluated. An evaluation cut short by a stop is repeated at the next start.

        Raises:
            CheckpointError: the last checkpoint could not be written; an earlier failure only waits for the next one.
            TrainingError: the policy for an anomaly is to stop, or replicas differ.
            Rollback: the policy for an anomaly is to roll back.
        """
        done, stop = self.progress.step, self.here.agreement.requested_stop(self.here.signals)
        if done and not stop and self.evaluation.due(done):
            stop = self.evaluate(done, written=self.evaluation.written(done))
        if stop:
            return stop
        self.hooks.start(done)
        for batch in self.hooks.batches(self.steps):
            step, last = batch.step, batch.step == self.here.run.last_step
            stop, time_is_up = self._step(batch)
            self.hooks.after_step(step)
            save = self.saves.due(step) or time_is_up or last
            stop = self._exchange(step, stop, save=save)
            if stop or last:
                self.saves.save_last(step)
            elif save:
                with self.hooks.outside_step():
                    self.saves.save(step)
            if not stop and self.evaluation.due(step):
                stop = self.evaluate(step)
                if stop and not last:  # a stop was requested meanwhile
                    stop = self._exchange(step, stop, save=True)
                    self.saves.save_last(step)
            if stop or last:
                return stop
            self.here.watchdog.enter_phase("reading data", step + 1)
        return self._end_between_steps()

    def _step(self, batch: StepBatch) -> tuple[Stop, bool]:
        """Begins a step and reports finished ones: this step or, if a device works ahead, the previous step.

        Returns:
            The stop that is requested on any rank, and whether it is time for a checkpoint.
        """
        with self.saves.finished_before_an_error():
            self._begin(batch)
        stop, time_is_up = self._finish_steps(drain=self._needs_finished(batch.step))
        if stop or time_is_up:  # perhaps from an earlier step: the newest step is finished, too
            later, _ = self._finish_steps(drain=True)
            stop = max(stop, later)
        return stop, time_is_up

    def _begin(self, batch: StepBatch) -> None:
        self.here.watchdog.enter_phase("training", batch.step)
        self.progress.begun, span = batch.step, self.here.run.accounts.span(batch.step).first_step
        self.progress.targets[span] = self.progress.targets.get(span, 0) + batch.targets
        with self.hooks.step(batch) as whole:
            self.stepper.begin(whole, lr=self.here.run.schedule.lr(batch.step), host_values=self._flags)

    def _flags(self) -> list[float]:
        """Returns this rank's flags, which are summed over all ranks with a step's numbers."""
        saves = self.saves
        return StepFlags(self.here.signals.requested, saves.busy, saves.timer.due, self.hooks.flags()).values()

    def _needs_finished(self, step: int) -> bool:
        """Tells whether the state after a step is needed, and the step must finish before another begins."""
        due = step == self.here.run.last_step or self.saves.due(step) or self.evaluation.due(step)
        due = due or (self.group is not None and self.group.due(step))
        return due or self.stepper.needs_drain(step) or self.hooks.needs_finished(step)

    def _finish_steps(self, *, drain: bool) -> tuple[Stop, bool]:
        """Reports finished steps and advances a pending save; with `drain` it first waits for all begun steps."""
        found: list[StepFlags] = []
        with self.saves.finished_before_an_error():
            for step, result in self.stepper.finished(drain=drain):
                self.progress.step = step
                found.append(StepFlags.agreed(result.host_sums))
                self.hooks.numbers(step, result, found[-1].hooks, begun=self.progress.begun)
        if not found:
            return Stop.NO, False
        out_of_date = self.progress.step <= self.progress.advanced
        self.saves.advance(busy=out_of_date or any(flags.busy for flags in found))
        due = any(flags.checkpoint_due for flags in found) and not self.saves.pending
        return max(flags.stop for flags in found), due

    def _exchange(self, step: int, stop: Stop, *, save: bool) -> Stop:
        if self.group is None:
            return stop
        with self.hooks.outside_step() if self.group.excluded_from_step_time else nullcontext():
            if not stop and self.group.due(step):
                stop = self.group.exchange(step)
            return self.group.settle(step, stop) if stop or save else stop

    def evaluate(self, step: int, *, written: Collection[str] = ()) -> Stop:
        """Calls `HeldOutEvaluation.evaluate`, outside a step's time."""
        with self.hooks.outside_step():
            return self.evaluation.evaluate(step, written=written)

    def _end_between_steps(self) -> Stop:
        """Ends an island that waited for other islands: they had finished, or it was asked to stop."""
        stop = self.here.agreement.requested_stop(self.here.signals)
        if self.group is not None and not (stop and self.progress.step == self.group.step):
            self.progress.step = self.group.step
            self.saves.save_last(self.progress.step)
            stop = stop or self.evaluate(self.progress.step)
        return stop
