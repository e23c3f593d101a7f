"""Executing a step and answering for its numbers: what the loop calls instead of the engine.

A step whose numbers are out of the ordinary has not touched the weights yet, so it can be executed once more. Other
numbers the second time mean a device that computes wrongly now and then; the same ones, that it is the data or the
weights. The second time its gate is closed or open by what it is to lead to, so that no third is needed.

Every decision follows from numbers that are the same on all ranks: they decide alike, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.base.errors import TrainingError
from pipeline.anomalies.replicas import check_replicas
from pipeline.anomalies.spike_detector import Finding, SpikeDetector
from pipeline.config.schema import AnomaliesSection
from pipeline.data.loader import StepBatch
from pipeline.data.skips import Skips
from pipeline.engines.base import Engine, StepOutcome, StepResult

ON_A_GPU = 1e-3
"""Relative difference that is no fault where additions have no fixed order. On a CPU there is none."""


class EventRecorder(Protocol):
    """Takes note of an event."""

    def __call__(self, step: int, **values: Any) -> None:
        """Writes it."""
        ...


class Rollback(Exception):  # noqa: N818  an order, not an error
    """The run is to go back to its newest checkpoint and to pass over the data since then.

    Attributes:
        step: the bad one.
        streak: bad steps so far, without progress between them.
    """

    def __init__(self, step: int, why: Finding, *, streak: int, skips: Skips, row: Mapping[str, Any]) -> None:
        super().__init__(f"go back from step {step}")
        self.step, self.streak = step, streak
        self._why, self._skips, self._row = why, skips, dict(row)

    def skips_from(self, done: int) -> Skips:
        """What is passed over, now that the checkpoint of step `done` is gone back to."""
        return self._skips.past(self.step, since=done)

    def event(self, skips: Skips) -> dict[str, Any]:
        """The row of the journal, under the step that was gone back to: rows of later steps are cut off."""
        return {"event": "rollback", "bad_step": self.step, **self._row, "action": "rollback", "skips": skips.plain()}

    def told(self, done: int) -> str:
        """What a person is told."""
        window = self._skips.data_step(self.step) - self._skips.data_step(done + 1) + 1
        back = f"going back from step {self.step} to step {done}, passing over the data of {window} steps"
        return f"step {self.step}: {self._why}\n  {back}"


@dataclass
class _Streak:
    """Bad steps without progress between them: `count`, and the `last` of them."""

    count: int = 0
    last: int = 0

    def bad(self, step: int) -> None:
        self.count, self.last = self.count + 1, max(self.last, step)

    def good(self, step: int) -> None:
        if step > self.last:
            self.count = 0


class GuardedStepper:
    """The steps of a run.

    Args:
        engine: executes them.
        section: the config's `anomalies`.
        fp16: the loss is scaled.
        samples: per step, over all ranks.
        skips: which data is passed over; an attribute, too.
        record: takes note of events; every rank calls it, who keeps none ignores it.
        may_go_back: whether there is a checkpoint to go back to. Collective.
    """

    def __init__(
        self,
        engine: Engine,
        section: AnomaliesSection,
        *,
        fp16: bool,
        samples: int,
        skips: Skips,
        record: EventRecorder,
        may_go_back: Callable[[], bool],
    ) -> None:
        self._engine, self._section = engine, section
        self._judge = SpikeDetector(window=section.window, deviations=section.deviations, scaled=fp16)
        self.skips, self._samples = skips, samples
        self._record, self._may_go_back = record, may_go_back
        self._streak = _Streak()

    def train(self, batch: StepBatch, *, lr: float) -> StepResult:
        """One step, with what its numbers call for.

        Raises:
            TrainingError: the numbers are such that the run is to stop, or replicas differ.
            GoBack: they are such that it is to go back.
        """
        found: list[Finding | None] = []

        def allow(loss: float, norm: float) -> bool:
            finding = self._judge.finding(loss, norm)
            found.append(finding)
            # what is not finite is left out by the engine itself, which says so
            return finding is None or finding.kind == "non_finite" or self._lets_pass(finding)

        result = self._engine.train_step(batch, lr=lr, update_gate=allow)
        if found[0] is not None:
            result = self._look_again(batch, lr, found[0], result)
        if result.outcome is StepOutcome.APPLIED:
            self._judge.take(result.loss, result.grad_norm)
            self._streak.good(batch.step)
        every = self._section.check_replicas
        if every and batch.step % every == 0:
            self._compare(batch.step)
        return result

    def state(self) -> dict[str, Any]:
        """As plain JSON, for a checkpoint: a run that goes on from there decides as one that was not stopped."""
        return {**self._judge.state(), "streak": self._streak.count, "last_bad": self._streak.last}

    def load(self, state: Mapping[str, Any], *, after: Rollback | None = None) -> None:
        """Goes on from a state; from a checkpoint's, `after` an order to go back."""
        self._judge.load(state)
        self._streak = _Streak(state.get("streak", 0), state.get("last_bad", 0))
        if after is not None:
            self._streak = _Streak(after.streak, after.step)

    def _compare(self, step: int) -> None:
        try:
            check_replicas(self._engine.replicas(), step=step)
        except TrainingError as error:
            self._record(step, event="replicas", action="stop", why=str(error))
            raise

    def _lets_pass(self, finding: Finding) -> bool:
        return finding.kind == "spike" and self._section.spikes == "ignore" and not self._section.recheck

    def _look_again(self, batch: StepBatch, lr: float, finding: Finding, first: StepResult) -> StepResult:
        action = self._section.non_finite if finding.kind == "non_finite" else self._section.spikes
        result, same = first, None
        if self._section.recheck:
            result = self._again(batch, lr, ignored=action == "ignore")
            same = self._alike(first.loss, result.loss) and self._alike(first.grad_norm, result.grad_norm)
            if not same:
                again = {"loss_again": _plain(result.loss), "grad_norm_again": _plain(result.grad_norm)}
                applied = "apply" if result.outcome is StepOutcome.APPLIED else action
                self._note(batch.step, "flaky", finding, first, action=applied, **again)
                if result.outcome is StepOutcome.APPLIED:
                    return result
        if result.outcome is StepOutcome.APPLIED:
            self._note(batch.step, finding.kind, finding, first, action="ignore", reproduced=same)
            return result
        return self._answer(batch.step, finding, first, action, same)

    def _again(self, batch: StepBatch, lr: float, *, ignored: bool) -> StepResult:
        """The same step once more. It is not applied where it is bad again, unless that is to be ignored."""

        def allow(loss: float, norm: float) -> bool:
            # an overflow is not passed on either: fp16's scale has nothing to learn from a repetition
            finite = math.isfinite(loss) and math.isfinite(norm)
            return finite and (ignored or self._judge.finding(loss, norm) is None)

        return self._engine.train_step(batch, lr=lr, update_gate=allow)

    def _answer(self, step: int, finding: Finding, result: StepResult, action: str, same: bool | None) -> StepResult:
        self._streak.bad(step)
        given_up = self._streak.count >= self._section.max_bad_steps
        if action == "rollback" and not given_up:
            if self._may_go_back():
                row = self._row(step, finding, result, cause=finding.kind, reproduced=same)
                raise Rollback(step, finding, streak=self._streak.count, skips=self.skips, row=row)
            action = "skip"  # nothing to go back to
        stops = given_up or action == "stop"
        self._note(step, finding.kind, finding, result, action="stop" if stops else action, reproduced=same)
        if stops:
            raise self._error(step, finding, same)
        return result

    def _alike(self, first: float, second: float) -> bool:
        if not (math.isfinite(first) and math.isfinite(second)):
            return math.isfinite(first) == math.isfinite(second)
        tolerance = 0.0 if self._engine.device_name == "cpu" else ON_A_GPU
        return math.isclose(first, second, rel_tol=tolerance)

    def _note(self, step: int, event: str, finding: Finding, result: StepResult, **more: Any) -> None:
        self._record(step, event=event, **self._row(step, finding, result, **more))

    def _row(self, step: int, finding: Finding, result: StepResult, **more: Any) -> dict[str, Any]:
        samples = self.skips.samples(step, per_step=self._samples)
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm}
        limits = {"median": finding.median, "threshold": finding.threshold}
        return {
            "first_sample": samples[0],
            "last_sample": samples[-1],
            "what": finding.what,
            **{name: _plain(value) for name, value in numbers.items()},
            **{name: value for name, value in {**limits, **more}.items() if value is not None},
        }

    def _error(self, step: int, finding: Finding, same: bool | None) -> TrainingError:
        samples = self.skips.samples(step, per_step=self._samples)
        again = "" if same is None else " A repetition gave the same." if same else " A repetition gave other numbers."
        times = f"; {self._streak.count} bad steps without progress" if self._streak.count > 1 else ""
        field = "non_finite" if finding.kind == "non_finite" else "spikes"
        return TrainingError(
            f"step {step}: {finding}{times}\n"
            f"  it has not reached the weights, and the last checkpoint is untouched.{again}\n"
            f"  try: python -m pipeline samples RUN --step {step} shows its text (samples {samples[0]} to"
            f" {samples[-1]}); anomalies.{field} skip or rollback; a lower optimizer.params.lr, gradient_clipping 1.0,"
            f" a longer warm-up"
        )


def _plain(value: float) -> float | None:
    """A number as JSON has it: None where it is not finite."""
    return value if math.isfinite(value) else None
