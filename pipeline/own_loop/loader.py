"""Distributes a user's loader over ranks: all ranks together see the samples of one process, in the same order.

Rank 0's sampler determines the order for all ranks: they need no equal seeds. An incomplete last global batch is never
padded with copies. It is refused, or dropped if the loader has `drop_last`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from foundation.errors import ConfigError, DataError
from pipeline.own_loop.batches import moved, part_of, samples_in
from pipeline.own_loop.config import BatchShare

_BLOCK = 256
"""Number of optimizer steps whose sample order is broadcast at a time."""


def batch_size_of(loader: Any) -> int | None:
    """Batch size of a torch DataLoader; None for other iterables, where batches show it."""
    if isinstance(loader, DataLoader):
        return getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return None


def distribute(
    loader: Iterable[Any], share: BatchShare, *, device: torch.device, say: Callable[[str], None]
) -> SharedLoader:
    """Makes a loader of this rank's micro-batches, on its device.

    Args:
        loader: a torch DataLoader, or any iterable of batches that is the same on all ranks.
        share: division of a global batch over ranks.
        device: this rank's device.
        say: prints a warning about dropped samples.

    Raises:
        ConfigError: the dataset is not a multiple of the global batch, and the loader has no `drop_last`.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler:
            return SharedLoader(_distributed(loader, sampler, share), share, device, say)
    return SharedLoader(loader, share, device, say)


class SharedLoader:
    """Iterates over this rank's micro-batches.

    Args:
        batches: this rank's micro-batches, or batches that are the same on all ranks.
        share: division of a global batch over ranks.
        device: this rank's device.
        say: prints a warning about dropped samples.
        skipped: micro-batches of this rank that are read and left out at the beginning of an epoch.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        share: BatchShare,
        device: torch.device,
        say: Callable[[str], None],
        *,
        skipped: int = 0,
    ) -> None:
        self._batches, self._share, self._device, self._say, self._skipped = batches, share, device, say, skipped

    @property
    def _sampler(self) -> _RankSampler | None:
        """The sampler of this rank's micro-batches; None if every rank reads all ranks' batches."""
        sampler = getattr(self._batches, "batch_sampler", None)
        return sampler if isinstance(sampler, _RankSampler) else None

    def skip_first_batches(self, batches: int) -> SharedLoader:
        """Returns a loader of the same epoch from a later micro-batch on, to continue after `engine.load`.

        The order of samples is that of the full epoch. A DataLoader over a dataset with a length reads no skipped
        sample: its sampler only draws their indices. Other iterables are read up to there.

        Args:
            batches: number of this rank's micro-batches to leave out: a multiple of `gradient_accumulation_steps`,
                since whole optimizer steps consume samples.

        Raises:
            DataError: the number is not such a multiple, or exceeds the epoch.
        """
        each = self._share.accumulation
        if batches < 0 or batches % each:
            near = max(0, batches // each * each)
            why = f"an optimizer step takes {each} micro-batches, and {batches} of them do not end one"
            raise DataError(f"skip_first_batches({batches}): {why}\n  try: {near} or {near + each}")
        if self._sampler is None:
            skipped = self._skipped + batches
            return SharedLoader(self._batches, self._share, self._device, self._say, skipped=skipped)
        if batches > len(self):
            raise DataError(
                f"skip_first_batches({batches}): an epoch has {len(self)} micro-batches per rank\n"
                f"  try: {batches % max(1, len(self))}, in a later epoch"
            )
        assert isinstance(self._batches, DataLoader)
        later = _with_batch_sampler(self._batches, self._sampler.after(batches // each))
        return SharedLoader(later, self._share, self._device, self._say)

    def __len__(self) -> int:
        """Micro-batches of this rank per epoch; raises TypeError if the loader has no length."""
        if self._sampler is None:
            raise TypeError("the loader has no length: it is no torch DataLoader, or one without a length")
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterates over one epoch."""
        own = self._batches if self._sampler is not None else self._split(self._share)
        for batch in islice(own, self._skipped, None):
            yield moved(batch, self._device)

    def _split(self, share: BatchShare) -> Iterator[Any]:
        micro_batches: list[Any] = []
        for batch in self._batches:
            size = samples_in(batch)
            if size == share.total:
                yield from (part_of(batch, where) for where in share.slices())
            elif size == share.micro:
                micro_batches.append(batch)
                if len(micro_batches) == share.accumulation * share.ranks:
                    yield from micro_batches[share.rank :: share.ranks]
                    micro_batches = []
            else:
                self._drop(size, share)
        if micro_batches:
            self._drop(len(micro_batches) * share.micro, share)

    def _drop(self, samples: int, share: BatchShare) -> None:
        if samples == 0 or samples > share.total:
            sizes = f"{share.total} samples (a global batch)" + (
                f" or {share.micro}" if share.micro < share.total else ""
            )
            raise DataError(f"a batch of the loader holds {samples} samples\n  try: batches of {sizes}")
        self._say(
            f"warning: the last {samples} samples of the loader are less than a global batch of {share.total}: dropped"
        )


class _RankSampler(Sampler[list[Any]]):
    """Batch sampler of this rank's micro-batches, in the order of rank 0's sampler."""

    def __init__(self, sampler: Iterable[Any], share: BatchShare, updates: int, *, first: int = 0) -> None:
        self._sampler, self._share, self._updates, self._first = sampler, share, updates, first

    def after(self, updates: int) -> _RankSampler:
        """Returns the sampler of the same epoch without its first optimizer steps."""
        return _RankSampler(self._sampler, self._share, self._updates - updates, first=self._first + updates)

    def __len__(self) -> int:
        return self._updates * self._share.accumulation

    def __iter__(self) -> Iterator[list[Any]]:
        share = self._share
        every = iter(self._sampler) if share.rank == 0 else iter(())
        indices = islice(every, self._first * share.total, None)
        left = self._updates
        while left:
            updates = min(left, _BLOCK)
            block = _from_rank_zero(list(islice(indices, updates * share.total)), share.ranks)
            for first in range(0, updates * share.total, share.total):
                update = block[first : first + share.total]
                yield from (update[where] for where in share.slices())
            left -= updates


def _from_rank_zero(block: list[Any], ranks: int) -> list[Any]:
    objects: list[Any] = [block]
    if ranks > 1:
        dist.broadcast_object_list(objects, src=0)
    received: list[Any] = objects[0]
    return received


def _distributed(loader: DataLoader[Any], sampler: BatchSampler, share: BatchShare) -> DataLoader[Any]:
    samples = len(loader.sampler)  # type: ignore[arg-type]
    updates, over = divmod(samples, share.total)
    if updates == 0 or (over and not sampler.drop_last):
        why = f"{samples} samples are {updates} global batches of {share.total} and {over} more samples"
        remedy = "DataLoader(..., drop_last=True) drops them; samples are never repeated for padding"
        if updates == 0:
            remedy = f"use {samples} or less"
        raise ConfigError("train_batch_size", share.total, why=why, remedy=remedy)
    return _with_batch_sampler(loader, _RankSampler(sampler.sampler, share, updates))


def _with_batch_sampler(loader: DataLoader[Any], batch_sampler: _RankSampler) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
