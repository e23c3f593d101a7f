"""A callback of training: says when the loss falls below a value for the first time. In a run's config:

{"callbacks": ["target_loss:make"]}
"""

from __future__ import annotations

from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers

TARGET = 5.0


def make(context: HookContext) -> Hook:
    """Makes the hook, on every rank."""
    return TargetLoss(context)


class TargetLoss(Hook):
    """Prints a line and records an event, once per attempt of the run."""

    def __init__(self, context: HookContext) -> None:
        self._here, self._reached = context.here, False

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:  # noqa: ARG002  the hook's signature
        """Compares the loss of a step, which all ranks know."""
        if not self._reached and numbers.result.loss < TARGET:
            self._reached = True
            self._here.say(f"step {numbers.step}: the loss is below {TARGET}")
            self._here.record(numbers.step, event="target_loss", loss=numbers.result.loss)
