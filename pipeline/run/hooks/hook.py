"""A hook: one feature of the training loop, which the loop calls at fixed points of every step.

The points, in the order of a step:

| method | when | for what |
|---|---|---|
| `start` | before the first step | events about the start |
| `batches` | around the iterator of batches | the wait for data |
| `step` | before the step is begun, until it is begun | measuring; changing the batch |
| `flag` | as the step is begun | a question to all ranks, which is answered with the step's numbers |
| `numbers` | when a step's numbers are known | rows, events, statistics |
| `after_step` | after every step, at the same one on all ranks | collectives |
| `outside_step` | around a save, an evaluation, an exchange | time that is not the step's |
| `end` | once the last step is saved, not after an error | events about the whole attempt |

A device works ahead of the host: the numbers of a step arrive after the next step has begun, unless a hook's
`needs_finished` asks for them first. `StepNumbers.begun` tells which step was begun last.

Hooks are called in the order of `hooks.HOOKS`; the first hook's context manager is the outermost. The list follows from
the config alone, so it is equal on every rank, and each method is called on all ranks alike: methods marked
"collective" may communicate. A function that makes a hook puts whatever has to be closed on `RankOfRun.stack`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from pipeline.data.divided import CurrentBatch
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import StepResult
from pipeline.run.groups.group import Group
from pipeline.run.rank_of_run import RankOfRun
from pipeline.runtime.metrics.step_clock import StepClock, StepCost


@dataclass(frozen=True)
class HookContext:
    """Objects from which hooks are made.

    Attributes:
        here: this rank of the run.
        clock: measures steps from report to report.
        group: exchanges with other islands or replicas; None in an ordinary run.
        current: batch sizes of the next step where shares are measured; None with fixed shares.
    """

    here: RankOfRun
    clock: StepClock
    group: Group | None = None
    current: CurrentBatch | None = None


@dataclass
class StepNumbers:
    """The numbers of a finished step, completed by one hook after another.

    Attributes:
        result: loss, gradient norm and outcome of the step, the same on all ranks.
        begun: number of the step that was begun last: this step or the next.
        parts: values for the step's row, about parts of the loss.
        memory: peak memory in bytes, and retries, by name (`PeakMemory`), the largest of all ranks.
        cost: time and speed of the step; set by the hook `step_time`.
        graphs: number of graphs compiled since the previous step.
    """

    step: int
    result: StepResult
    begun: int
    parts: dict[str, float]
    memory: dict[str, int] = field(default_factory=dict)
    cost: StepCost = field(default_factory=lambda: StepCost(0.0, 0.0, 0.0))
    graphs: int = 0


class Hook:
    """Does nothing at any point. A feature overrides the methods of its points."""

    def start(self, step: int) -> None:
        """Is called before the first step of this attempt, with the last finished step. Collective."""

    def batches(self, steps: Iterable[StepBatch]) -> Iterable[StepBatch]:
        """Returns the iterable of batches, which a hook may wrap."""
        return steps

    def step(self, batch: StepBatch) -> AbstractContextManager[StepBatch]:
        """Returns a context manager that yields the batch to train, and ends when the step is begun. Collective."""
        return nullcontext(batch)

    def flag(self) -> bool:
        """Returns this rank's flag. If it is True on any rank, `numbers` is called with `raised=True` on every rank."""
        raise NotImplementedError

    def needs_finished(self, step: int) -> bool:
        """Tells whether to finish a step before the next one begins; the same on all ranks."""
        return False

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Is called when a step's numbers are known. Collective.

        Args:
            numbers: numbers of the step, to be read and completed.
            raised: whether `flag` was set on any rank when the step was begun; False for a hook without a flag.
        """

    def after_step(self, step: int) -> None:
        """Is called after every step, before its exchange and its save. Collective."""

    def outside_step(self) -> AbstractContextManager[None]:
        """Returns a context manager around a save, an evaluation or an exchange."""
        return nullcontext()

    def end(self, step: int) -> None:
        """Is called once the attempt's last step is saved; not after an error or before a rollback. Collective."""
