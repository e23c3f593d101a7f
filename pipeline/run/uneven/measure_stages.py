"""`parallel.stage_speeds` "measured": the speed of every pipeline rank, before a model is divided into stages.

Every rank repeats the matrix products of a decoder layer at the run's micro-batch, forward and backward. The slowest
device of a pipeline rank counts, since its data- and tensor-parallel peers wait for it. All ranks compute the same
numbers from the same gathered times. The numbers are rounded, so noise does not move layers from one start to the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.rules.stage_devices import GB, StageDevices
from pipeline.config.topology import Topology
from pipeline.engines.common import model_dtype
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.engines.parallel.rank_model import widths_of
from pipeline.engines.parallel.stages import layer_list
from pipeline.run.prepare import PreparedRun
from pipeline.runtime.launch import Rendezvous
from pipeline.runtime.launch.missing_ranks import deadline

WINDOWS, WINDOW_S = 4, 0.5
"""Number of windows in which each rank computes, and seconds of each. Within a window the mean of the passes counts,
since a device that is throttled for part of the time is slow. Among the windows the fastest counts, since a host's
other processes only add time."""
STEP = 0.05
"""Step to which speeds are rounded, relative to the fastest device."""
MARGIN = 0.9
"""Share of a GPU's free memory that tensors may take: the formulas omit fragmentation and workspaces."""
_PASS_FLOPS = {"cuda": 1e13, "cpu": 2e10}
"""Largest number of FLOPs of a pass, which takes some ms on a GPU and tenths of a second on a CPU."""


@dataclass(frozen=True)
class MeasuredStages:
    """Measured speeds of the pipeline ranks, and the resulting division of the layers.

    Attributes:
        devices: speeds relative to the fastest device, and memory.
        seconds: seconds of a pass on the slowest device of every pipeline rank.
        layers: (first, end) of the decoder layers of every stage.
    """

    devices: StageDevices
    seconds: tuple[float, ...]
    layers: tuple[tuple[int, int], ...]

    def row(self) -> dict[str, Any]:
        """Returns the values for an event in the journal and for the run's manifest."""
        memory = self.devices.memory
        return {
            "speeds": list(self.devices.speeds),
            "seconds": list(self.seconds),
            "memory_gb": None if memory is None else [each / GB for each in memory],
            "layers": [list(each) for each in self.layers],
        }

    def applied(self, prepared: PreparedRun) -> PreparedRun:
        """Returns a run with these stages."""
        return replace(prepared, run=replace(prepared.run, measured_devices=self.devices))

    def line(self) -> str:
        """Formats the stages as a line for people."""
        speeds = ", ".join(f"{each:.2f}" for each in self.devices.speeds)
        counts = ", ".join(str(end - first) for first, end in self.layers)
        text = f"pipeline stages by measured speed: ranks {speeds} of the fastest; decoder layers per stage {counts}"
        if self.devices.memory is None:
            return text
        return text + "; memory " + ", ".join(f"{each / GB:.1f}" for each in self.devices.memory) + " GB"


def measure_stages(
    run: ResolvedRun, model: nn.Module, rendezvous: Rendezvous, device: torch.device
) -> MeasuredStages | None:
    """Measures this rank, and gathers all ranks' times. Collective; None if the config asks for no measurement.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        rendezvous: the rendezvous of all ranks.

    Raises:
        ConfigError: no division of the layers fits the memory of the devices.
        UnreachableError: a rank did not take part.
    """
    if run.config.parallel.stage_speeds != "measured":
        return None
    with deadline(rendezvous, "while the speeds of pipeline stages were measured"):
        dist.barrier()  # ranks of a host are measured together, as they will compute
        own = torch.tensor([_pass_seconds(run, model, device), _free_memory(device)], dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
    seconds = slowest_of_pipeline_ranks(run.topology, [float(each[0]) for each in found])
    free = [-each for each in slowest_of_pipeline_ranks(run.topology, [-float(each[1]) for each in found])]
    memory = run.stage_devices.memory
    if memory is None and device.type == "cuda" and widths_of(model.config) is not None:
        memory = tuple(MARGIN * each for each in free)
    devices = StageDevices(relative_speeds(seconds), memory)
    stages = pipeline_stages(replace(run, measured_devices=devices), model)
    return MeasuredStages(devices, tuple(seconds), tuple(stage.layers for stage in stages))


def relative_speeds(seconds: Sequence[float]) -> tuple[float, ...]:
    """Computes the speeds of devices from times for equal work: 1 for the fastest, in steps of `STEP`, never 0."""
    fastest = min(seconds)
    return tuple(round(max(1, round(fastest / each / STEP)) * STEP, 2) for each in seconds)


def slowest_of_pipeline_ranks(topology: Topology, values: Sequence[float]) -> list[float]:
    """Returns the largest value of each pipeline rank's data-, context- and tensor-parallel ranks."""
    by_rank: list[list[float]] = [[] for _ in range(topology.pp)]
    for rank, each in enumerate(values):
        by_rank[topology.coordinates(rank)["pp"]].append(each)
    return [max(each) for each in by_rank]


def _pass_seconds(run: ResolvedRun, model: nn.Module, device: torch.device) -> float:
    """Measures the seconds of a decoder layer's matrix products on this rank (`WINDOWS`)."""
    shapes = _matrices(run, model)
    flops_per_row = 6 * sum(rows * columns for rows, columns in shapes)
    tokens = run.batch.micro * run.batch.sequence_length // run.topology.cp
    tokens = max(1, min(tokens, int(_PASS_FLOPS[device.type] / flops_per_row)))
    products = [_Product(shape, tokens, dtype=model_dtype(run.config), device=device) for shape in shapes]
    _timed_pass(products, device)  # the first pass allocates, and chooses kernels
    return min(_mean_seconds(products, device) for _ in range(WINDOWS))


def _mean_seconds(products: Sequence[_Product], device: torch.device) -> float:
    """Measures the mean seconds of a window's passes, at least one."""
    passes, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < WINDOW_S or passes == 0:
        _timed_pass(products, device)
        passes += 1
    return elapsed / passes


def _timed_pass(products: Sequence[_Product], device: torch.device) -> None:
    for product in products:
        product.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Product:
    """A linear layer's product and its two gradients, on ones, since values do not matter.

    Args:
        shape: (out, in) of the weight.
        tokens: rows of the input.
    """

    def __init__(self, shape: tuple[int, int], tokens: int, *, dtype: torch.dtype, device: torch.device) -> None:
        outputs, inputs = shape
        self._weight = torch.ones(outputs, inputs, dtype=dtype, device=device)
        self._input = torch.ones(tokens, inputs, dtype=dtype, device=device)
        self._gradient = torch.ones(tokens, outputs, dtype=dtype, device=device)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the output, the gradient of the input and the gradient of the weight."""
        return self._input @ self._weight.T, self._gradient @ self._weight, self._gradient.T @ self._input


def _matrices(run: ResolvedRun, model: nn.Module) -> list[tuple[int, int]]:
    """Returns (out, in) of the first decoder layer's matrices on a rank, with the experts of only one token."""
    tp, config = run.topology.tp, model.config
    shapes: list[tuple[int, int]] = []
    for parameter in layer_list(model)[1][0].parameters():
        if parameter.dim() < 2:  # norms and biases
            continue
        *experts, outputs, inputs = parameter.shape
        times = getattr(config, "num_experts_per_tok", 1) if experts else 1
        shapes.append((max(1, math.ceil(outputs / tp)) * times, inputs))
    return shapes


def _free_memory(device: torch.device) -> float:
    """Returns the bytes that this process's tensors may still take on a GPU; 0 on a CPU, whose ranks share memory."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(device)[0])
