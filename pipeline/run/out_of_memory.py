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
"""Share of the memory that a suggested config may fill: the formulas are within 6 % of an executed step."""
_HOST = "can't allocate memory"
_ALL = "smaller micro-batches, memory.activation_checkpointing full, zero_optimization.stage 3, offload_optimizer"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Change = tuple[str, Any]
"""Dotted key and value."""


@dataclass(frozen=True)
class Fitting:
    """A change of the config that fits into memory.

    Attributes:
        changes: dotted keys with their values, as `--set` takes them.
        peak: largest peak of any rank in bytes, by the formulas.
    """

    changes: tuple[Change, ...]
    peak: float

    def __str__(self) -> str:
        sets = " ".join(f"--set {key}={value}" for key, value in self.changes)
        return f"{sets} (a peak of {shown_bytes(self.peak)} by the formulas)"


@contextmanager
def explained_out_of_memory(prepared: PreparedRun, device: torch.device) -> Iterator[None]:
    """Turns a failed allocation into an error that names a setting that would have fitted.

    Raises:
        TrainingError: raised in place of torch's error, which is its cause.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise TrainingError(_message(error, prepared, memory_of(device))) from error


def fitting_change(run: ResolvedRun, model: nn.Module, *, memory: float) -> Fitting | None:
    """Finds the first change that fits: micro-batch, activation checkpointing, ZeRO stage, offload, combinations.

    Args:
        run: the run that did not fit.
        model: the full model, on meta.
        memory: bytes of a device's memory that the peak may reach.

    Returns:
        The change; None where no change fits, or the architecture has no formulas.
    """
    for changes in _candidates(run.config):
        with suppress(ConfigError):  # the layout does not support the change
            found = _fitting(_changed(run, changes), model, changes, micro=run.batch.micro, memory=memory)
            if found is not None:
                return found
    return None


def own_peak(run: ResolvedRun, model: nn.Module) -> float | None:
    """Computes the largest peak of any rank in bytes, by the formulas; None for an architecture without formulas."""
    footprint = footprint_of(run, model)
    if footprint is None:
        return None
    return max(peak_memory(run, footprint, pp_rank=rank).total for rank in range(run.topology.pp))


def memory_of(device: torch.device) -> float:
    """Returns a GPU's memory in bytes; on the CPU the host's or cgroup's memory divided by this host's ranks."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # "max" means no limit
            total = min(total, float(Path(path).read_text()))
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("HEADRACE_NPROC") or "1"
    return total / max(1, int(local) if local.isdecimal() else 1)


def _candidates(config: Config) -> Iterator[tuple[Change, ...]]:
    """Yields no change (only a smaller micro-batch), then single changes, then combinations, the cheapest first."""
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
    """Returns the run with changed settings; micro-batch and gradient accumulation are derived anew."""
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
    with suppress(RuntimeError, MemoryError):  # there may be no memory for the advice, either
        peak = own_peak(prepared.run, prepared.model)
        found = fitting_change(prepared.run, prepared.model, memory=_MARGIN * min(memory, peak or memory))
    if peak is not None:
        besides = "" if peak > memory else ", beside the memory of other processes, libraries and fragmentation"
        needs = f"a rank needs {shown_bytes(peak)} of {shown_bytes(memory)} by the formulas of 'headrace check'"
        lines.append(f"  why: {needs}{besides}")
    advice = f"{found}; or " if found is not None else f"{_ALL}; more ranks; "
    return "\n".join([*lines, f"  try: {advice}docs/how-to/out-of-memory.md"])
