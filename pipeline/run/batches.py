"""The batches of one rank, for the training steps and for the held-out evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.config.batch import BatchSizes, part_of_batch
from pipeline.config.rules.layout import micro_batch_constraints
from pipeline.data.dataset import TokenDataset
from pipeline.data.divided import CurrentBatch, DividedSteps, JoinedSteps
from pipeline.data.loader import StepLoader, TargetSum, heldout_batches
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.data.skips import NO_SKIPS, Skips, skips_of
from pipeline.engines.parallel.compilation import compiles
from pipeline.run.prepare import PreparedRun
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero
from pipeline.runtime.metrics.journal import read_rows


@dataclass(frozen=True)
class RankBatches:
    """Reads this rank's part of every global batch, and of every held-out batch.

    Attributes:
        prepared: the run.
        rank: global rank of this process.
    """

    prepared: PreparedRun
    rank: int

    @cached_property
    def current(self) -> CurrentBatch | None:
        """Batch sizes of the next step, where shares are measured; None where shares are fixed."""
        run = self.prepared.run
        return CurrentBatch(run.batch) if run.config.parallel.shares == "auto" and run.topology.dp > 1 else None

    @property
    def heldout(self) -> list[TokenDataset]:
        """Held-out splits of all sources."""
        return self.prepared.heldout

    def training(self, *, first_step: int, skips: Skips) -> Iterable[StepBatch]:
        """Returns the batches from `first_step` to the stage's last step, without the data that `skips` leaves out."""
        return self._steps(first_step, self.prepared.run.last_step, skips=skips)

    def slots(self, first: int, last: int) -> Iterable[StepBatch]:
        """Returns the batches of global batches `first` to `last` in sample order, counted from 1, without skips."""
        return self._steps(first, last, skips=NO_SKIPS)

    def _steps(self, first: int, last: int, *, skips: Skips) -> Iterable[StepBatch]:
        if self.current is not None:
            return DividedSteps(partial(self._load, skips=skips), self.current, steps=(first, last))
        topology = self.prepared.run.topology
        target_sum = partial(_begin_sum, copies=topology.world_size // topology.dp) if topology.dp > 1 else None
        load, run = partial(self._load, skips=skips, target_sum=target_sum), self.prepared.run
        parts = run.accounts.parts(first, last) if run.ramps else ()
        loaders = [partial(load, run.batch_of(begin), (begin, end)) for begin, end, _ in parts]
        return JoinedSteps(loaders) if loaders else load(run.batch, (first, last))

    def part(self, ranges: Sequence[tuple[int, int]], steps: tuple[int, int], *, skips: Skips) -> StepLoader:
        """Returns the batches of some samples of each step, which one replica of the model runs.

        Args:
            ranges: (first, end) ranges of sample indices in the step.
            steps: (first, last) step, counted from 1.
            skips: data that is left out.
        """
        run = self.prepared.run
        shapes_change = run.topology.pp == 1 and not compiles(run.config.compile)
        least, multiple = micro_batch_constraints(run.config.parallel, run.topology)
        batch = part_of_batch(
            run.batch, ranges, shapes_change=shapes_change, min_micro_batches=least, multiple_of=multiple
        )
        return self._load(batch, steps, skips=skips)

    def _load(
        self, batch: BatchSizes, steps: tuple[int, int], *, skips: Skips, target_sum: TargetSum | None = None
    ) -> StepLoader:
        return StepLoader(
            self.prepared.mixture,
            batch,
            **self._position(),
            steps=steps,
            skips=skips,
            accounts=self.prepared.run.accounts,
            logits=self.prepared.logits,
            target_sum=target_sum,
            prefetch=self.prepared.run.config.data.prefetch,
            pin=torch.cuda.is_available(),
        )

    def evaluation(self, dataset: TokenDataset) -> Iterator[MicroBatch]:
        """Yields the held-out batches of a split: `evaluation.samples` windows spread over it, or all windows."""
        run = self.prepared.run
        samples = run.config.evaluation.samples
        batches = heldout_batches(
            dataset, batch_size=run.batch.micro, dp=run.topology.dp, **self._position(), samples=samples
        )
        # with pageable memory the host would wait until a batch is copied
        return (batch.pin_memory() for batch in batches) if torch.cuda.is_available() else batches

    def _position(self) -> dict[str, Any]:
        run = self.prepared.run
        coordinates = run.topology.coordinates(self.rank)
        return {
            "dp_rank": coordinates["dp"],
            "cp": run.topology.cp,
            "cp_rank": coordinates["cp"],
            "zigzag": run.zigzag,
            "mask_documents": run.config.data.mask_documents,
        }


def _begin_sum(own: Tensor, *, copies: int) -> Callable[[], Tensor]:
    """Begins to sum int64 values on the host over the data-parallel ranks, each of which consists of `copies` ranks.

    The all-reduce is over all ranks: smaller groups may have no backend for host memory beside NCCL.
    """
    work = dist.all_reduce(own, async_op=True)

    def summed() -> Tensor:
        assert work is not None
        work.wait()
        return own // copies

    return summed


def recorded_skips(checkpoint: Checkpoint | None, run_dir: Path) -> Skips:
    """Reads the data that the run skips after the checkpoint, from its manifest and the journal. Collective."""
    return NO_SKIPS if checkpoint is None else on_rank_zero(partial(skips_after, checkpoint, run_dir))


def skips_after(checkpoint: Checkpoint, run_dir: Path) -> Skips:
    """Reads which data the run skips after the checkpoint."""
    return skips_of(checkpoint.manifest.details, read_rows(run_dir, kind="event"), step=checkpoint.step)
