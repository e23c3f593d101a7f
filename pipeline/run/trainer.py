"""The loop. Names no framework: an engine executes the steps, a writer keeps checkpoints, sinks take the numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.base.errors import CheckpointError, TrainingError
from pipeline.anomalies.guarded_step import GuardedStepper
from pipeline.checkpoint.save import CheckpointWriter, Saved, saved_or_error
from pipeline.checkpoint.store import CheckpointInfo
from pipeline.config.rules import ResolvedRun
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.base import Engine, StepResult, Sums
from pipeline.faults.agreement import Agreement
from pipeline.faults.stop import Stop, StopSignals
from pipeline.metrics.console import TrainingDisplay
from pipeline.metrics.stragglers import Stragglers
from pipeline.metrics.units import bits_per_byte, perplexity, show_bits_per_byte


class Sink(Protocol):
    """Takes rows of numbers: metrics.jsonl, W&B."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records a row."""
        ...


@dataclass
class Progress:
    """How far a run has got: its last finished step."""

    step: int


@dataclass(frozen=True)
class Trainer:
    """Everything one run of the loop needs.

    Attributes:
        run: the resolved config.
        engine: evaluates, and hands out its state.
        executed: executes steps, and answers for their numbers.
        steps: this rank's batches, from the first step to do to the last.
        heldout: evaluation data, and how this rank reads it.
        writer: writes checkpoints.
        about: what the manifest of a step's checkpoint says.
        on_saved: called on every rank when a checkpoint has its name.
        signals: whether this process was asked to stop.
        agreement: of all ranks.
        at: is told where this rank is: the phase, and the step where another one begins.
        sinks: where numbers go; empty on all ranks but one.
        display: what a person sees.
        flops_per_token: of the model, forward and backward.
        peak_flops: of one device, or None.
        stragglers: finds out who is slow.
        progress: kept up to date.
    """

    run: ResolvedRun
    engine: Engine
    executed: GuardedStepper
    steps: Iterable[StepBatch]
    heldout: Sequence[TokenDataset]
    heldout_batches: Callable[[TokenDataset], Iterator[MicroBatch]]
    writer: CheckpointWriter
    about: Callable[[int], CheckpointInfo]
    on_saved: Callable[[int], None]
    signals: StopSignals
    agreement: Agreement
    at: Callable[[str, int | None], None]
    sinks: Sequence[Sink]
    display: TrainingDisplay
    flops_per_token: float | None
    peak_flops: float | None
    stragglers: Stragglers
    progress: Progress

    def go(self) -> Stop:
        """Trains to the last step, evaluating and saving on the way and at the end; or to where it is asked to stop.

        Raises:
            CheckpointError: the last checkpoint could not be written. One on the way is tried again at its next time.
            TrainingError, GoBack: see `GuardedStepper.train`.
        """
        save_every = self.run.config.run.checkpoint_every
        started = time.perf_counter()
        for batch in self.stragglers.timed(self.steps):
            step = batch.step
            self.at("training", step)
            try:
                with self.stragglers.measured(step):
                    result = self.executed.train(batch, lr=self.run.schedule.lr(step))
            except TrainingError:  # on all ranks alike: what is being written is not lost for it
                self.settle()
                raise
            self.progress.step = step
            self._report(step, result, seconds=time.perf_counter() - started)
            self._report_stragglers(step)
            stop = self._look_around()
            last = step == self.run.steps
            if not stop and self.evaluation_due(step):
                stop = self.evaluate(step)
            if stop or last:
                self._save_last(step)
                return stop  # after the last step, too: what the evaluation has missed is made up for by a restart
            if save_every and step % save_every == 0:
                self._save(step)
            self.at("reading data", step + 1)
            started = time.perf_counter()
        return Stop.NO

    def settle(self) -> None:
        """Waits for a checkpoint that is being written. Collective."""
        self._tell(self.writer.wait())

    def stop_asked(self) -> Stop:
        """What any rank was asked. Collective."""
        return Stop(self.agreement.highest(self.signals.asked)[0])

    def evaluation_due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        every = self.run.config.evaluation.every
        return step == self.run.steps or bool(every and step % every == 0)

    def evaluate(self, step: int) -> Stop:
        """Held-out loss, perplexity and bits per byte over all sources, each token counting once.

        A source without a target in what is evaluated of it, which a loss mask may leave, does not enter; without any
        source there is no result. Ends early, and without a result, when the run is asked to stop.
        """
        started = time.perf_counter()
        scored: list[tuple[TokenDataset, Sums]] = []
        stopping = _Stopping(self)
        for dataset in self.heldout:
            sums = self.engine.evaluate(stopping.watched(self.heldout_batches(dataset)))
            if stopping.stop:
                return stopping.stop
            scored.append((dataset, sums))
        self._tell_without_targets(step, [dataset for dataset, sums in scored if not sums.targets])
        if scored := [(dataset, sums) for dataset, sums in scored if sums.targets]:
            self._report_evaluation(step, scored, seconds=time.perf_counter() - started)
        return Stop.NO

    def _tell_without_targets(self, step: int, datasets: Sequence[TokenDataset]) -> None:
        if datasets:
            names = [dataset.label for dataset in datasets]
            left = "the evaluation is skipped" if len(names) == len(self.heldout) else "the means are of the others"
            self._record("event", step, event="no_targets", datasets=names)
            why = f"nothing is learnt in the held-out windows of {', '.join(names)}"
            self.display.say(f"step {step}: {why}: {left}; more evaluation.samples may help")

    def _report_evaluation(self, step: int, scored: Sequence[tuple[TokenDataset, Sums]], *, seconds: float) -> None:
        targets = sum(sums.targets for _, sums in scored)
        loss, per_byte = sum(sums.nats for _, sums in scored) / targets, _bits_per_byte(scored)
        row = {"loss": loss, "perplexity": perplexity(loss)}
        if per_byte is not None:
            row["bits_per_byte"] = per_byte
        self._record("eval", step, **row, targets=targets, seconds=seconds)
        self.display.say(
            f"step {step}: held-out loss {loss:.4f}, perplexity {row['perplexity']:.2f},"
            f" {show_bits_per_byte(per_byte)} bits per byte ({targets:,} tokens, {seconds:.1f} s)"
        )

    def _look_around(self) -> Stop:
        """What all ranks have to agree on after a step: whether to stop, and whether a checkpoint is written."""
        stop, busy = self.agreement.highest(self.signals.asked, self.writer.busy)
        if self.writer.in_flight and not busy:
            self._tell(self.writer.settle())
        return Stop(stop)

    def _report(self, step: int, result: StepResult, *, seconds: float) -> None:
        batch = self.run.batch
        rate = batch.tokens / seconds
        per_device = rate / self.run.topology.world_size
        known = self.flops_per_token and self.peak_flops
        mfu = per_device * self.flops_per_token / self.peak_flops if known else None  # type: ignore[operator]
        lr = self.run.schedule.lr(step)
        self._record(
            "step",
            step,
            samples=step * batch.samples,
            tokens=step * batch.tokens,
            loss=result.loss,
            **result.parts,
            lr=lr,
            **_health(result),
            seconds=seconds,
            tokens_per_second=rate,
            **({"mfu": mfu} if mfu else {}),
        )
        self.display.step(step, loss=result.loss, lr=lr, tokens_per_second=rate, mfu=mfu)

    def _save(self, step: int) -> None:
        """Begins a checkpoint, when the one before is done. One that fails is told of, and training goes on."""
        self.at("saving", step)
        self._tell(self.writer.wait())
        try:
            self.writer.begin(self.about(step), self.engine.state)
        except CheckpointError as error:
            self._tell(Saved(step, None, str(error).splitlines()[0], 0.0, 0.0))

    def _save_last(self, step: int) -> None:
        self.at("saving", step)
        self._tell(self.writer.wait())
        self.writer.begin(self.about(step), self.engine.state)
        saved = self.writer.wait()
        assert saved is not None
        self._tell(saved, last=True)
        saved_or_error(saved)

    def _tell(self, saved: Saved | None, *, last: bool = False) -> None:
        if saved is None:
            return
        times = {"seconds": saved.seconds, "waited_seconds": saved.waited_s}
        if saved.checkpoint is not None:
            self.on_saved(saved.step)
            self._record("event", saved.step, event="checkpoint", path=str(saved.checkpoint.path), **times)
            return
        self._record("event", saved.step, event="checkpoint_failed", why=saved.failure, **times)
        if not last:  # that one is an error
            self.display.say(
                f"WARNING: the checkpoint of step {saved.step} could not be written: {saved.failure}\n"
                f"  training goes on; nothing since the checkpoint before is safe: free space there"
            )

    def _report_stragglers(self, step: int) -> None:
        report = self.stragglers.report(step)
        if report is not None:
            self._record("event", step, event="stragglers", **report.row())
            for line in report.lines():
                self.display.say(line)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        for sink in self.sinks:
            sink.write(kind, step, **values)


class _Stopping:
    """Ends an evaluation between two batches, on all ranks at the same one."""

    def __init__(self, training: Trainer) -> None:
        self._training, self.stop = training, Stop.NO

    def watched(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Hands on batches until the run is asked to stop."""
        for batch in batches:
            self._training.at("evaluation", None)
            self.stop = self._training.stop_asked()
            if self.stop:
                return
            yield batch


def _bits_per_byte(scored: Sequence[tuple[TokenDataset, Sums]]) -> float | None:
    """Of all of the datasets; None where one has a loss mask: the mean of some tokens says nothing of all bytes."""
    if any(dataset.masked for dataset, _ in scored):
        return None
    nats = sum(sums.nats / sums.targets * dataset.tokens for dataset, sums in scored)
    tokens, text_bytes = sum(dataset.tokens for dataset, _ in scored), sum(dataset.bytes for dataset, _ in scored)
    return bits_per_byte(nats / tokens, tokens=tokens, text_bytes=text_bytes)


def _health(result: StepResult) -> dict[str, Any]:
    """The gradient's norm where it is a number, what fp16 did, and why a step was not applied."""
    fp16 = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    norm = {"grad_norm": result.grad_norm} if math.isfinite(result.grad_norm) else {}
    return {**({"skipped": True, "outcome": result.outcome} if result.skipped else {}), **norm, **fp16}
