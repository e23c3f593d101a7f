"""The bound on MFU of compiled training steps: what matrix products, memory traffic and links between GPUs allow.

    python -m tests.plan.fake_gpu.roofline_page [ROW ...]

The compiled kernels of a decoder layer and of the loss are those that Inductor makes for an H200
(`tests.plan.fake_gpu.lowering`), with the bytes that they read and write, times the layers and micro-batches of the
config. A matrix product or attention takes the longer of FLOPs / peak and bytes / bandwidth, any other kernel bytes /
bandwidth. What runs outside of compiled graphs (the head's products, the optimizer) is counted by formula; layers or a
loss that are not compiled are counted operator by operator (`tests.plan.fake_gpu.eager`). Of a pipeline, the slowest
rank counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.engines.parallel.costs import update_bytes
from pipeline.engines.sizes.traffic import PURPOSES
from pipeline.models.count import measure as size_of
from pipeline.plan.fake_gpu.case import StepCase
from tests.conftest import ROOT
from tests.plan.fake_gpu.cells import measured
from tests.plan.fake_gpu.document import built, facts
from tests.plan.fake_gpu.links import MACHINES, Sent, sent
from tests.plan.fake_gpu.rows import ROWS, SMALL_LAYERS, Row
from tests.support import output_of

KEPT = Path(__file__).with_name("lowered.json")

GPUS = {name: (each.peak_flops["bf16"], each.memory.bytes_per_s) for name, each in MACHINES.items()}
"""Dense bf16 FLOP/s and bytes/s; the machines' files have the sources."""

_LEAST = {
    "weights": ("all_gather", "dp x cp"),
    "gradients": ("reduce_scatter", "dp x cp"),
    "tensor parallelism, gathers": ("all_gather", "tp"),
    "tensor parallelism, scatters": ("reduce_scatter", "tp"),
    "pipeline, sent": ("send", "pp"),
}
"""Purpose of a formula of traffic -> (kind, axes), for a config whose fake step is not committed."""


@dataclass(frozen=True)
class Work:
    """What one rank does in a step.

    Attributes:
        products: (FLOPs, bytes, times) of matrix products and attention.
        kernel_bytes: read and written by the other kernels.
        held_bytes: read and written by the optimizer's update, and to add up gradients.
        bubble: time that a rank of a pipeline waits, as a share of its forward and backward passes.
        sent: collectives.
    """

    products: tuple[tuple[int, int, float], ...]
    kernel_bytes: float
    held_bytes: float
    bubble: float
    sent: tuple[Sent, ...]

    @property
    def flops(self) -> float:
        """Of the matrix products and attention; of causal attention the half that is computed."""
        return sum(flops * times for flops, _, times in self.products)


@dataclass(frozen=True)
class Time:
    """Seconds of a step on one GPU, the least possible.

    Attributes:
        products: matrix products and attention.
        fused: the other kernels.
        optimizer: its update, and the addition of gradients.
        bubble: a rank of a pipeline waits for others.
        nvlink: collectives within a node.
        network: collectives of groups that span nodes.
        exposed: bytes that layers wait for (`links.Sent`).
    """

    products: float
    fused: float
    optimizer: float
    bubble: float = 0.0
    nvlink: float = 0.0
    network: float = 0.0
    exposed: float = 0.0

    @property
    def computing(self) -> float:
        """Without communication."""
        return self.products + self.fused + self.optimizer + self.bubble

    @property
    def total(self) -> float:
        """Of the step, if all communication runs beside kernels."""
        return max(self.computing, self.nvlink, self.network)

    @property
    def total_exposed(self) -> float:
        """Of the step, if kernels wait for the collectives within a layer."""
        return max(self.computing + self.exposed, self.nvlink, self.network)


_facts, _built = cache(facts), cache(built)


def cases() -> dict[str, StepCase]:
    """Row -> a step with few layers and one micro-batch."""
    return {name: row.lowered() for name, row in ROWS.items()}


def measure(name: str) -> list[dict[str, Any]]:
    """The graphs of a row, lowered in a new process, and the operators of layers that are not compiled."""
    case, found = cases()[name], []
    for module in (["lower"], *([["eager", part] for part in ROWS[name].eager])):
        command = [sys.executable, "-m", f"tests.plan.fake_gpu.{module[0]}", json.dumps(vars(case)), *module[1:]]
        said = output_of(
            subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False)
        )
        result = json.loads(said.splitlines()[-1])
        found += result if isinstance(result, list) else [result]
    return found


def work_of(case: StepCase, graphs: list[dict[str, Any]], *, cell: str | None) -> Work:
    """What one rank of a case does, by the graphs of `measure` and the committed fake step of a cell."""
    layout, _ = _facts(case)
    run, rank = layout.run, layout.rank
    topology, count = run.topology, run.batch.accumulation
    products, kernel_bytes = [], 0.0
    for graph in graphs:
        if graph["part"] == "layers":
            times = graph["calls"] * count * len(rank.layers) / SMALL_LAYERS
        else:  # the last stage has the loss
            times = graph["calls"] * count if rank.last else 0
        products += [(flops, size, times) for flops, size in graph["products"]]
        kernel_bytes += times * graph["fused_bytes"]
    if rank.last:
        head = 3 * 2 * layout.tokens * layout.widths.vocabulary * layout.widths.hidden // topology.tp
        products.append((head, 0, count))
    bubble = (topology.pp - 1) / (count * run.virtual_stages)
    held_bytes = update_bytes(run, *(part.parameters for part in rank.apart()))
    return Work(tuple(products), kernel_bytes, held_bytes, bubble, tuple(_sent(case, cell)))


def _sent(case: StepCase, cell: str | None) -> list[Sent]:
    """What the committed fake step sends; without one, the least by the formulas."""
    layout, _ = _facts(case)
    report = measured().get(cell or "")
    if layout.run.alone:
        rows = []
    elif report is not None:
        rows = [(kind, axes, size) for kind, axes, _, _, size in report["collectives"]]
    else:
        rows = [(*_LEAST[each], size) for each in _LEAST if (size := PURPOSES[each](layout))]
    return sent(layout.run.topology, rows)


def time_of(work: Work, gpu: str) -> Time:
    """The least time of some work on a GPU of `GPUS`."""
    flops, bandwidth = GPUS[gpu]
    products = sum(times * max(each / flops, size / bandwidth) for each, size, times in work.products)
    fused = work.kernel_bytes / bandwidth
    links = [(each, each.seconds(gpu)) for each in work.sent]
    return Time(
        products,
        fused,
        work.held_bytes / bandwidth,
        bubble=work.bubble * (products + fused),
        nvlink=sum(seconds for each, seconds in links if each.within),
        network=sum(seconds for each, seconds in links if not each.within),
        exposed=sum(seconds for each, seconds in links if each.exposed),
    )


def slowest(row: Row, graphs: list[dict[str, Any]]) -> tuple[StepCase, Work]:
    """The rank of the pipeline that computes longest, on an H200, and what it does."""
    found = [(case, work_of(case, graphs, cell=row.traffic_cell(case.pp_rank))) for case in row.stages()]
    return max(found, key=lambda pair: time_of(pair[1], "H200").computing)


def least_time(name: str, graphs: list[dict[str, Any]], *, gpu: str) -> Time:
    return time_of(slowest(ROWS[name], graphs)[1], gpu)


def model_flops(name: str, *, halves: int) -> float:
    """FLOPs of a step per rank: 6N + 12Lhs per token, as the training loop counts them, or with one half 6N + 6Lhs."""
    run, model = _built(ROWS[name].whole)
    config: Any = model.config
    length = run.batch.sequence_length * halves // 2  # it enters the attention alone
    per_token = size_of(model, config, sequence_length=length).flops_per_token
    assert per_token is not None
    return per_token * run.batch.tokens / run.topology.world_size
