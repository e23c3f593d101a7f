"""The peak memory of a run per rank, before it starts: for `headrace check`. Formulas: `engines.sizes.memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from foundation.errors import ConfigError
from foundation.memory_size import bytes_of
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import MemorySection
from pipeline.engines.sizes.expert_load import expert_load
from pipeline.engines.sizes.footprint import footprint_of
from pipeline.engines.sizes.memory import KINDS, Bytes, caveat, largest_micro_batch, peak_memory
from pipeline.run.before.summary import Entry


def memory_bytes(text: str) -> int:
    """Converts a size with its unit into bytes, e.g. 80GB or 139GiB.

    Raises:
        ConfigError: the text is not a size with its unit.
    """
    try:
        return bytes_of(text)
    except ValueError as error:
        raise ConfigError("--memory", text, why=str(error), remedy="e.g. --memory 80GB") from None


@dataclass(frozen=True)
class Executed:
    """A step executed on the fake device (`fake_gpu.exact`).

    Attributes:
        pp_rank: rank of the pipeline.
        report: fields of a `fake_gpu.step.StepReport`.
        seconds: time that the execution took.
    """

    pp_rank: int
    report: dict[str, Any]
    seconds: float

    @property
    def peak(self) -> int:
        """Peak memory of the step, in bytes."""
        return int(self.report["peak"])

    def kinds(self, engine: str) -> dict[str, int] | None:
        """Returns kind -> bytes; None for DeepSpeed, whose flat buffers hold several kinds."""
        return None if engine == "deepspeed" else {kind: self.report["kinds"][kind] for kind in KINDS}


Execute = Callable[[Sequence[int]], Executed]
"""Function that executes a step on ranks of the pipeline, and returns the step of the rank with the highest peak."""


def memory_entries(
    run: ResolvedRun, model: nn.Module, *, memory: int | None = None, execute: Execute | None = None
) -> Iterator[Entry]:
    """Yields the highest peak of any rank, by kind; with `memory`, whether it fits or which micro-batch would fit.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        memory: bytes of a device's memory; None to skip the check whether the run fits.
        execute: executes the step, whose peak replaces the formulas' peak; None to use the formulas.

    Raises:
        ConfigError: the step to execute is one of DeepSpeed's later pipeline stages, or fails.
    """
    footprint = footprint_of(run, model)
    if footprint is None:
        kind = getattr(model.config, "model_type", "this architecture")
        if execute is None:
            why = f"not known for {kind}: its layers are not built like Llama's (--exact executes a step)"
            yield Entry("memory", why, None)
            return
        executed = execute(_executable(run.config.engine, range(run.topology.pp)))
        yield _executed_entry(run, executed, None)
        if memory is not None:
            yield _fit_entry(run.config.memory, executed.peak, memory=memory, largest=None)
        return
    if run.topology.ep > 1:
        load = expert_load(run, footprint.widths)
        yield Entry("expert load", load.text, asdict(load))
    ranks = range(run.topology.pp)
    peaks = [peak_memory(run, footprint, pp_rank=rank) for rank in ranks]
    worst = max(ranks, key=lambda rank: peaks[rank].total)
    total = peaks[worst].total
    if execute is None:
        yield _peak_entry(peaks[worst], worst, pp=run.topology.pp)
        if (known := caveat(run)) is not None:
            yield Entry("note", known, known)
    else:
        executed = execute(_executable(run.config.engine, [worst]))
        total = executed.peak
        yield _executed_entry(run, executed, peaks[worst])
    if memory is not None:
        # the rank with the highest peak depends on the micro-batch
        largest = min(largest_micro_batch(run, footprint, memory=memory, pp_rank=rank) for rank in ranks)
        yield _fit_entry(run.config.memory, total, memory=memory, largest=largest)


def _executable(engine: str, ranks: Sequence[int]) -> Sequence[int]:
    if engine == "deepspeed" and any(ranks):
        why = "the later stages of DeepSpeed's pipeline take shapes from the stage before, which is not there"
        raise ConfigError("--exact", True, why=why, remedy="leave it out, or see engine torch with the same layout")
    return ranks


def _peak_entry(peak: Bytes, worst: int, *, pp: int) -> Entry:
    values = {**_rounded(peak), "peak": round(peak.total), "pp_rank": worst}
    text = f"peak {shown_bytes(peak.total)} per rank{_where(worst, pp=pp)}{_parts(_rounded(peak))}"
    return Entry("memory", text, values)


def _executed_entry(run: ResolvedRun, executed: Executed, formula: Bytes | None) -> Entry:
    """Compares the executed step with the formulas."""
    kinds, where = executed.kinds(run.config.engine), _where(executed.pp_rank, pp=run.topology.pp)
    text = f"peak {shown_bytes(executed.peak)} per rank{where}, executed on fake tensors"
    text += _parts(kinds or {})
    values: dict[str, Any] = {**(kinds or {}), "peak": executed.peak, "pp_rank": executed.pp_rank}
    if formula is not None:
        text += f"; by the formulas {shown_bytes(formula.total)}{_parts(_rounded(formula))}"
        values["formula"] = {**_rounded(formula), "peak": round(formula.total)}
    return Entry("memory", text, {**values, "executed": True})


def _rounded(peak: Bytes) -> dict[str, int]:
    return {kind: round(getattr(peak, kind)) for kind in KINDS}


def _parts(kinds: dict[str, int]) -> str:
    parts = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in kinds.items() if size >= 1e6)
    return f": {parts}" if parts else ""


def _where(rank: int, *, pp: int) -> str:
    return f" (pipeline rank {rank}, which needs most)" if pp > 1 else ""


def _fit_entry(section: MemorySection, peak: float, *, memory: int, largest: int | None) -> Entry:
    fits = "fits" if peak <= memory else "does not fit"
    text = f"{fits} {shown_bytes(memory)} (peak {peak / memory:.0%} of it)"
    if largest is not None:
        best = f"the largest micro-batch that does is {largest}" if largest else "not even a micro-batch of 1 does"
        text += f"; {best}"
    if peak > memory and not largest:
        text += "; try: " + _remedy(section)
    values = {"memory": memory, "fits": peak <= memory, "largest_micro_batch": largest}
    return Entry("memory fit", text, values)


def _remedy(section: MemorySection) -> str:
    if section.activation_checkpointing != "full":
        return "memory.activation_checkpointing full, or more ranks"
    return "more ranks with zero_optimization.stage 3, or a smaller model"


def shown_bytes(size: float) -> str:
    """Formats a size in GB or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
