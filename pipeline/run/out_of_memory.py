"""The remedy for a rank that has run out of memory: a change that fits, by the formulas of `headrace check`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundation.errors import ConfigError, TrainingError
from pipeline.config.load import changed
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import largest_micro_batch, peak_memory
from pipeline.run.before.memory_summary import shown_bytes
from pipeline.run.prepare import PreparedRun

_MARGIN = 0.9
"""Share of the memory that the advice may fill: the formulas are within 6 % of an executed step."""
_HOST = "can't allocate memory"
_ALL = "smaller micro-batches, memory.activation_checkpointing full, zero_optimization.stage 3, offload_optimizer"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Change = tuple[str, Any]
"""Dotted key and value."""


@dataclass(frozen=True)
class Fitting:
    """A change of the config that fits.

    Attributes:
        changes: dotted keys with their values, as `--set` takes them.
        peak: bytes of the rank that needs most, by the formulas.
    """

    changes: tuple[Change, ...]
    peak: float

    def __str__(self) -> str:
        sets = " ".join(f"--set {key}={value}" for key, value in self.changes)
        return f"{sets} (a peak of {shown_bytes(self.peak)} by the formulas)"


@contextmanager
def explained_out_of_memory(prepared: PreparedRun, device: torch.device) -> Iterator[None]:
    """Turns a failed allocation into an error that says which setting would have fitted.

    Raises:
        TrainingError: in the place of torch's error, which is its cause.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise TrainingError(_message(error, prepared, memory_of(device))) from error


def fitting_change(run: ResolvedRun, model: nn.Module, *, memory: float) -> Fitting | None:
    """The first change that fits: micro-batch, activation checkpointing, ZeRO stage, offload, then combinations.

    Args:
        run: the run that did not fit.
        model: the full model, on meta.
        memory: bytes of a device's memory that the peak may reach.

    Returns:
        None where none of them fits, or the architecture has no formulas.
    """
    for changes in _candidates(run.config):
        with suppress(ConfigError):  # a layout that may not be combined with it
            found = _fitting(_changed(run, changes), model, changes, micro=run.batch.micro, memory=memory)
            if found is not None:
                return found
    return None


def own_peak(run: ResolvedRun, model: nn.Module) -> float | None:
    """Peak bytes of the rank that needs most, by the formulas; None where the architecture has none."""
    footprint = footprint_of(run, model)
    if footprint is None:
        return None
    return max(peak_memory(run, footprint, pp_rank=rank).total for rank in range(run.topology.pp))


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU's memory; on the CPU the host's or its cgroup's memory, divided by this host's ranks."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # "max" where there is no limit
            total = min(total, float(Path(path).read_text()))
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("HEADRACE_NPROC") or "1"
    return total / max(1, int(local) if local.isdecimal() else 1)


def _candidates(config: Config) -> Iterator[tuple[Change, ...]]:
    """Yields no change (a smaller micro-batch alone), then one each, then several, from the cheapest on."""
    checkpointing = "memory.activation_checkpointing"
    modes = {"none": ["selective", "full"], "selective": ["full"]}.get(config.memory.activation_checkpointing, [])
    stage = config.zero_optimization.stage
    stages = [each for each in (1, 2, 3) if each > stage and (config.engine == "deepspeed" or each > 1)]
    offload: Sequence[Change] = ()
    if config.engine == "deepspeed" and config.zero_optimization.offload_optimizer.device == "none":
        offload = [("zero_optimization.offload_optimizer.device", "cpu")]
    full: Sequence[Change] = [(checkpointing, "full")] if modes else ()
    highest: Sequence[Change] = [("zero_optimization.stage", 3)] if stages else ()
    yield ()
    yield from (((checkpointing, mode),) for mode in modes)
    yield from ((("zero_optimization.stage", each),) for each in stages)
    yield tuple(offload)
    yield (*full, *highest)
    yield (*full, *highest, *offload)


def _changed(run: ResolvedRun, changes: Sequence[Change]) -> ResolvedRun:
    """The same run with other settings; micro-batch and gradient accumulation are derived anew."""
    if not changes:
        return run
    config = changed(run.config, dict(changes))
    return resolve(config, world_size=run.topology.world_size, begun=True)


def _fitting(
    run: ResolvedRun, model: nn.Module, changes: tuple[Change, ...], *, micro: int, memory: float
) -> Fitting | None:
    footprint = footprint_of(run, model)
    if footprint is None:
        return None
    ranks = range(run.topology.pp)
    largest = min(largest_micro_batch(run, footprint, memory=memory, pp_rank=rank) for rank in ranks)
    if not largest:
        return None
    chosen = min(largest, micro)
    peak = max(peak_memory(run, footprint, pp_rank=rank, micro=chosen).total for rank in ranks)
    smaller: tuple[Change, ...] = (("train_micro_batch_size_per_gpu", chosen),) if chosen < micro else ()
    if smaller and run.config.gradient_accumulation_steps is not None:
        smaller = (*smaller, ("gradient_accumulation_steps", "null"))
    return Fitting((*changes, *smaller), peak)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _HOST in str(error)


def _message(error: BaseException, prepared: PreparedRun, memory: float) -> str:
    first = str(error).strip().splitlines()[0]
    lines = [f"out of memory: {first}"]
    peak, found = None, None
    with suppress(RuntimeError, MemoryError):  # there may be no memory for the answer, either
        peak = own_peak(prepared.run, prepared.model)
        found = fitting_change(prepared.run, prepared.model, memory=_MARGIN * min(memory, peak or memory))
    if peak is not None:
        besides = "" if peak > memory else ", beside the memory of other processes, libraries and fragmentation"
        needs = f"a rank needs {shown_bytes(peak)} of {shown_bytes(memory)} by the formulas of 'headrace check'"
        lines.append(f"  why: {needs}{besides}")
    advice = f"{found}; or " if found is not None else f"{_ALL}; more ranks; "
    return "\n".join([*lines, f"  try: {advice}docs/how-to/out-of-memory.md"])
