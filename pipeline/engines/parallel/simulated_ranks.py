"""Ranks of a process group simulated by threads of one process, for trials of sharded tiny models.

The product's own code runs in every thread: torch's collectives call the methods of the thread's group, which exchange
tensors through a list. The backward pass of CPU tensors runs in the thread that starts it, so it can wait for others.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

_SECONDS = 60
"""Time after which a rank stops waiting for the others: they have failed or wait for another collective."""

_numbers = itertools.count()
T = TypeVar("T")


def run_ranks(size: int, function: Callable[[dist.ProcessGroup], T]) -> list[T]:
    """Runs a function in one thread per rank, and returns the results in the order of the ranks.

    Args:
        size: number of ranks.
        function: receives the rank's group, which all-reduce, all-gather and reduce-scatter accept.

    Raises:
        BaseException: the first exception of any rank that did not just wait for the others.
    """
    meeting, number = _Meeting(size), next(_numbers)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        group = _SimulatedGroup(rank, meeting, f"simulated-{number}-{rank}")
        _register_process_group(group.group_name, group)
        try:
            results[rank] = function(group)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # it is raised by the caller's thread
            errors.append(error)
        finally:
            if errors:
                meeting.barrier.abort()
            _unregister_process_group(group.group_name)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors or meeting.barrier.broken:
        raise errors[0] if errors else RuntimeError("the ranks wait for different collectives")
    return results


class _Meeting:
    """Where ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self._slots: list[Any] = [None] * size
        self.size = size

    def exchange(self, rank: int, own: Tensor) -> list[Tensor]:
        """Gives a rank's tensor to all, and returns those of all ranks."""
        self._slots[rank] = own.clone()
        self.barrier.wait()
        found = list(self._slots)
        self.barrier.wait()
        return found


class _FinishedWork(dist._Work):
    """A finished collective."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Returns at once."""
        return True

    def get_future(self) -> Any:
        """Returns the finished future."""
        return self._future


class _SimulatedGroup(dist.ProcessGroup):
    """One rank's side of a group of threads; torch calls the methods, whose names are its own."""

    def __init__(self, rank: int, meeting: _Meeting, name: str) -> None:
        super().__init__(rank, meeting.size)  # type: ignore[call-arg]
        self._rank, self._meeting, self._name = rank, meeting, name

    @property
    def group_name(self) -> Any:
        """Name by which functional collectives find the group."""
        return self._name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        """Sums a tensor over the ranks, or takes the largest values."""
        largest = options is not None and options.reduceOp == dist.ReduceOp.MAX
        for tensor in tensors:
            every = torch.stack(self._meeting.exchange(self._rank, tensor))
            tensor.copy_(every.amax(0) if largest else every.sum(0))
        return _FinishedWork(tensors)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], _options: Any = None) -> Any:
        """Concatenates the ranks' tensors."""
        for output, own in zip(outputs, inputs, strict=True):
            output.copy_(torch.cat(self._meeting.exchange(self._rank, own)).view_as(output))
        return _FinishedWork(outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], _options: Any = None) -> Any:
        """Sums the ranks' tensors and returns this rank's part."""
        for output, own in zip(outputs, inputs, strict=True):
            total = torch.stack(self._meeting.exchange(self._rank, own)).sum(0)
            output.copy_(total.chunk(self._meeting.size)[self._rank].view_as(output))
        return _FinishedWork(outputs)
