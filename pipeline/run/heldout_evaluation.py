"""Evaluation of a training run: loss, perplexity and bits per byte of its held-out splits, and its tasks.

A stop ends it early. Results of a step that the journal has are not computed again on resume.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pipeline.data.dataset import TokenDataset
from pipeline.engines.base import Engine, EvaluationSums
from pipeline.run.checkpoint_saves import CheckpointSaves
from pipeline.run.surroundings import HeldOutBatches
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from pipeline.runtime.launch.host_copy import HostCopy
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.perplexity import bits_per_byte, perplexity, show_bits_per_byte
from pipeline.runtime.metrics.sinks import HELD_OUT, TASK, Sinks

if TYPE_CHECKING:
    from pipeline.evaluation.tasks.encode import EncodedTask
    from pipeline.run.task_evaluation import TaskEvaluation

T = TypeVar("T")


@dataclass(frozen=True)
class HeldOutEvaluation:
    """Scores the held-out splits and the tasks.

    Attributes:
        every: `evaluation.every`.
        last: the run's last step.
        engine: computes the losses.
        batches: the splits, and this rank's batches of them.
        saves: writes checkpoints; one under way is committed meanwhile.
        signals: stop signals of this process.
        agreement: all-reduces small numbers over all ranks.
        watchdog: is told the phase this rank is in.
        sinks: journal and tracking services, which take the results.
        display: messages.
        tasks: evaluates the run's tasks on this rank; None without any.
    """

    every: int | None
    last: int
    engine: Engine
    batches: HeldOutBatches
    saves: CheckpointSaves
    signals: StopSignals
    agreement: Agreement
    watchdog: Watchdog
    sinks: Sinks
    display: TrainingDisplay
    tasks: TaskEvaluation | None = None

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after a step; never without held-out data and tasks."""
        return bool(self.kinds) and (step == self.last or bool(self.every and step % self.every == 0))

    @property
    def kinds(self) -> list[str]:
        """Kinds of the journal's rows that an evaluation writes."""
        tasks = () if self.tasks is None else self.tasks.tasks
        return [HELD_OUT] * bool(self.batches.heldout) + [f"{TASK}{task.name}" for task in tasks]

    def evaluate(self, step: int, *, written: Collection[str] = ()) -> Stop:
        """Evaluates the held-out splits, then task after task. Collective.

        Ends early when the run is asked to stop, without the result of the running evaluation.

        Args:
            step: the last finished step.
            written: kinds of rows that the journal has of this step already.
        """
        stop = Stop.NO
        if self.batches.heldout and HELD_OUT not in written:
            stop = self._evaluate_heldout(step)
        for task in () if self.tasks is None else self.tasks.tasks:
            if not stop and f"{TASK}{task.name}" not in written:
                stop = self._evaluate_task(step, task)
        return stop

    def _evaluate_task(self, step: int, task: EncodedTask) -> Stop:
        assert self.tasks is not None
        started, interruptible = time.perf_counter(), _Interruptible(self)
        figures = self.tasks.figures(task, interruptible.batches)
        if figures is not None:
            seconds = time.perf_counter() - started
            self.sinks.write(f"{TASK}{task.name}", step, **figures, seconds=seconds)
            self.display.say(f"step {step}: {self.tasks.line(task, figures)}, {seconds:.1f} s")
        return interruptible.stop

    def _evaluate_heldout(self, step: int) -> Stop:
        """Computes loss, perplexity and bits per byte over all sources, each token counting once. Collective.

        A source whose evaluated windows have no target, because of a loss mask, is left out; without any source there
        is no result.
        """
        started = time.perf_counter()
        scored: list[tuple[TokenDataset, EvaluationSums]] = []
        interruptible = _Interruptible(self)
        for dataset in self.batches.heldout:
            sums = self.engine.evaluate(interruptible.batches(self.batches.evaluation(dataset)))
            if interruptible.cut_short:
                return interruptible.stop
            scored.append((dataset, sums))
        self._report_no_targets(step, [dataset for dataset, sums in scored if not sums.targets])
        if scored := [(dataset, sums) for dataset, sums in scored if sums.targets]:
            self._report(step, scored, seconds=time.perf_counter() - started)
        return interruptible.stop

    def _report_no_targets(self, step: int, datasets: Sequence[TokenDataset]) -> None:
        if datasets:
            names = [dataset.label for dataset in datasets]
            left = (
                "the evaluation is skipped"
                if len(names) == len(self.batches.heldout)
                else "the means are of the others"
            )
            self.sinks.event(step, event="no_targets", datasets=names)
            why = f"the loss mask leaves no target in the held-out windows of {', '.join(names)}"
            self.display.say(f"step {step}: {why}: {left}; more evaluation.samples may help")

    def _report(self, step: int, scored: Sequence[tuple[TokenDataset, EvaluationSums]], *, seconds: float) -> None:
        targets = sum(sums.targets for _, sums in scored)
        loss, per_byte = sum(sums.nats for _, sums in scored) / targets, _bits_per_byte(scored)
        row = {"loss": loss, "perplexity": perplexity(loss)}
        if per_byte is not None:
            row["bits_per_byte"] = per_byte
        self.sinks.write(HELD_OUT, step, **row, targets=targets, seconds=seconds)
        self.display.say(
            f"step {step}: held-out loss {loss:.4f}, perplexity {row['perplexity']:.2f},"
            f" {show_bits_per_byte(per_byte)} bits per byte ({targets:,} tokens, {seconds:.1f} s)"
        )


class _Interruptible:
    """Ends an evaluation between two batches when a stop is requested, on all ranks at the same batch.

    The flags of all ranks at a batch are read when the next one is due: no device is waited for.
    """

    def __init__(self, evaluation: HeldOutEvaluation) -> None:
        self._evaluation, self.stop, self.cut_short = evaluation, Stop.NO, False
        self._said: HostCopy | None = None

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Yields batches until the run is asked to stop; a stop during the last one cuts nothing short."""
        for batch in batches:
            self._evaluation.watchdog.enter_phase("evaluation")
            self._listen()
            if self.stop:
                self.cut_short = True
                return
            own = (self._evaluation.signals.requested, self._evaluation.saves.busy)
            self._said = self._evaluation.agreement.begin_max(*own)
            yield batch
        self._listen()

    def _listen(self) -> None:
        if self._said is not None:
            stop, busy = self._said.read()
            self._said, self.stop = None, max(self.stop, Stop(int(stop)))
            self._evaluation.saves.advance(busy=bool(busy))  # a save under way is committed before the evaluation ends


def _bits_per_byte(scored: Sequence[tuple[TokenDataset, EvaluationSums]]) -> float | None:
    """Bits per byte over all datasets; None where a loss mask leaves out a part of a dataset's text."""
    if any(dataset.masked for dataset, _ in scored):
        return None
    nats = sum(sums.nats / sums.targets * dataset.tokens for dataset, sums in scored)
    tokens, text_bytes = sum(dataset.tokens for dataset, _ in scored), sum(dataset.bytes for dataset, _ in scored)
    return bits_per_byte(nats / tokens, tokens=tokens, text_bytes=text_bytes)
