"""Evaluation of a training run: loss, perplexity and bits per byte of its held-out splits, and its tasks.

A stop ends it early. On resume, results that the journal already has are not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.dataset import TokenDataset
from pipeline.engines.base import EvaluationSums
from pipeline.run.batches import RankBatches
from pipeline.run.checkpoint_saves import CheckpointSaves
from pipeline.run.prepare import PreparedRun
from pipeline.run.rank_of_run import RankOfRun
from pipeline.runtime.faults.stop_signals import Stop
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero
from pipeline.runtime.launch.host_copy import HostCopy
from pipeline.runtime.metrics.journal import read_rows
from pipeline.runtime.metrics.perplexity import bits_per_byte, perplexity, show_bits_per_byte
from pipeline.runtime.metrics.sinks import HELD_OUT, SOURCES, TASK

if TYPE_CHECKING:
    from pipeline.evaluation.tasks.encode import EncodedTask
    from pipeline.run.task_evaluation import TaskEvaluation

T = TypeVar("T")
Scored = list[tuple[TokenDataset, EvaluationSums]]
"""Sources with their sums of losses."""


@dataclass(frozen=True)
class HeldOutEvaluation:
    """Scores the held-out splits and the tasks.

    Attributes:
        here: this rank of the run; its engine computes the losses.
        batches: this rank's batches of the held-out splits.
        saves: writes checkpoints; commits a checkpoint in progress during the evaluation.
        tasks: evaluates the run's tasks on this rank; None without tasks.
    """

    here: RankOfRun
    batches: RankBatches
    saves: CheckpointSaves
    tasks: TaskEvaluation | None = None

    def due(self, step: int) -> bool:
        """Tells whether there is an evaluation after a step; never without held-out data or tasks."""
        return bool(self.kinds) and is_due(self.here.run, step)

    def written(self, step: int) -> set[str]:
        """Returns the kinds of evaluation rows that the journal already has for a step. Collective."""
        return on_rank_zero(partial(_written, self.kinds, self.here.prepared.run_dir, step))

    @property
    def kinds(self) -> list[str]:
        """Kinds of the journal's rows that an evaluation writes."""
        return kinds_of(self.here.prepared)

    def evaluate(self, step: int, *, written: Collection[str] = ()) -> Stop:
        """Evaluates the held-out splits, then task after task. Collective.

        A stop request ends it early, without a result of the evaluation in progress.

        Args:
            step: the last finished step.
            written: kinds of rows that the journal already has for this step.
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
            self.here.sinks.write(f"{TASK}{task.name}", step, **figures, seconds=seconds)
            self.here.say(f"step {step}: {self.tasks.line(task, figures)}, {seconds:.1f} s")
        return interruptible.stop

    def _evaluate_heldout(self, step: int) -> Stop:
        """Computes loss, perplexity and bits per byte over all sources, each token counting once. Collective.

        A source is left out if a loss mask leaves no target in its evaluated windows; without any source there is no
        result.
        """
        started = time.perf_counter()
        interruptible, averaged = _Interruptible(self), Scored()
        scored = self._scored(interruptible)
        if self.here.run.config.run.ema is not None and not interruptible.cut_short:
            from pipeline.engines.optim.weight_ema import averaged_weights  # noqa: PLC0415

            with averaged_weights(self.here.engine):
                averaged = self._scored(interruptible)
        rate = None if interruptible.cut_short else self._acceptance(interruptible)
        if interruptible.cut_short:
            return interruptible.stop
        self._report_no_targets(step, [dataset for dataset, sums in scored if not sums.targets])
        if scored := [(dataset, sums) for dataset, sums in scored if sums.targets]:
            self._report(step, scored, averaged, seconds=time.perf_counter() - started, rate=rate)
        return interruptible.stop

    def _scored(self, interruptible: _Interruptible) -> Scored:
        """Returns the sums of every source; incomplete if the evaluation was cut short."""
        scored = Scored()
        for dataset in self.batches.heldout:
            sums = self.here.engine.evaluate(interruptible.batches(self.batches.evaluation(dataset)))
            if interruptible.cut_short:
                break
            scored.append((dataset, sums))
        return scored

    def _report_no_targets(self, step: int, datasets: Sequence[TokenDataset]) -> None:
        if datasets:
            names = [dataset.label for dataset in datasets]
            left = (
                "the evaluation is skipped"
                if len(names) == len(self.batches.heldout)
                else "the means are of the others"
            )
            self.here.record(step, event="no_targets", datasets=names)
            why = f"the loss mask leaves no target in the held-out windows of {', '.join(names)}"
            self.here.say(f"step {step}: {why}: {left}; more evaluation.samples may help")

    def _acceptance(self, interruptible: _Interruptible) -> float | None:
        """Computes the acceptance rate over all sources; None without multi-token prediction, or after a stop."""
        if self.here.run.config.loss.mtp is None:
            return None
        from pipeline.engines.parallel.acceptance import Acceptance  # noqa: PLC0415

        acceptance = Acceptance()
        for dataset in self.batches.heldout:
            self.here.engine.forward_passes(interruptible.batches(self.batches.evaluation(dataset)), acceptance)
            if interruptible.cut_short:
                return None
        return acceptance.rate(self.here.agreement.device)

    def _report(self, step: int, scored: Scored, averaged: Scored, *, seconds: float, rate: float | None) -> None:
        targets = sum(sums.targets for _, sums in scored)
        loss, per_byte = sum(sums.nats for _, sums in scored) / targets, _bits_per_byte(scored)
        row: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss)}
        if per_byte is not None:
            row["bits_per_byte"] = per_byte
        if averaged:
            row["ema_loss"] = sum(sums.nats for _, sums in averaged) / targets
        if len(scored) > 1:
            row[SOURCES] = {dataset.label: sums.nats / sums.targets for dataset, sums in scored}
        ema = f", EMA {row['ema_loss']:.4f}" if averaged else ""
        drafts = "" if rate is None else f", {rate:.1%} of the drafts of mtp accepted"
        if rate is not None:
            row["mtp_acceptance"] = rate
        self.here.sinks.write(HELD_OUT, step, **row, targets=targets, seconds=seconds)
        self.here.say(
            f"step {step}: held-out loss {loss:.4f}{ema}, perplexity {row['perplexity']:.2f},"
            f" {show_bits_per_byte(per_byte)} bits per byte{drafts} ({targets:,} tokens, {seconds:.1f} s)"
        )


class _Interruptible:
    """Ends an evaluation between two batches when a stop is requested, on all ranks at the same batch.

    All ranks' flags at a batch are read when the next batch is due, without waiting for a device.
    """

    def __init__(self, evaluation: HeldOutEvaluation) -> None:
        self._evaluation, self.stop, self.cut_short = evaluation, Stop.NO, False
        self._said: HostCopy | None = None

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Yields batches until the run is asked to stop; a stop during the last batch changes nothing."""
        for batch in batches:
            self._evaluation.here.watchdog.enter_phase("evaluation")
            self._listen()
            if self.stop:
                self.cut_short = True
                return
            own = (self._evaluation.here.signals.requested, self._evaluation.saves.busy)
            self._said = self._evaluation.here.agreement.begin_max(*own)
            yield batch
        self._listen()

    def _listen(self) -> None:
        if self._said is not None:
            stop, busy = self._said.read()
            self._said, self.stop = None, max(self.stop, Stop(int(stop)))
            self._evaluation.saves.advance(busy=bool(busy))  # commits a save in progress before the evaluation ends


def is_due(run: ResolvedRun, step: int) -> bool:
    """Tells whether the config asks for an evaluation after a step."""
    every, tokens = run.config.evaluation.every, run.config.evaluation.every_tokens
    if tokens and run.accounts.tokens(step) // tokens > run.accounts.tokens(step - 1) // tokens:
        return True
    return step == run.steps or bool(every and step % every == 0)


def kinds_of(prepared: PreparedRun) -> list[str]:
    """Kinds of the journal's rows that an evaluation of a run writes."""
    return [HELD_OUT] * bool(prepared.heldout) + [f"{TASK}{task.name}" for task in prepared.tasks]


def is_unfinished(prepared: PreparedRun, step: int) -> bool:
    """Tells whether the journal lacks results of the evaluation after a step. Collective."""
    kinds = kinds_of(prepared)
    if step == 0 or not kinds or not is_due(prepared.run, step):
        return False
    return len(on_rank_zero(partial(_written, kinds, prepared.run_dir, step))) < len(set(kinds))


def _written(kinds: Sequence[str], run_dir: Path, step: int) -> set[str]:
    return {row["kind"] for row in read_rows(run_dir, kind=kinds) if row["step"] == step}


def _bits_per_byte(scored: Sequence[tuple[TokenDataset, EvaluationSums]]) -> float | None:
    """Computes bits per byte over all datasets; None if a loss mask leaves out a part of a dataset's text."""
    if any(dataset.masked for dataset, _ in scored):
        return None
    nats = sum(sums.nats / sums.targets * dataset.tokens for dataset, sums in scored)
    tokens, text_bytes = sum(dataset.tokens for dataset, _ in scored), sum(dataset.bytes for dataset, _ in scored)
    return bits_per_byte(nats / tokens, tokens=tokens, text_bytes=text_bytes)
