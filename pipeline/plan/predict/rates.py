"""Rates of products, memory and links that a machine reaches, at one end of their ranges.

An estimate is made three times, with all rates at their low, typical and high values. Every time falls as any rate
grows: the true value lies between the results as long as the rates are within their ranges. The ranges of a shipped
machine come from published figures (`sources` in its file), those of a calibrated machine from repeated measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.sections.run import Fp8Section
from pipeline.plan.predict.links import Link, LinkTopology
from pipeline.runtime.machines.machine import LinkSection, Machine, MeasuredProduct

LOW, TYPICAL, HIGH = 0, 1, 2
"""Ends of a range."""


@dataclass(frozen=True)
class TypicalProduct:
    """A typical matrix product of a run: (m x k) by (k x n)."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class Rates:
    """Rates of one device.

    Attributes:
        products: FLOP/s of the matrix products of decoder layers, in the run's dtype.
        head: FLOP/s of the head's matrix products, in bf16 even if those of decoder layers are in fp8.
        attention: FLOP/s of attention, which no engine computes in fp8.
        memory: bytes/s that other kernels read and write together.
        topology: links between devices.
        host: link to the host's memory.
        storage: bytes/s that a node writes to storage.
        disk_read, disk_write: bytes/s that a node reads from its local disks, and writes to them.
        overlap: share of communication that can run beside kernels (see `machine.OVERLAP`).
        layer_overlap: share of the communication within layers (tensor and context parallelism) that runs beside
            products; 0 for this project's engines.
        experts: rate of grouped products of experts, over that of products.
        deduplicated: whether expert-parallel ranks send a token once to a node.
        exchange_overlap: share of that exchange that runs beside other work of the same micro-batch.
        expert_layer_s: least seconds of a layer with experts and a micro-batch, both passes: its dispatch by the host.
        gpu: whether devices are GPUs with NCCL's collectives; else collectives are gloo's.
        layer_forward_s: seconds of the host for one layer's forward pass over a micro-batch; 0 where the host runs
            ahead of a device.
        layer_backward_s: seconds of the host for one layer's backward pass; 0 where the host runs ahead.
    """

    products: float
    head: float
    attention: float
    memory: float
    topology: LinkTopology
    host: Link
    storage: float
    disk_read: float
    disk_write: float
    overlap: float
    layer_overlap: float = 0.0
    experts: float = 1.0
    deduplicated: bool = False
    exchange_overlap: float = 0.0
    expert_layer_s: float = 0.0
    gpu: bool = True
    layer_forward_s: float = 0.0
    layer_backward_s: float = 0.0


def dtype_of(fp8: Fp8Section, *, bf16: bool, fp16: bool) -> str:
    """The dtype of a run's matrix products: fp8, bf16, fp16 or fp32."""
    if fp8.enabled and not fp8.emulate:
        return "fp8"
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def rates_of(
    machine: Machine, dtype: str, end: int, *, product: TypicalProduct | None = None, hidden: bool = True
) -> Rates:
    """The rates at one end of their ranges.

    Args:
        machine: a shipped or a calibrated machine.
        dtype: dtype of the run's matrix products: fp8, bf16, fp16 or fp32.
        end: LOW, TYPICAL or HIGH.
        product: a typical matrix product of the run; a calibrated machine uses the nearest product it measured. None
            for the rate of all products.
        hidden: whether the engine computes while it communicates.
    """
    efficiency, links, measured = machine.efficiency, machine.links, machine.measured
    unquantized = "bf16" if dtype == "fp8" else dtype
    attention = machine.attention_rate(unquantized) if measured is None else measured.attention_flops_per_s
    share, host, bridge = efficiency.links[end], machine.host, links.bridge
    return Rates(
        products=_products(machine, dtype, end, product),
        head=_products(machine, unquantized, end, product),
        attention=attention[end],
        memory=machine.memory.bytes_per_s * efficiency.memory[end],
        topology=LinkTopology(
            machine.devices_per_node,
            _link(links.within, share),
            _link(links.between, share),
            {kind: _link(each, share) for kind, each in links.operations.items()},
            links.within_links,
            0 if bridge is None else bridge.devices,
            0.0 if bridge is None else bridge.between_bytes_per_s * share,
        ),
        host=_link(links.host, share),
        storage=machine.storage_bytes_per_s[end],
        disk_read=host.disk_bytes_per_s[end],
        disk_write=(host.disk_write_bytes_per_s or host.disk_bytes_per_s)[end],
        overlap=efficiency.overlap[end] if hidden else 0.0,
        layer_overlap=efficiency.layer_overlap[end],
        experts=efficiency.experts[end],
        deduplicated=efficiency.exchange.deduplicated,
        exchange_overlap=efficiency.exchange.overlap[end],
        expert_layer_s=efficiency.expert_layer_s[HIGH - end],
        gpu=machine.gpu,
        layer_forward_s=0.0 if machine.gpu else machine.host.forward_s,
        layer_backward_s=0.0 if machine.gpu else machine.host.backward_s,
    )


def _products(machine: Machine, dtype: str, end: int, wanted: TypicalProduct | None) -> float:
    if machine.measured is not None and wanted is not None:
        nearest = _nearest(machine.measured.products, dtype, wanted)
        if nearest is not None:
            return nearest.flops_per_s[end]
    return machine.rate(dtype)[end]


def _link(section: LinkSection, share: float) -> Link:
    return Link(section.bytes_per_s * share, section.latency_s)


def _nearest(products: tuple[MeasuredProduct, ...], dtype: str, wanted: TypicalProduct) -> MeasuredProduct | None:
    """The measured product with the nearest sizes, by the sum of the logarithms of their ratios."""
    sizes = (wanted.m, wanted.k, wanted.n)

    def distance(each: MeasuredProduct) -> float:
        pairs = zip((each.m, each.k, each.n), sizes, strict=True)
        return sum(abs(math.log(have / want)) for have, want in pairs)

    return min((each for each in products if each.dtype == dtype), key=distance, default=None)
