"""Checkpoints written beside the training, one at a time.

    begin     all ranks   plan (once), a directory, and a copy of this rank's share into host memory: the step waits for
                          this and for nothing else
              a thread    writes and flushes this rank's file, taking its checksum
    settle    all ranks   once nobody writes any more: where everything lies goes to rank 0
              a thread    of rank 0 writes metadata and manifest, flushes, renames, moves `latest`, deletes old ones
    settle    all ranks   once that is done: the outcome

Threads never talk to other ranks: two threads of a process in collectives at the same time would have to agree on their
order. Whether all are done is found out by whoever calls `settle`, in the collective that a loop has at every step.
"""

from __future__ import annotations

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

from headrace.base.directory import staging_path
from headrace.base.errors import CheckpointError, HeadraceError
from pipeline.checkpoint.plan import State, WritePlan, make_write_plan
from pipeline.checkpoint.store import Checkpoint, CheckpointInfo, CheckpointStore, on_rank_zero
from pipeline.checkpoint.write import Written, write_metadata, write_pieces

_GLANCE_S = 1.0


@dataclass(frozen=True)
class Saved:
    """How a checkpoint went.

    Attributes:
        step: the last step that is in it.
        checkpoint: it; None when it could not be written.
        failure: why not.
        waited_s: seconds that the loop waited for it at its beginning, on rank 0.
        seconds: from its beginning to its name, on rank 0.
    """

    step: int
    checkpoint: Checkpoint | None
    failure: str | None
    waited_s: float
    seconds: float


@dataclass
class _Flight:
    """A checkpoint that is being written."""

    about: CheckpointInfo
    plan: WritePlan
    began: float
    job: Future[Any]
    waited_s: float = 0.0
    collected: bool = field(default=False)


class CheckpointWriter:
    """Writes the checkpoints of a run. A process needs only one: its buffers are as large as the rank's share.

    Args:
        store: names and deletes them.
        background: beside the training; else `begin` returns when the files are written.
        alive: called about once per second of waiting in which something was written.
    """

    def __init__(
        self, store: CheckpointStore, *, background: bool = True, alive: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._background = store, background
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._plan: WritePlan | None = None
        self._buffers: dict[Any, Tensor] = {}
        self._locked: set[Any] = set()
        self._flight: _Flight | None = None
        self._alive, self._seen = alive, 0
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint has begun and is not settled; the same on all ranks."""
        return self._flight is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is at work; while any rank's is, there is nothing to settle."""
        return self._flight is not None and not self._flight.job.done()

    def begin(self, about: CheckpointInfo, state: Callable[[], State]) -> None:
        """Copies the state and starts to write it. Collective; nothing may be in flight.

        Args:
            about: for its manifest.
            state: gives this rank's shards; their values may change once this has returned.

        Raises:
            CheckpointError: the directory cannot be made, or the state cannot be had. Nothing is in flight then.
        """
        assert self._flight is None, "one at a time: settle first"
        began = time.perf_counter()
        held = state()
        on_rank_zero(lambda: self._store.stage(about.step))
        if self._plan is None or not self._plan.fits(held):
            self._release()
            self._plan = make_write_plan(held)
        plan, folder = self._plan, staging_path(self._store.final(about.step))
        source = self._copied(plan, held) if self._background else plan.source(held)
        job = self._threads.submit(write_pieces, plan, source, folder)
        if not self._background:
            self._wait_for(job, folder)  # how it ended comes out in `settle`
        self._flight = _Flight(about, plan, began, job, waited_s=time.perf_counter() - began)

    def settle(self) -> Saved | None:
        """Goes one step further with what is in flight; to be called when no rank is busy. Collective.

        Returns:
            The outcome when it is over, with its name or without; None when rank 0 is about to name it.
        """
        flight = self._flight
        assert flight is not None
        if not flight.collected:
            self._collect(flight)
            return None
        self._flight = None
        failure, checkpoint = _outcome(flight.job)
        seconds = time.perf_counter() - flight.began
        told = Saved(flight.about.step, checkpoint, failure, flight.waited_s, seconds)
        return on_rank_zero(lambda: told)

    def wait(self) -> Saved | None:
        """Waits until nothing is in flight any more; None when nothing was. Collective."""
        saved = None
        while self._flight is not None:
            self._wait_for(self._flight.job, staging_path(self._store.final(self._flight.about.step)))
            saved = self.settle()
        return saved

    def _wait_for(self, job: Future[Any], folder: Path) -> None:
        while not futures.wait([job], timeout=_GLANCE_S).done:
            written = _bytes_of(folder, self._rank)
            if written != self._seen:
                self._seen = written
                self._alive()

    def _copied(self, plan: WritePlan, held: State) -> Callable[[WriteItem], Tensor]:
        """Copies this rank's share into buffers that stay for the next time."""
        find, on_gpu = plan.source(held), False
        for item in plan.items.items:
            value = find(item)
            if item.index not in self._buffers:
                self._buffers[item.index] = torch.empty(value.shape, dtype=value.dtype)
                if value.is_cuda and _lock(self._buffers[item.index], value.device):
                    self._locked.add(item.index)
            self._buffers[item.index].copy_(value, non_blocking=True)
            on_gpu = on_gpu or value.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        return lambda item: self._buffers[item.index]

    def _release(self) -> None:
        """Gives the buffers back: those of another state are of other sizes."""
        for index in list(self._buffers):
            buffer = self._buffers.pop(index)
            if index in self._locked:
                # memory that is locked still when it is given to somebody else gets copies in its old place
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))
        self._locked.clear()

    def _collect(self, flight: _Flight) -> None:
        """Hands what this rank has written to rank 0, which starts to name it. Collective."""
        error = flight.job.exception()
        own: Written | str = flight.job.result() if error is None else _words(error)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        everyone: list[Any] = [own] * ranks
        if ranks > 1:
            dist.gather_object(own, everyone if flight.plan.rank == 0 else None)
        flight.collected = True
        if flight.plan.rank == 0:
            flight.job = self._threads.submit(self._name, flight, everyone)

    def _name(self, flight: _Flight, everyone: list[Written | str]) -> Checkpoint:
        try:
            written = [each for each in everyone if isinstance(each, Written)]
            for rank, each in enumerate(everyone):
                if isinstance(each, str):
                    raise CheckpointError(f"rank {rank}: {each}")
            folder = staging_path(self._store.final(flight.about.step))
            write_metadata(flight.plan, folder, [each.results for each in written])
            sha256: Mapping[str, str] = {name: s for each in written for name, s in each.sha256.items()}
            return self._store.commit(flight.about, sha256)
        except BaseException:
            self._store.abandon(flight.about.step)
            raise


def _lock(buffer: Tensor, device: torch.device) -> bool:
    """Locks host memory into place for copies from a GPU; unlocked it is only slower.

    Locked where it is: torch's own allocator of page-locked memory rounds sizes up to the next power of two.
    """
    if not buffer.numel():
        return False
    locked = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0
    if not locked:
        with suppress(RuntimeError):  # CUDA remembers the failure, and the next kernel would be blamed for it
            torch.ones(1, device=device)
    return locked


def _bytes_of(folder: Path, rank: int) -> int:
    """What a rank has written so far; what is gone has been renamed or deleted by rank 0 just now."""
    total = 0
    with suppress(OSError):
        for path in folder.glob(f"__{rank}_*"):
            total += path.stat().st_size
    return total


def save_now(store: CheckpointStore, about: CheckpointInfo, state: Callable[[], State]) -> Checkpoint:
    """Writes a checkpoint and waits for it. Collective.

    Raises:
        CheckpointError: on all ranks when any could not write, e.g. on a full disk. Nothing has a final name then.
    """
    writer = CheckpointWriter(store, background=False)
    writer.begin(about, state)
    saved = writer.wait()
    assert saved is not None
    return saved_or_error(saved)


def saved_or_error(saved: Saved) -> Checkpoint:
    """The checkpoint, where there has to be one.

    Raises:
        CheckpointError: it could not be written.
    """
    if saved.checkpoint is None:
        raise CheckpointError(
            f"the checkpoint of step {saved.step} could not be written: {saved.failure}\n"
            f"  try: free space there, then start again: it resumes"
        )
    return saved.checkpoint


def _outcome(job: Future[Any]) -> tuple[str | None, Checkpoint | None]:
    """On rank 0 why there is no checkpoint, or the checkpoint."""
    error = job.exception()
    if error is not None:
        return _words(error), None
    result = job.result()
    return None, result if isinstance(result, Checkpoint) else None


def _words(error: BaseException) -> str:
    if not isinstance(error, OSError | RuntimeError | HeadraceError):
        return repr(error)
    return (str(error) or repr(error)).splitlines()[0]
