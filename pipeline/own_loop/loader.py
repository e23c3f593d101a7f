"""The user's loader, shared out: all ranks together see the samples that one process would, in the same order.

Whatever its sampler, rank 0 draws the order and the others follow it, so that they need not be seeded alike. Samples
that make no whole update are never padded by copies: they are refused, or left out when the loader says `drop_last`.
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
"""Updates whose order is sent at one time."""


def batch_size_of(loader: Any) -> int | None:
    """Samples in a batch of a torch DataLoader; None for other iterables, whose first batch will tell."""
    if isinstance(loader, DataLoader):
        return getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return None


def share_out(
    loader: Iterable[Any], share: BatchShare, *, device: torch.device, say: Callable[[str], None]
) -> SharedLoader:
    """The loader that gives this rank its micro-batches, on its device.

    Args:
        loader: a torch DataLoader, or any iterable of batches that is the same on all ranks.
        share: how the samples of an update are shared out.
        device: of this rank.
        say: told what is left out.

    Raises:
        ConfigError: the dataset is not a whole number of updates, and the loader does not say `drop_last`.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler:
            return SharedLoader(_dealt(loader, sampler, share), None, device, say)
    return SharedLoader(loader, share, device, say)


class SharedLoader:
    """Iterates over this rank's micro-batches.

    Args:
        batches: this rank's micro-batches, or the batches of all ranks.
        share: how to cut the latter; None for the former.
        device: where the batches go.
        say: told what is left out.
    """

    def __init__(
        self, batches: Iterable[Any], share: BatchShare | None, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._batches, self._share, self._device, self._say = batches, share, device, say

    def __len__(self) -> int:
        """Micro-batches of this rank in one pass; a TypeError where the batches have no length."""
        if self._share is not None:
            raise TypeError("the length of a loader that is no torch DataLoader with a length is not known")
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """One pass over the data."""
        own = self._batches if self._share is None else self._cut(self._share)
        for batch in own:
            yield moved(batch, self._device)

    def _cut(self, share: BatchShare) -> Iterator[Any]:
        update: list[Any] = []
        for batch in self._batches:
            size = samples_in(batch)
            if size == share.total:
                yield from (part_of(batch, where) for where in share.slices())
            elif size == share.micro:
                update.append(batch)
                if len(update) == share.accumulation * share.ranks:
                    yield from update[share.rank :: share.ranks]
                    update = []
            else:
                self._left_out(size, share)
        if update:
            self._left_out(len(update) * share.micro, share)

    def _left_out(self, samples: int, share: BatchShare) -> None:
        if samples == 0 or samples > share.total:
            wanted = f"{share.total} samples (an update)" + (f" or {share.micro}" if share.micro < share.total else "")
            raise DataError(f"a batch of the loader holds {samples} samples\n  try: batches of {wanted}")
        self._say(f"warning: {samples} samples at the end of the loader make no update of {share.total}: left out")


class _Deal(Sampler[list[Any]]):
    """This rank's micro-batches of indices, in the order that rank 0's sampler draws."""

    def __init__(self, sampler: Iterable[Any], share: BatchShare, updates: int) -> None:
        self._sampler, self._share, self._updates = sampler, share, updates

    def __len__(self) -> int:
        return self._updates * self._share.accumulation

    def __iter__(self) -> Iterator[list[Any]]:
        share = self._share
        drawn = iter(self._sampler) if share.rank == 0 else iter(())
        left = self._updates
        while left:
            updates = min(left, _BLOCK)
            block = _from_rank_zero(list(islice(drawn, updates * share.total)), share.ranks)
            for first in range(0, updates * share.total, share.total):
                update = block[first : first + share.total]
                yield from (update[where] for where in share.slices())
            left -= updates


def _from_rank_zero(block: list[Any], ranks: int) -> list[Any]:
    held: list[Any] = [block]
    if ranks > 1:
        dist.broadcast_object_list(held, src=0)
    drawn: list[Any] = held[0]
    return drawn


def _dealt(loader: DataLoader[Any], sampler: BatchSampler, share: BatchShare) -> DataLoader[Any]:
    samples = len(loader.sampler)  # type: ignore[arg-type]
    updates, over = divmod(samples, share.total)
    if updates == 0 or (over and not sampler.drop_last):
        why = f"{samples} samples are {updates} updates of {share.total} and {over} samples over"
        remedy = "DataLoader(..., drop_last=True) leaves them out; none is ever used twice to fill up"
        if updates == 0:
            remedy = f"use at most {samples} samples per update"
        raise ConfigError("train_batch_size", share.total, why=why, remedy=remedy)
    return DataLoader(
        loader.dataset,
        batch_sampler=_Deal(sampler.sampler, share, updates),
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
