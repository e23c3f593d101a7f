"""Measures one row, in a separate process. `python -m benchmarks.gpu_check.measure ROW.json RESULT.json`

ROW.json has the row and its steps. The largest micro-batch that fits is found by trial: halving from the largest that a
lower bound of a sample's bytes allows, first without activation checkpointing and then with it on every layer. On
several GPUs, a process of torchrun for each, it is one sample, with activation checkpointing.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.cases import Row, Size, sizes, tiny_sizes
from benchmarks.gpu_check.meter import Meter
from pipeline.runtime.launch import detect

_HELD_BYTES = 10
"""Least bytes per parameter of any contestant, from which the first micro-batch is computed."""


def main() -> None:
    """Writes the result, or the reason why there is no result."""
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    row, launch = Row(**job["row"]), detect()
    size = (tiny_sizes() if job["tiny"] else sizes(job["sequence"]))[row.size]
    size = replace(size, samples=size.samples * launch.world_size)
    attempts: list[str] = []
    try:
        found = measured(size, row, job, attempts)
    except Exception as error:  # a failure is the row's result
        traceback.print_exc()
        if launch.world_size > 1:
            raise  # other ranks wait for this one: torchrun ends them
        found = {"reason": reason(error)}
    if launch.rank == 0:
        result.write_text(json.dumps({"name": row.name, "title": row.title, "attempts": attempts, **found}))


def measured(size: Size, row: Row, job: dict[str, Any], attempts: list[str]) -> dict[str, Any]:
    """Returns the first attempt that fits; adds the outcome of each other attempt to `attempts`."""
    launch = detect()
    device = torch.device("cuda", launch.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    contestant = module_of(row)
    trace = Path(job["trace"]) if job["trace"] else None
    if trace is not None and launch.rank:
        trace = trace.with_name(f"rank-{launch.rank}-{trace.name}")
    with contestant.opened(device):
        for micro, checkpointing in plan(size, device) if launch.world_size == 1 else [(1, "full")]:
            meter = Meter(device, warmup=job["warmup"], steps=job["steps"], trace=trace)
            what = f"micro-batch {micro}, activation checkpointing {checkpointing}"
            outcome, built = attempt(contestant, size, row, meter, micro, checkpointing, device)
            if isinstance(outcome, float):
                return numbers(size, meter, device, micro, checkpointing, outcome, ranks=launch.world_size)
            attempts.append(f"{what}: {outcome}")
            if not built:
                return {"reason": f"out of memory before the first step: weights and optimizer do not fit ({outcome})"}
    return {"reason": f"out of memory even at {what}: {outcome}"}


def module_of(row: Row) -> Any:
    """The module of a row's contestant, imported only here: each needs other packages."""
    return importlib.import_module(f"benchmarks.gpu_check.{'trainer' if row.contestant == 'trainer' else 'ours'}")


def plan(size: Size, device: torch.device) -> Iterator[tuple[int, str]]:
    """Yields (micro-batch, activation checkpointing) in the order of the attempts."""
    most = size.samples
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - _HELD_BYTES * size.parameters
        most = max(1, min(most, free // size.activation_bytes_per_sample()))
    micro = 1 << (most.bit_length() - 1)
    for checkpointing in ("none", "full"):
        for power in range(micro.bit_length() - 1, -1, -1):
            yield 1 << power, checkpointing


def attempt(
    contestant: Any, size: Size, row: Row, meter: Meter, micro: int, checkpointing: str, device: torch.device
) -> tuple[float | str, bool]:
    """Returns the mean loss or the allocator's error, and whether weights and optimizer were allocated."""
    built, outcome = False, ""
    try:
        ready = contestant.Contestant(size, row, micro=micro, checkpointing=checkpointing, device=device)
        built = True
        return ready.train(meter), True
    except torch.OutOfMemoryError as error:
        outcome = short(error)
    ready = None
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return outcome, built


def numbers(
    size: Size, meter: Meter, device: torch.device, micro: int, checkpointing: str, loss: float, *, ranks: int = 1
) -> dict[str, Any]:
    """The result of a row: seconds, tokens per second of a device, MFU by both definitions, bytes."""
    from pipeline.runtime.metrics.mfu import mfu  # noqa: PLC0415  as in peak_rate

    seconds = meter.seconds()
    rate = size.tokens_per_step / statistics.median(seconds) / ranks
    peak = peak_rate(device)
    allocated, reserved = meter.peak_bytes()
    full, causal = (size.flops_per_token(causal=each) for each in (False, True))
    return {
        "micro_batch": micro,
        "samples": size.samples,
        "sequence": size.sequence,
        "activation_checkpointing": checkpointing,
        "step_s": seconds,
        "median_s": statistics.median(seconds),
        "tokens_per_s": rate,
        "parameters": size.parameters,
        "flops_per_token": {"6N + 12Lhs": full, "6N + 6Lhs": causal},
        "mfu": mfu(rate, full, peak) if peak else None,
        "mfu_causal": mfu(rate, causal, peak) if peak else None,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "mean_loss": loss,
    }


def peak_rate(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, also for fp8; None for a CPU or an unknown device."""
    from pipeline.runtime.metrics.mfu import peak_flops  # noqa: PLC0415  it needs no package but pydantic

    return peak_flops(torch.cuda.get_device_name(device), bf16=True) if device.type == "cuda" else None


def reason(error: Exception) -> str:
    """One line on why a row could not be measured."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is missing"
    if type(error).__name__ == "NotAvailableError":
        return str(error)
    return f"{type(error).__name__}: {short(error)}"


def short(error: Exception) -> str:
    """An error on one line."""
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    main()
