"""The loop. Names no framework: an engine executes the steps, a store keeps checkpoints, sinks take the numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.checkpoint.store import Checkpoint
from pipeline.config.rules import ResolvedRun
from pipeline.data.dataset import TokenDataset
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.base import Engine, StepResult
from pipeline.metrics.console import TrainingDisplay
from pipeline.metrics.units import bits_per_byte, perplexity


class Sink(Protocol):
    """Takes rows of numbers: metrics.jsonl, W&B."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records a row."""
        ...


@dataclass(frozen=True)
class Training:
    """Everything one run of the loop needs.

    Attributes:
        run: the resolved config.
        engine: executes steps.
        steps: this rank's batches, from the first step to do to the last.
        heldout: evaluation data, and how this rank reads it.
        save: writes a checkpoint after a step. Collective.
        sinks: where numbers go; empty on all ranks but one.
        display: what a person sees.
        flops_per_token: of the model, forward and backward.
        peak_flops: of one device, or None.
    """

    run: ResolvedRun
    engine: Engine
    steps: Iterable[StepBatch]
    heldout: Sequence[TokenDataset]
    heldout_batches: Callable[[TokenDataset], Iterator[MicroBatch]]
    save: Callable[[int], Checkpoint]
    sinks: Sequence[Sink]
    display: TrainingDisplay
    flops_per_token: float | None
    peak_flops: float | None

    def go(self) -> None:
        """Trains to the last step, evaluating and saving on the way and at the end."""
        run, evaluate_every = self.run.config.run, self.run.config.evaluation.every
        started = time.perf_counter()
        for batch in self.steps:
            step = batch.step
            result = self.engine.train_step(batch, lr=self.run.schedule.lr(step))
            self._report(step, result, seconds=time.perf_counter() - started)
            last = step == self.run.steps
            if last or (evaluate_every and step % evaluate_every == 0):
                self.evaluate(step)
            if last or (run.checkpoint_every and step % run.checkpoint_every == 0):
                self._save(step)
            started = time.perf_counter()

    def evaluate(self, step: int) -> None:
        """Held-out loss, perplexity and bits per byte over all sources, each token counting once."""
        started = time.perf_counter()
        nats, targets, tokens, text_bytes = 0.0, 0, 0, 0
        whole_nats = 0.0
        for dataset in self.heldout:
            sums = self.engine.evaluate(self.heldout_batches(dataset))
            nats, targets = nats + sums.nats, targets + sums.targets
            whole_nats += sums.nats / sums.targets * dataset.tokens
            tokens, text_bytes = tokens + dataset.tokens, text_bytes + dataset.bytes
        loss = nats / targets
        per_byte = bits_per_byte(whole_nats / tokens, tokens=tokens, text_bytes=text_bytes)
        seconds = time.perf_counter() - started
        row = {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": per_byte}
        self._record("eval", step, **row, targets=targets, seconds=seconds)
        self.display.say(
            f"step {step}: held-out loss {loss:.4f}, perplexity {row['perplexity']:.2f},"
            f" {per_byte:.4f} bits per byte ({targets:,} tokens, {seconds:.1f} s)"
        )

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
        started = time.perf_counter()
        checkpoint = self.save(step)
        seconds = time.perf_counter() - started
        self._record("event", step, event="checkpoint", path=str(checkpoint.path), seconds=seconds)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        for sink in self.sinks:
            sink.write(kind, step, **values)


def _health(result: StepResult) -> dict[str, Any]:
    """The gradient's norm, and what fp16 did. A skipped step has no norm: its gradient was not finite."""
    fp16 = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    return {"skipped": True, **fp16} if result.skipped else {"grad_norm": result.grad_norm, **fp16}
