"""A run's data on a disk of the node: a copy before training (`data.stage_to`), or a cache of an object store."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from foundation.directory import Manifest, fingerprint_of, free_bytes
from foundation.errors import ConfigError
from foundation.remote_directory import cache_root
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.data import DataSection
from pipeline.data.dataset import TokenDataset
from pipeline.data.mixture import DataMixture
from pipeline.data.packed import PackedDataset
from pipeline.data.read_ahead import ReadAhead
from pipeline.data.span_cache import SpanCache
from pipeline.data.staging import StagedCopy, check_space, copy_path, in_use, remove_copy, stage
from pipeline.data.step_samples import PARTS_IN_CACHE, step_bytes_of

_DEFAULT_BYTES = 32_000_000_000
"""Byte limit of the cache for tokens in object stores, if the disk has twice as much free space."""


def check_stage_space(data: DataSection, mixture: DataMixture) -> None:
    """Refuses a run whose data does not fit on this node's disk, before a process group is made.

    Raises:
        DataError: the disk has too little room.
    """
    if data.stage_to is not None:
        for origin, manifest in _directories(mixture).items():
            check_space(Path(data.stage_to), origin, manifest)


def open_cache(run: ResolvedRun, mixture: DataMixture) -> None:
    """Opens a bounded cache on this node's disk for sources in object stores, unless they are staged.

    Raises:
        ConfigError: the cache is too small for a step, or larger than the free space.
        DataError: the disk cannot be written to.
    """
    data, remote = run.config.data, mixture.remote
    if data.stage_to is not None or not remote.fingerprints:
        return
    folder = (cache_root() if data.cache_to is None else Path(data.cache_to)) / "spans" / socket.gethostname()
    cache = SpanCache(folder, limit=0)
    free = free_bytes(folder) + cache.used
    limit = min(_DEFAULT_BYTES, free // 2) if data.cache_gb is None else int(data.cache_gb * 1e9)
    indexes = _index_bytes(mixture) if data.mask_documents or data.fim is not None else 0
    needed = PARTS_IN_CACHE * step_bytes_of(run.batch, masked=mixture.masked) + indexes
    place = f"set data.cache_to or HEADRACE_CACHE to a directory on a larger disk than that of {folder}"
    if limit < needed:
        why = f"a step needs {needed / 1e9:,.3f} GB of the cache for tokens in object stores"
        why += f", of which {indexes / 1e9:,.3f} GB are the indexes of documents" if indexes else ""
        remedy = f"--set data.cache_gb={math.ceil(needed / 1e6) / 1e3:g}" if needed <= free else place
        raise ConfigError("data.cache_gb", f"{limit / 1e9:,.3f}", why=why, remedy=remedy)
    if limit > free:
        why = f"{free / 1e9:,.3f} GB are free in {folder} on {socket.gethostname()}, the cache included"
        raise ConfigError("data.cache_gb", data.cache_gb, why=why, remedy=f"a number below that, or {place}")
    cache.limit = limit - indexes
    of_stage = [] if run.place is None else [run.accounts.ledger(run.last_step), mixture.order.start.keys]
    sizes = [run.config.run.seed, run.batch.samples, data.sequence_length]
    order = fingerprint_of([remote.fingerprints, *sizes, *of_stage])
    remote.ahead = ReadAhead(cache, order[:16])


def _index_bytes(mixture: DataMixture) -> int:
    """Returns the bytes of the indexes, with document boundaries, of shards in object stores."""
    shards: set[str] = set()
    for source in mixture.sources:
        if source.files is mixture.remote and not isinstance(source, PackedDataset):
            shards.update(source.prefixes())
    return sum(mixture.remote.index_bytes(each) for each in shards)


@contextmanager
def staged_data(
    data: DataSection,
    mixture: DataMixture,
    heldout: Sequence[TokenDataset],
    *,
    say: Callable[[str], None],
    progress: Callable[[], None],
) -> Iterator[Callable[[bool], None]]:
    """Copies the run's tokens directories to this node's disk, or waits for the copy; datasets then read it.

    Args:
        data: the config's `data`.
        mixture, heldout: the run's datasets.
        say: prints a line for people about each directory.
        progress: called during the copy.

    Yields:
        A function that is told whether the run has finished; if so, it removes copies, unless `data.stage_keep` is set.

    Raises:
        DataError: there is no room, or a copied file's checksum is not the manifest's.
    """
    copies: list[StagedCopy] = []
    with ExitStack() as stack:
        if data.stage_to is not None:
            for origin, manifest in _directories(mixture).items():
                to = Path(data.stage_to)
                stack.enter_context(in_use(copy_path(to, origin, manifest)))
                copy = stage(to, origin, manifest, progress=progress)
                say(str(copy))
                copies.append(copy)
                for dataset in (*mixture.sources, *heldout):
                    if dataset.origin == origin:
                        dataset.read_from(copy.path)

        if mixture.remote.ahead is not None:
            stack.callback(mixture.remote.ahead.close)

        def clean_up(finished: bool) -> None:
            stack.close()
            for copy in copies if finished and not data.stage_keep else ():
                remove_copy(copy.path)

        yield clean_up


def _directories(mixture: DataMixture) -> dict[str, Manifest]:
    """Returns the mixture's tokens directories, each once, without data read in place, which has no checksums."""
    return {each.origin: each.manifest for each in mixture.sources if not each.in_place}
