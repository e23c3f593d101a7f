"""Runs training steps and handles non-finite values and loss spikes: recheck, skip, rollback or stop.

A step with an anomaly has not been applied to the weights yet, so it can be executed once more (recheck). Different
numbers indicate a device with intermittent errors (silent data corruption); equal numbers mean that the data or the
weights are the cause. The policy decides before the recheck whether its update may be applied, so no third execution is
needed.

A device may work ahead of the host by one step: the limits of a step are known before it begins, so the device itself
skips a step with an anomaly, and also the step begun after it. The host learns of the anomaly one step late, handles
that step, and begins the later step again.

Every decision follows from numbers that are equal on all ranks, so ranks decide alike without communication.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from foundation.errors import TrainingError
from pipeline.config.accounts import StepAccounts
from pipeline.config.sections.run import AnomaliesSection
from pipeline.data.micro_batch import StepBatch
from pipeline.data.skips import Skips
from pipeline.engines.base import (
    Engine,
    HostValues,
    PendingStep,
    StepOutcome,
    StepResult,
    UpdateLimits,
    no_host_values,
)
from pipeline.run.anomalies.replicas import check_replicas
from pipeline.run.anomalies.spike_detector import Anomaly, SpikeDetector, SpikeLimits

GPU_TOLERANCE = 1e-3
"""Relative difference that counts as reproduced on a GPU, where additions have no fixed order. On a CPU it is 0."""


class EventRecorder(Protocol):
    """Records an event."""

    def __call__(self, step: int, **values: Any) -> None:
        """Records an event of a step."""
        ...


class Rollback(Exception):  # noqa: N818  control flow, not an error
    """Raised to roll the run back to its newest checkpoint and skip the data since then.

    Attributes:
        step: the bad step.
        streak: number of bad steps so far without progress between them.
    """

    def __init__(
        self,
        step: int,
        anomaly: Anomaly,
        *,
        streak: int,
        skips: Skips,
        row: Mapping[str, Any],
        accounts: StepAccounts | None = None,
    ) -> None:
        super().__init__(f"roll back from step {step}")
        self.step, self.streak, self._accounts = step, streak, accounts
        self._anomaly, self._skips, self._row = anomaly, skips, dict(row)

    def skips_from(self, checkpoint_step: int) -> Skips:
        """Returns the run's skips after a rollback to the checkpoint of a step."""
        return self._skips.past(self.step, since=checkpoint_step, accounts=self._accounts)

    def event(self, skips: Skips) -> dict[str, Any]:
        """Returns the journal's row, which gets the checkpoint's step, since rows of later steps are removed."""
        return {"event": "rollback", "bad_step": self.step, **self._row, "action": "rollback", "skips": skips.plain()}

    def message(self, checkpoint_step: int) -> str:
        """Formats the message about the rollback, for people."""
        window = self._skips.data_step(self.step) - self._skips.data_step(checkpoint_step + 1) + 1
        action = f"rolling back from step {self.step} to step {checkpoint_step}, skipping the data of {window} steps"
        return f"step {self.step}: {self._anomaly}\n  {action}"


@dataclass
class _Streak:
    """Bad steps without progress between them: their `count`, and the number of the `last` one."""

    count: int = 0
    last: int = 0

    def bad(self, step: int) -> None:
        self.count, self.last = self.count + 1, max(self.last, step)

    def good(self, step: int) -> None:
        if step > self.last:
            self.count = 0


@dataclass(frozen=True)
class _Begun:
    """A step that was begun, with all that is needed to begin it again."""

    batch: StepBatch
    lr: float
    host_values: HostValues
    limits: SpikeLimits
    pending: PendingStep


class GuardedStepper:
    """Runs the steps of a training run.

    Args:
        engine: executes the steps.
        section: the config's `anomalies`.
        fp16: whether the loss is scaled (fp16).
        accounts: samples of every step of the run.
        skips: data that is skipped; also an attribute.
        record: records events; called on every rank, ignored on ranks without a journal.
        can_roll_back: returns whether there is a checkpoint for a rollback. Collective.
    """

    def __init__(
        self,
        engine: Engine,
        section: AnomaliesSection,
        *,
        fp16: bool,
        accounts: StepAccounts,
        skips: Skips,
        record: EventRecorder,
        can_roll_back: Callable[[], bool],
    ) -> None:
        self._engine, self._section = engine, section
        self._detector = SpikeDetector(window=section.window, deviations=section.deviations, scaled=fp16)
        self.skips, self._accounts = skips, accounts
        self._record, self._can_roll_back = record, can_roll_back
        self._streak = _Streak()
        self._begun: deque[_Begun] = deque()

    def train(self, batch: StepBatch, *, lr: float) -> StepResult:
        """Runs one step to its end, and applies the configured policy to an anomaly.

        Raises:
            TrainingError: the policy is to stop, or replicas differ.
            Rollback: the policy is to roll back.
        """
        self.begin(batch, lr=lr)
        *_, (_, result) = self.finished(drain=True)
        return result

    def begin(self, batch: StepBatch, *, lr: float, host_values: HostValues = no_host_values) -> None:
        """Begins a step; call `finished` before the next one.

        Args:
            batch: this rank's batch of the step.
            lr: learning rate.
            host_values: returns this rank's numbers; the step's result has their sums over all ranks.
        """
        self._begun.append(self._begin(batch, lr, host_values, after=self._begun[-1].pending if self._begun else None))

    def finished(self, *, drain: bool) -> Iterator[tuple[int, StepResult]]:
        """Yields begun steps in order, with their results, after it has handled any anomaly.

        Args:
            drain: whether to finish all steps; otherwise the newest step is left to a device that works ahead.

        Raises:
            TrainingError: the policy is to stop, or replicas differ.
            Rollback: the policy is to roll back.
        """
        ahead = 0 if drain or not self._engine.deferred else 1
        while len(self._begun) > ahead:
            begun = self._begun.popleft()
            yield begun.batch.step, self._finish(begun)

    def needs_drain(self, step: int) -> bool:
        """Tells whether a step must finish before the next begins, since replicas are checked after it."""
        every = self._section.check_replicas
        return bool(every and step % every == 0)

    def _begin(self, batch: StepBatch, lr: float, host_values: HostValues, *, after: PendingStep | None) -> _Begun:
        found = self._detector.limits(batch.step)
        limits = UpdateLimits() if self._applies_spikes else _limits_of(found)
        pending = self._engine.begin_step(batch, lr=lr, limits=limits, after=after, host_values=host_values)
        return _Begun(batch, lr, host_values, found, pending)

    def _finish(self, begun: _Begun) -> StepResult:
        result, step = begun.pending.result(), begun.batch.step
        behind = self._begun
        if result.skipped:
            self._begun = deque()  # later steps that were begun have not been applied either
        anomaly = begun.limits.check(result.loss, result.grad_norm)
        if anomaly is not None:
            result = replace(self._handle(begun, anomaly, result), host_sums=result.host_sums)
        if not begun.batch.has_targets:
            result = _undefined(result)
        elif result.outcome is StepOutcome.APPLIED:
            self._detector.add(step, result.loss, result.grad_norm)
            self._streak.good(step)
        if self.needs_drain(step):
            self._check_replicas(step)
        if behind is not self._begun:
            for each in behind:
                self.begin(each.batch, lr=each.lr, host_values=each.host_values)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON, for a checkpoint: a resumed run then decides like an uninterrupted one."""
        return {**self._detector.state_dict(), "streak": self._streak.count, "last_bad": self._streak.last}

    def load_state_dict(self, state: Mapping[str, Any], *, after: Rollback | None = None) -> None:
        """Restores the state of a checkpoint; `after` a rollback the streak of bad steps continues."""
        self._detector.load_state_dict(state)
        self._streak = _Streak(state.get("streak", 0), state.get("last_bad", 0))
        if after is not None:
            self._streak = _Streak(after.streak, after.step)

    def _check_replicas(self, step: int) -> None:
        try:
            check_replicas(self._engine.replicas(), step=step)
        except TrainingError as error:
            self._record(step, event="replicas", action="stop", why=str(error))
            raise

    @property
    def _applies_spikes(self) -> bool:
        """Whether a spike is applied at once, and only reported."""
        return self._section.spikes == "ignore" and not self._section.recheck

    def _handle(self, begun: _Begun, anomaly: Anomaly, first: StepResult) -> StepResult:
        """Rechecks a step with an anomaly if configured, and applies the policy unless the recheck was applied."""
        policy = self._section.non_finite if anomaly.kind == "non_finite" else self._section.spikes
        batch, result, reproduced = begun.batch, first, None
        if self._section.recheck:
            result = self._recheck(begun, ignore_spike=policy == "ignore")
            reproduced = self._equal(first.loss, result.loss) and self._equal(first.grad_norm, result.grad_norm)
            if not reproduced:
                second = {"loss_again": _plain(result.loss), "grad_norm_again": _plain(result.grad_norm)}
                action = "apply" if result.outcome is StepOutcome.APPLIED else policy
                self._record_event(batch.step, "flaky", anomaly, first, action=action, **second)
                if result.outcome is StepOutcome.APPLIED:
                    return result
        if result.outcome is StepOutcome.APPLIED:
            self._record_event(batch.step, anomaly.kind, anomaly, first, action="ignore", reproduced=reproduced)
            return result
        return self._apply_policy(batch.step, anomaly, first, policy, reproduced)

    def _recheck(self, begun: _Begun, *, ignore_spike: bool) -> StepResult:
        """Executes the step again; a repeated anomaly is not applied, unless spikes are ignored."""
        limits = UpdateLimits() if ignore_spike else _limits_of(begun.limits)
        # overflows are not reported: a repetition must not change fp16's loss scale
        return self._engine.train_step(begun.batch, lr=begun.lr, limits=replace(limits, repetition=True))

    def _apply_policy(
        self, step: int, anomaly: Anomaly, result: StepResult, policy: str, reproduced: bool | None
    ) -> StepResult:
        self._streak.bad(step)
        give_up = self._streak.count >= self._section.max_bad_steps
        if policy == "rollback" and not give_up:
            if self._can_roll_back():
                row = self._row(step, anomaly, result, cause=anomaly.kind, reproduced=reproduced)
                about: dict[str, Any] = {"skips": self.skips, "accounts": self._accounts}
                raise Rollback(step, anomaly, streak=self._streak.count, row=row, **about)
            policy = "skip"  # there is no checkpoint
        stop = give_up or policy == "stop"
        action = "stop" if stop else policy
        self._record_event(step, anomaly.kind, anomaly, result, action=action, reproduced=reproduced)
        if stop:
            raise self._error(step, anomaly, reproduced)
        return result

    def _equal(self, first: float, second: float) -> bool:
        if not (math.isfinite(first) and math.isfinite(second)):
            return math.isfinite(first) == math.isfinite(second)
        tolerance = 0.0 if self._engine.device_name == "cpu" else GPU_TOLERANCE
        return math.isclose(first, second, rel_tol=tolerance)

    def _record_event(self, step: int, event: str, anomaly: Anomaly, result: StepResult, **more: Any) -> None:
        self._record(step, event=event, **self._row(step, anomaly, result, **more))

    def _row(self, step: int, anomaly: Anomaly, result: StepResult, **more: Any) -> dict[str, Any]:
        samples = self.skips.samples(step, self._accounts)
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm}
        limits = {"median": anomaly.median, "threshold": anomaly.threshold}
        return {
            "first_sample": samples[0],
            "last_sample": samples[-1],
            "what": anomaly.what,
            **{name: _plain(value) for name, value in numbers.items()},
            **{name: value for name, value in {**limits, **more}.items() if value is not None},
        }

    def _error(self, step: int, anomaly: Anomaly, reproduced: bool | None) -> TrainingError:
        samples = self.skips.samples(step, self._accounts)
        recheck = {None: "", True: " A recheck gave the same numbers.", False: " A recheck gave other numbers."}
        times = f"; {self._streak.count} bad steps without progress" if self._streak.count > 1 else ""
        field = "non_finite" if anomaly.kind == "non_finite" else "spikes"
        return TrainingError(
            f"step {step}: {anomaly}{times}\n"
            f"  it was not applied to the weights, and the last checkpoint is untouched.{recheck[reproduced]}\n"
            f"  try: headrace samples RUN --step {step} shows its text (samples {samples[0]} to"
            f" {samples[-1]}); anomalies.{field} skip or rollback; a lower optimizer.params.lr, gradient_clipping 1.0,"
            f" a longer warm-up"
        )


def _limits_of(limits: SpikeLimits) -> UpdateLimits:
    return UpdateLimits(limits.thresholds.get("loss", math.inf), limits.thresholds.get("grad_norm", math.inf))


def _undefined(result: StepResult) -> StepResult:
    """Returns the result of a step without targets: NaN means, which are left out of statistics."""
    return replace(result, loss=math.nan, grad_norm=math.nan, parts=dict.fromkeys(result.parts, math.nan))


def _plain(value: float) -> float | None:
    """Converts a number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None
