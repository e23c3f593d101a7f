"""Measures collectives between the devices of this node, their overlap, and the rates of devices that are all busy.

    python -m pipeline.plan.calibration.measure_links RANK RANKS PORT

One process per device runs this; rank 0 prints the results as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from foundation.errors import TrainingError
from pipeline.plan.calibration.measure import Ends, range_of, seconds_of, timed
from pipeline.plan.calibration.measure_overlap import all_busy, overlap
from pipeline.runtime.machines.machine import OVERLAP, MeasuredCollective, Operation

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the whole tensor of a collective."""
LARGEST_ON_GPUS = 1 << 28
"""Bytes of an additional size on GPUs; a CPU would take seconds for it."""
_TIMEOUT_S = 600.0
"""Seconds after which the processes are killed, imports included: only a hang takes so long."""
_REPEATS = 31
"""Number of measurements of a collective."""
LAYERS = 4
"""Number of units in sequence, as in a model: the buffers of one unit are free when a later one needs some."""
REPEATS = 21
"""Number of forward and backward passes that are measured at each size."""
_WIDTH = 64


@dataclass(frozen=True)
class RanksMeasured:
    """Measurements between ranks.

    Attributes:
        collectives: seconds of collectives by kind and size; empty for a single device.
        overlap: share of an all-reduce that products hide: low, typical and high.
        all_busy: rates of products and of copies on all devices at the same time, over the rates of one device alone;
            at most 1, and empty for a single device.
    """

    collectives: tuple[MeasuredCollective, ...]
    overlap: Ends
    all_busy: dict[str, float]


def between_ranks(*, ranks: int) -> RanksMeasured:
    """Measures between `ranks` devices of this node; a single one has neither collectives nor busy neighbours.

    Raises:
        TrainingError: a process failed, or did not end in time; the message has the end of its output.
    """
    if ranks < 2:
        return RanksMeasured((), OVERLAP, {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipeline.plan.calibration.measure_links"]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as threads:
        waiting = [threads.submit(_output, process) for process in started]
        ended, _ = wait(waiting, return_when=FIRST_EXCEPTION)
        for process in started:
            process.kill()  # those that wait for one that failed
    for each in ended:
        each.result()
    found = json.loads(waiting[0].result().splitlines()[-1])
    rows = tuple(
        MeasuredCollective(kind=kind, axis="within", ranks=ranks, bytes=size, seconds=tuple(seconds))
        for kind, size, seconds in found["collectives"]
    )
    return RanksMeasured(rows, tuple(found["overlap"]), found["all_busy"])


def _output(process: subprocess.Popen[bytes]) -> bytes:
    """Returns what a process printed once it has ended.

    Raises:
        TrainingError: it failed, or did not end in time.
    """
    try:
        said, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise TrainingError(f"collectives between the devices did not end within {_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise TrainingError(f"collectives between the devices failed: {errors.decode()[-1000:]}")
    return said


def _collectives(ranks: int, device: torch.device) -> Iterator[tuple[Operation, int, Ends]]:
    """Measures every kind of collective at every size; on a CPU, all-gathers and reduce-scatters as FSDP2 runs them.

    On a GPU the host runs ahead of the collectives, and FSDP2's copies take little time beside the links.
    """
    unit = 256 * ranks  # shards of equal size
    for least in (*SIZES, LARGEST_ON_GPUS) if device.type == "cuda" else SIZES:
        size = -(-least // unit) * unit
        whole = torch.zeros(size // 4, device=device)
        other, shard = torch.empty_like(whole), torch.zeros(size // 4 // ranks, device=device)
        yield "all_reduce", size, _seconds(partial(dist.all_reduce, whole), device)
        yield "all_to_all", size, _seconds(partial(dist.all_to_all_single, other, whole), device)
        if device.type == "cuda":
            yield "all_gather", size, _seconds(partial(dist.all_gather_into_tensor, whole, shard), device)
            yield "reduce_scatter", size, _seconds(partial(dist.reduce_scatter_tensor, shard, whole), device)
        else:
            gather, scatter = sharding(size, ranks=ranks, device=device)
            yield "all_gather", size, gather
            yield "reduce_scatter", size, scatter


def _seconds(call: Callable[[], object], device: torch.device) -> Ends:
    # the same number of calls on every rank
    return seconds_of(call, device, repeats=_REPEATS, least_s=0.0)


def main() -> None:
    """Measures as one rank."""
    rank, ranks, port = map(int, sys.argv[1:])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=ranks)
    found = {
        "collectives": list(_collectives(ranks, device)),
        "overlap": overlap(device),
        "all_busy": all_busy(device),
    }
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


class _Touch(torch.autograd.Function):
    """An operator that takes a weight without computing; the weight's gradient has its size and arbitrary values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.size = weight.size()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        [gradient] = gradients
        return gradient, torch.empty(ctx.size, device=gradient.device)


class _Layer(nn.Module):
    """A layer with a weight of `size` bytes."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size // 4 // _WIDTH, _WIDTH, device=device))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = _Touch.apply(values, self.weight)
        return result


def sharding(size: int, *, ranks: int, device: torch.device) -> tuple[Ends, Ends]:
    """Least, median and most seconds of an all-gather of a unit's weights, and of a reduce-scatter of its gradients.

    On a CPU, allocating new buffers and copying take as long as the collective, and torch builds gloo's reduce-scatter
    from an all-reduce.

    Collective: all ranks call it.

    Args:
        size: bytes of the unit's weights in fp32, a multiple of 256 x ranks.
        ranks: number of ranks over which the weights are sharded.
        device: this rank's device.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    root: Any = nn.Sequential(*(_Layer(size, device) for _ in range(LAYERS)))
    for layer in root:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in (*root, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # as in the engine: gloo has no scaled sum
    values = torch.ones(1, device=device, requires_grad=True)
    gathers, scatters = [], []
    for _ in range(2 + REPEATS):
        loss: list[Tensor] = []
        gathers.append(timed(lambda loss=loss: loss.append(root(values)), device) / LAYERS)  # type: ignore[misc]
        scatters.append(timed(lambda loss=loss: loss[0].sum().backward(), device) / LAYERS)  # type: ignore[misc]
    return range_of(gathers[2:]), range_of(scatters[2:])


if __name__ == "__main__":
    main()
