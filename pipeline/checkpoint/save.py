"""Asynchronous checkpoints: shards are copied to host memory, then written by a background thread, one save at a time.

    begin     all ranks   staging directory, write plan (the one of the save before unless a layout has changed), and a
                          copy of this rank's shards into host memory: the step waits for this only
              a thread    writes and flushes this rank's file, computing its checksum; another thread may copy it then
                          into memory that outlives the process (`memory_copies`), which no save waits for
    advance   all ranks   once no rank is writing: gather checksums, and locations that have changed, on rank 0
              a thread    of rank 0 writes metadata and manifest, flushes, renames, moves `latest`, deletes old ones
    advance   all ranks   once that is done: the result

Background threads never communicate with other ranks: two threads in collectives at the same time would have to agree
on an order. The caller of `advance` determines whether all ranks are done, in the collective that a training loop runs
at every step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from foundation.directory import staging_path
from foundation.errors import CheckpointError, HeadraceError
from pipeline.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from pipeline.checkpoint.format.metadata import METADATA, encode_metadata
from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.memory.memory_copies import MemoryCopies
from pipeline.checkpoint.store import CheckpointStore
from pipeline.checkpoint.write.locations import MetadataWriter
from pipeline.checkpoint.write.plan import Planner, WritePlan
from pipeline.checkpoint.write.streamed import LazyTensor, Progress, write_streamed
from pipeline.checkpoint.write.write_shards import WrittenShards, write_metadata, write_shards
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero

_POLL_S = 1.0


@dataclass(frozen=True)
class SaveResult:
    """Result of saving a checkpoint.

    Attributes:
        step: last step in the checkpoint.
        checkpoint: the committed checkpoint; None if it could not be written.
        failure: reason why the checkpoint could not be written; None if it was.
        waited_s: seconds for which `begin` blocked the training loop, on the slowest rank.
        seconds: seconds from the beginning to the commit, on rank 0.
        not_copied: rank -> reason why its file of this or the previous save is not in its node's memory.
    """

    step: int
    checkpoint: Checkpoint | None
    failure: str | None
    waited_s: float
    seconds: float
    not_copied: Mapping[int, str] = field(default_factory=dict)


@dataclass
class _PendingSave:
    """A checkpoint that is being written; `gathered` is set once rank 0 has the locations of all shards."""

    info: CheckpointInfo
    plan: WritePlan
    start: float
    job: Future[Any]
    waited_s: float = 0.0
    gathered: bool = field(default=False)
    not_copied: dict[int, str] = field(default_factory=dict)


class CheckpointWriter:
    """Writes the checkpoints of a run. A process needs only one: its buffers are as large as the rank's shards.

    Args:
        store: store that names, commits and deletes the checkpoints.
        background: whether to write in the background; otherwise `begin` returns when the files are written.
        on_progress: function called about once per second of waiting in which something was written.
        copies: copier of this rank's files into its node's memory; None for no copies.
        before_commit: called by rank 0's thread before it commits; a checkpoint that it raises an error for has failed.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        background: bool = True,
        on_progress: Callable[[], None] = lambda: None,
        copies: MemoryCopies | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._background, self._copies = store, background, copies
        self._before_commit = before_commit
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._planner = Planner()
        self._plan: WritePlan | None = None
        self._reported: bytes | None = None
        self._metadata: MetadataWriter | None = None
        self._buffers: dict[Any, Tensor] = {}
        self._page_locked: set[Any] = set()
        self._pending: _PendingSave | None = None
        self._on_progress, self._bytes_seen = on_progress, 0
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    @property
    def pending(self) -> bool:
        """Whether a save has begun and its result has not been returned; the same on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is at work; `advance` must not be called while any rank is busy."""
        return self._pending is not None and not self._pending.job.done()

    def begin(self, info: CheckpointInfo, state: Callable[[], State]) -> None:
        """Copies the state and starts to write it. Collective; no save may be pending.

        Args:
            info: contents of the manifest.
            state: returns this rank's shards; their values may change once `begin` has returned.

        Raises:
            CheckpointError: the directory cannot be made, or `state` fails. No save is pending then.
        """
        assert self._pending is None, "one save at a time: advance or wait first"
        start = time.perf_counter()
        if self._copies is not None:
            self._copies.stop()  # the buffers are needed
        shards = state()
        on_rank_zero(lambda: self._store.create_staging(info.step))
        plan = self._planner.plan(shards)
        if plan is not self._plan:
            self._free_buffers()
            self._plan, self._reported = plan, None
            self._metadata = MetadataWriter(plan.division) if plan.division else None
        staging = staging_path(self._store.path_of(info.step))
        lookup = self._copy_to_host(plan, shards) if self._background else plan.value_lookup(shards)
        if self._copies is not None:
            self._copies.prepare(info.step, sum(lookup(item).nbytes for item in plan.items))
        job = self._threads.submit(self._write, info.step, plan, lookup, staging)
        if not self._background:
            self._wait_for(job, staging)  # a failure is reported by `advance`
            self.wait_for_copy()
        self._pending = _PendingSave(info, plan, start, job, waited_s=time.perf_counter() - start)

    def advance(self) -> SaveResult | None:
        """Advances the pending save by one stage; to be called when no rank is busy. Collective.

        Returns:
            The result when the save is over, successful or not; None when rank 0 is about to commit it.
        """
        pending = self._pending
        assert pending is not None
        if not pending.gathered:
            self._gather(pending)
            return None
        self._pending = None
        failure, checkpoint = _outcome(pending.job)
        seconds = time.perf_counter() - pending.start
        own = SaveResult(pending.info.step, checkpoint, failure, pending.waited_s, seconds, pending.not_copied)
        result = on_rank_zero(lambda: own)
        if self._copies is not None:
            (self._copies.discard if result.checkpoint is None else self._copies.committed)(result.step)
        return result

    def wait(self) -> SaveResult | None:
        """Waits until no save is pending any more; None when none was. Collective."""
        result = None
        while self._pending is not None:
            self._wait_for(self._pending.job, staging_path(self._store.path_of(self._pending.info.step)))
            result = self.advance()
        return result

    def wait_for_copy(self) -> None:
        """Waits until no file is being copied into memory."""
        if self._copies is not None:
            while not self._copies.wait(_POLL_S):
                self._on_progress()

    def stop_copy(self) -> None:
        """Cancels a copy into memory that is in progress."""
        if self._copies is not None:
            self._copies.stop()

    def _write(self, step: int, plan: WritePlan, lookup: Callable[[WriteItem], Tensor], staging: Path) -> WrittenShards:
        """Writes this rank's file, then starts its copy into memory."""
        written = write_shards(plan, lookup, staging)
        if self._copies is not None:
            self._copies.start(step, plan, lookup, written.sha256)
            written = dataclasses.replace(written, not_copied=self._copies.failure())
        return written

    def _wait_for(self, job: Future[Any], staging: Path) -> None:
        while not futures.wait([job], timeout=_POLL_S).done:
            written = _bytes_written(staging, self._rank)
            if written != self._bytes_seen:
                self._bytes_seen = written
                self._on_progress()

    def _copy_to_host(self, plan: WritePlan, state: State) -> Callable[[WriteItem], Tensor]:
        """Copies this rank's shards into host buffers that are reused for the next save."""
        lookup, on_gpu = plan.value_lookup(state), False
        for item in plan.items:
            value = lookup(item)
            if item.index not in self._buffers:
                self._buffers[item.index] = torch.empty(value.shape, dtype=value.dtype)
                if value.is_cuda and _page_lock(self._buffers[item.index], value.device):
                    self._page_locked.add(item.index)
            self._buffers[item.index].copy_(value, non_blocking=True)
            on_gpu = on_gpu or value.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        return lambda item: self._buffers[item.index]

    def _free_buffers(self) -> None:
        """Frees the buffers, since a new state needs other sizes."""
        for index in list(self._buffers):
            buffer = self._buffers.pop(index)
            if index in self._page_locked:
                # if memory is reused while page-locked, copies from a GPU go to its old (physical) place
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))
        self._page_locked.clear()

    def _gather(self, pending: _PendingSave) -> None:
        """Gathers locations and checksums of all ranks on rank 0; its thread then commits. Collective."""
        error = pending.job.exception()
        shards_or_error = self._message(pending.job.result()) if error is None else _first_line(error)
        own: tuple[WrittenShards | str, float] = shards_or_error, pending.waited_s
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        gathered: list[Any] = [own] * ranks
        if ranks > 1:
            dist.gather_object(own, gathered if pending.plan.rank == 0 else None)
        pending.gathered = True
        if pending.plan.rank != 0:
            return
        written = [each for each, _ in gathered]
        pending.waited_s = max(waited for _, waited in gathered)
        if self._metadata is not None:
            shards = {rank: each for rank, each in enumerate(written) if isinstance(each, WrittenShards)}
            pending.not_copied = {rank: each.not_copied for rank, each in shards.items() if each.not_copied}
            self._metadata.update({rank: each.locations for rank, each in shards.items() if each.locations})
            pending.job = self._threads.submit(self._commit, pending, written)

    def _message(self, written: WrittenShards) -> WrittenShards:
        """Makes this rank's message to rank 0, with locations only if they differ from the previous save."""
        assert written.locations is not None
        before, self._reported = self._reported, written.locations.digest
        return dataclasses.replace(written, locations=None) if before == self._reported else written

    def _commit(self, pending: _PendingSave, written: list[WrittenShards | str]) -> Checkpoint:
        try:
            shards = [each for each in written if isinstance(each, WrittenShards)]
            for rank, each in enumerate(written):
                if isinstance(each, str):
                    raise CheckpointError(f"rank {rank}: {each}")
            staging = staging_path(self._store.path_of(pending.info.step))
            assert self._metadata is not None
            sha256 = {name: s for each in shards for name, s in each.sha256.items()}
            sha256[METADATA] = write_metadata(self._metadata.encoded(), staging)
            self._before_commit()
            return self._store.commit(pending.info, sha256)
        except BaseException:
            self._store.discard_staging(pending.info.step)
            raise


def _page_lock(buffer: Tensor, device: torch.device) -> bool:
    """Page-locks host memory for faster copies from a GPU; False if that fails, which makes copies slower.

    Locks existing memory: torch's own allocator of page-locked memory rounds sizes up to the next power of two.
    """
    if not buffer.numel():
        return False
    locked = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0
    if not locked:
        with suppress(RuntimeError):  # clears CUDA's sticky error, which the next kernel would raise
            torch.ones(1, device=device)
    return locked


def _bytes_written(staging: Path, rank: int) -> int:
    """Counts the bytes that a rank has written so far; rank 0 may rename or delete files meanwhile."""
    total = 0
    with suppress(OSError):
        for path in staging.glob(f"__{rank}_*"):
            total += path.stat().st_size
    return total


def save_and_wait(store: CheckpointStore, info: CheckpointInfo, state: Callable[[], State]) -> Checkpoint:
    """Writes a checkpoint and waits for it. Collective.

    Raises:
        CheckpointError: some rank could not write, e.g. on a full disk; raised on all ranks. Nothing is committed.
    """
    writer = CheckpointWriter(store, background=False)
    writer.begin(info, state)
    result = writer.wait()
    assert result is not None
    return checkpoint_or_error(result)


def save_streamed(
    store: CheckpointStore, info: CheckpointInfo, tensors: Mapping[str, LazyTensor], progress: Progress
) -> Checkpoint:
    """Writes and commits a checkpoint, in one process.

    Args:
        store: checkpoint store of the run.
        info: contents of the manifest.
        tensors: key of `named_state` -> tensor.
        progress: called with (bytes written, all bytes).

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError, RuntimeError: a file cannot be written.
    """
    staging = store.create_staging(info.step)
    try:
        metadata, sha256 = write_streamed(tensors, staging, progress)
        return store.commit(info, {**sha256, METADATA: write_metadata(encode_metadata(metadata), staging)})
    except BaseException:
        store.discard_staging(info.step)
        raise


def checkpoint_or_error(result: SaveResult) -> Checkpoint:
    """Returns the checkpoint of a save.

    Raises:
        CheckpointError: the checkpoint could not be written.
    """
    if result.checkpoint is None:
        raise CheckpointError(
            f"the checkpoint of step {result.step} could not be written: {result.failure}\n"
            f"  try: free space there, then start again: it resumes"
        )
    return result.checkpoint


def _outcome(job: Future[Any]) -> tuple[str | None, Checkpoint | None]:
    """Returns a job's failure or None, and the checkpoint if it has committed one."""
    error = job.exception()
    if error is not None:
        return _first_line(error), None
    result = job.result()
    return None, result if isinstance(result, Checkpoint) else None


def _first_line(error: BaseException) -> str:
    if not isinstance(error, OSError | RuntimeError | HeadraceError):
        return repr(error)
    return (str(error) or repr(error)).splitlines()[0]
