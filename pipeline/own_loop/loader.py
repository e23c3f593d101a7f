"""Distributes a user's loader over ranks: all ranks together see the samples of one process, in the same order.

Rank 0's sampler determines the order for all ranks, so that they need no equal seeds. An incomplete last global batch
is never padded with copies: it is refused, or dropped if the loader has `drop_last`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from headrace.base.errors import ConfigError, DataError
from pipeline.own_loop.batches import moved, part_of, samples_in
from pipeline.own_loop.config import BatchShare

_BLOCK = 256
"""Optimizer steps whose sample order is broadcast at a time."""


def batch_size_of(loader: Any) -> int | None:
    """Batch size of a torch DataLoader; None for other iterables, whose batches show it."""
    if isinstance(loader, DataLoader):
        return getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return None


def distribute(
    loader: Iterable[Any], share: BatchShare, *, device: torch.device, say: Callable[[str], None]
) -> SharedLoader:
    """A loader of this rank's micro-batches, on its device.

    Args:
        loader: a torch DataLoader, or any iterable of batches that is the same on all ranks.
        share: how a global batch is divided over ranks.
        device: of this rank.
        say: prints a warning about dropped samples.

    Raises:
        ConfigError: the dataset is not a multiple of the global batch, and the loader has no `drop_last`.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler:
            return SharedLoader(_distributed(loader, sampler, share), None, device, say)
    return SharedLoader(loader, share, device, say)


class SharedLoader:
    """Iterates over this rank's micro-batches.

    Args:
        batches: this rank's micro-batches, or batches that are the same on all ranks.
        share: how to divide the latter; None for the former.
        device: device of this rank.
        say: prints a warning about dropped samples.
    """

    def __init__(
        self, batches: Iterable[Any], share: BatchShare | None, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._batches, self._share, self._device, self._say = batches, share, device, say

    def __len__(self) -> int:
        """Micro-batches of this rank per epoch; raises TypeError if the loader has no length."""
        if self._share is not None:
            raise TypeError("only a torch DataLoader with a length has one here")
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """One epoch."""
        own = self._batches if self._share is None else self._split(self._share)
        for batch in own:
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

    def __init__(self, sampler: Iterable[Any], share: BatchShare, updates: int) -> None:
        self._sampler, self._share, self._updates = sampler, share, updates

    def __len__(self) -> int:
        return self._updates * self._share.accumulation

    def __iter__(self) -> Iterator[list[Any]]:
        share = self._share
        indices = iter(self._sampler) if share.rank == 0 else iter(())
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
    return DataLoader(
        loader.dataset,
        batch_sampler=_RankSampler(sampler.sampler, share, updates),
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
