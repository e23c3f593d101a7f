"""`headrace plan --calibrate`: measures the present machine in about a minute, and writes its file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from foundation.errors import ConfigError
from pipeline.models.folder.loading import pick_device
from pipeline.plan.calibration import measure
from pipeline.plan.calibration.fit_links import links_of
from pipeline.plan.calibration.measure import REPEATS, seconds_of
from pipeline.plan.calibration.measure_links import RanksMeasured, between_ranks
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.run.out_of_memory import memory_of
from pipeline.runtime.machines.known import known_machines, machine_of_device
from pipeline.runtime.machines.machine import CPU, Dtype, Machine, MeasuredProduct, MeasuredSection

DEFAULT_FILE = "machine.json"
_TRAINER_IMPORTS = (
    "import pipeline.run.session; from pipeline.runtime.metrics import memory; print(memory.resident_peak())"
)
"""Program that prints the resident bytes of a process after the trainer's imports. It is a string because the trainer
imports the planner."""
_TRAINING = 1.15
"""Resident bytes of a training process over its bytes after the imports: gloo, autograd's threads and workspaces come
on top. In runs of 2M parameters in one and two processes, 384 MB became 435 to 450."""
_TOKENS, _HIDDEN = 8, 32
"""Tokens and hidden size of the timed layers, so small that kernels take almost no time."""
_FEW, _MANY = 2, 6
"""Numbers of layers of the two models whose times are subtracted: work done once for all layers cancels."""


def calibrate_command(file: str | None) -> int:
    """Measures this machine, writes its file and prints the rates.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = Path(file or DEFAULT_FILE)
    if str(path).lower() in known_machines() or not path.parent.is_dir() or path.is_dir():
        why = "with --calibrate it is the file to write, in a directory that exists"
        raise ConfigError("--machine", str(path), why=why, remedy=f"--machine {DEFAULT_FILE}")
    machine = calibrated()
    path.write_text(json.dumps(machine.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    for line in _lines(machine):
        print(line)
    print(f"written to {path}: headrace plan --config F --machine {path}")
    return 0


def calibrated() -> Machine:
    """Measures this machine."""
    device = pick_device()
    gpu = device.type == "cuda"
    threads = torch.get_num_threads()
    try:
        if not gpu:  # each rank has one core
            torch.set_num_threads(1)
        ranks = between_ranks(ranks=_devices() if gpu else min(_devices(), 2))
        measured = _measured(device, ranks)
        host = None if gpu else host_seconds()
    finally:
        torch.set_num_threads(threads)
    return _machine(device, measured, ranks, host)


def _measured(device: torch.device, ranks: RanksMeasured) -> MeasuredSection:
    gpu = device.type == "cuda"
    return MeasuredSection(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine() or "CPU",
        torch=torch.__version__,
        products=tuple(measure.products(device, measure.GPU_SHAPES if gpu else measure.CPU_SHAPES)),
        attention_flops_per_s=measure.attention(device),
        copy_bytes_per_s=measure.copies(device),
        host_bytes_per_s=measure.host_copies(device),
        collectives=ranks.collectives,
    )


def _machine(
    device: torch.device, measured: MeasuredSection, ranks: RanksMeasured, host: tuple[float, float] | None
) -> Machine:
    known = machine_of_device(measured.device) if device.type == "cuda" else None
    peaks: dict[Dtype, float] = {}
    for each in measured.products:
        peaks[each.dtype] = max(peaks.get(each.dtype, 0.0), each.flops_per_s[2])
    if known is not None:
        peaks |= known.peak_flops
    bandwidth = known.memory.bytes_per_s if known is not None else measured.copy_bytes_per_s[2]
    within, operations, shares = links_of(measured.collectives)
    raw: dict[str, Any] = {
        "name": f"{measured.device}, calibrated",
        "devices": [CPU] if device.type == CPU else [],
        "devices_per_node": _devices(),
        "gpu": device.type == "cuda",
        "compute_capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        "memory": {"bytes": _memory(device), "bytes_per_s": bandwidth},
        "peak_flops": peaks,
        "links": {
            "within": within,
            "between": known.links.between.model_dump() if known is not None else within,
            "host": {"bytes_per_s": measured.host_bytes_per_s[2], "latency_s": 1e-5},
            "operations": operations,
        },
        "efficiency": {
            "products": {dtype: _shares(measured.products, dtype, peaks[dtype]) for dtype in _dtypes(measured)},
            "memory": [each / bandwidth for each in measured.copy_bytes_per_s],
            "links": shares,
            "overlap": ranks.overlap,
            "all_busy": ranks.all_busy,
        },
        "host": {} if host is None else {"forward_s": host[0], "backward_s": host[1]},
        "overhead": known.overhead.model_dump() if known is not None else _overhead(),
        "sources": {
            "peak_flops": "the maker's data sheet" if known is not None else "the best rate that was measured",
            "efficiency": "measured: least, median and most of repeated measurements, over all shapes",
            "links": "collectives measured between devices of this node; other nodes: not measured",
            "overlap": "measured: an all-reduce beside products" if ranks.collectives else "assumed: a single device",
            "all_busy": "measured: all devices of this node at the same time over one alone",
        },
        "measured": measured,
    }
    return Machine.model_validate(raw)


def _dtypes(measured: MeasuredSection) -> list[Dtype]:
    return sorted({each.dtype for each in measured.products})


def _shares(products: Sequence[MeasuredProduct], dtype: str, peak: float) -> list[float]:
    """Least, median and most FLOP/s of the products of a dtype, each divided by the peak."""
    own = [each.flops_per_s for each in products if each.dtype == dtype]
    low, high = min(each[0] for each in own), max(each[2] for each in own)
    return [low / peak, statistics.median(each[1] for each in own) / peak, high / peak]


def _devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _memory(device: torch.device) -> float:
    return memory_of(device) / (1 if device.type == "cuda" else _devices())


def _overhead() -> dict[str, list[float]]:
    """Measures the resident bytes of a CPU process that can train, before it has a tensor.

    Runs in a new process: this one has measured products and copies, and never gives their memory back.
    """
    done = subprocess.run([sys.executable, "-c", _TRAINER_IMPORTS], capture_output=True, text=True, check=True)
    resident = _TRAINING * float(done.stdout)
    return {"bytes": [0.85 * resident, resident, 1.4 * resident], "fragmentation": [0.0, 0.05, 0.2]}


def _lines(machine: Machine) -> Iterator[str]:
    measured = machine.measured
    assert measured is not None
    yield _line("machine", f"{measured.device}, {machine.devices_per_node} devices, torch {measured.torch}")
    yield _line("memory", f"{shown_bytes(machine.memory.bytes)} per device")
    for each in measured.products:
        yield _line("product", f"{each.dtype} {each.m} x {each.k} x {each.n}: {_flops(each.flops_per_s)}")
    yield _line("attention", _flops(measured.attention_flops_per_s))
    yield _line("copies", f"{_bytes(measured.copy_bytes_per_s)} read and written")
    yield _line("host", _bytes(measured.host_bytes_per_s))
    for row in measured.collectives:
        least, median, most = (1e6 * seconds for seconds in row.seconds)
        yield _line(
            row.kind.replace("_", "-"),
            f"{row.ranks} ranks, {row.bytes:,} bytes: {median:,.0f} us ({least:,.0f} to {most:,.0f})",
        )
    if measured.collectives:
        low, typical, high = machine.efficiency.overlap
        yield _line("overlap", f"products hide {typical:.0%} of an all-reduce ({low:.0%} to {high:.0%})")
        busy = machine.efficiency.all_busy
        yield _line("all busy", f"products at {busy.products:.0%}, copies at {busy.memory:.0%} of a device alone")
    if not machine.gpu:
        forward, backward = (1e6 * seconds for seconds in (machine.host.forward_s, machine.host.backward_s))
        yield _line("layer", f"{forward:,.0f} us forward and {backward:,.0f} us backward beside its kernels")


def _flops(rates: measure.Ends) -> str:
    low, typical, high = (each / 1e9 for each in rates)
    return f"{typical:,.1f} GFLOP/s ({low:,.1f} to {high:,.1f})"


def _bytes(rates: measure.Ends) -> str:
    low, typical, high = (each / 1e9 for each in rates)
    return f"{typical:,.1f} GB/s ({low:,.1f} to {high:,.1f})"


def _line(label: str, text: str) -> str:
    return f"{label:>14}  {text}"


def host_seconds() -> tuple[float, float]:
    """Seconds of a layer like Llama's on the CPU, eager, for one micro-batch: its forward and its backward pass.

    The CPU time of this thread is measured, which includes autograd's backward pass on a CPU. The result is a
    difference of two measurements, and other work on the core may take longer than either.
    """
    few, many = _passes(_FEW), _passes(_MANY)
    forward, backward = (max(0.0, (b - a) / (_MANY - _FEW)) for a, b in zip(few, many, strict=True))
    return forward, backward


def _passes(layers: int) -> tuple[float, float]:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=1,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model, cpu = LlamaModel(config), torch.device("cpu")
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)

    def forward() -> torch.Tensor:
        states: torch.Tensor = model(input_ids=ids).last_hidden_state
        return states

    alone = seconds_of(forward, cpu, repeats=2 * REPEATS, clock=time.thread_time)[1]
    both = seconds_of(lambda: forward().sum().backward(), cpu, repeats=2 * REPEATS, clock=time.thread_time)[1]
    return alone, both - alone
