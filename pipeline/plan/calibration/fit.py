"""Fits the efficiencies and overheads of a machine to scored runs, whose spread gives the ranges."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from foundation.errors import ConfigError
from pipeline.plan.calibration.score import Score, rescored
from pipeline.plan.predict.step_time import StepTime
from pipeline.runtime.machines.machine import (
    MOST_OF_PEAK,
    HostSection,
    LinkSection,
    Machine,
    MeasuredSection,
    OverheadSection,
    Range,
    ScoredSection,
)

COMMUNICATION = ("tensor_parallel", "context_parallel", "data_parallel")
"""Parts of a step whose time depends on the links; all other parts but checkpoints depend on the device."""

SHARE = 0.05
"""Share of a step that communication must take in some run before the factor of the links is fitted."""

_ROUNDS = 5
"""Rounds of the fit: the exposed part of communication changes with the factors, so both are fitted again."""


def fitted(scores: Sequence[Score], machine: Machine) -> Machine:
    """Fits a machine to these runs: one factor for the rates of the device, one for those of the links.

    The factors minimize the squares of the relative errors. Without a run in which communication takes a noticeable
    share, the factor of the links is 1. Typical rates come from the factors. The ends of the ranges come from the runs
    furthest from the fit, and from the quartiles of their steps.

    Raises:
        ConfigError: the runs were trained on several kinds of devices.
    """
    devices = sorted({str(each.measured.record["device"]) for each in scores})
    if len(devices) > 1:
        why = f"the runs were trained on {', '.join(devices)}, and a machine has one kind of device"
        raise ConfigError("--save-calibration", why=why, remedy="score the runs of one device")
    found, now = machine, scores
    for _ in range(_ROUNDS):
        device, links = _factors(now)
        found = _slower(found, device=device, links=links)
        now = [rescored(each.measured, each.planned, found) for each in scores]
    found = _with_spread(found, now)
    record = scores[-1].measured.record
    ratios = [each.step.measured / each.step.predicted for each in now]
    return found.model_copy(
        update={
            "name": f"{machine.name}, fitted to {len(scores)} run{'s' if len(scores) > 1 else ''}",
            "overhead": _overhead(now, machine),
            "scored": ScoredSection(
                date=datetime.now(UTC).date().isoformat(),
                device=devices[0],
                torch=str(record["torch"]),
                runs=tuple(str(each.measured.path) for each in scores),
                step_error=(min(ratios), statistics.median(ratios), max(ratios)),
            ),
        }
    )


def _factors(scores: Sequence[Score]) -> tuple[float, float]:
    """The factors by which the device and the links are slower than predicted."""
    seconds = np.array([[*_split(each.parts)] for each in scores])
    measured = np.array([each.step.measured for each in scores])
    shares = seconds[:, 1] / seconds.sum(axis=1)
    if len(scores) > 1 and shares.max() >= SHARE and np.ptp(shares) >= SHARE / 2:
        device, links = np.linalg.lstsq(seconds / measured[:, None], np.ones(len(scores)), rcond=None)[0]
        if device > 0 and links > 0:
            return float(device), float(links)
    # the links are taken as predicted; the device takes the rest
    device = statistics.median((measured - seconds[:, 1]) / seconds[:, 0])
    if device > 0:
        return float(device), 1.0
    both = statistics.median(measured / seconds.sum(axis=1))
    return both, both


def _split(parts: StepTime) -> tuple[float, float]:
    links = sum(getattr(parts, name) for name in COMMUNICATION)
    return parts.total - parts.checkpoint - links, links


def _slower(machine: Machine, *, device: float, links: float) -> Machine:
    """A machine whose times are longer by these factors."""
    efficiency, sections = machine.efficiency, machine.links
    update = {
        "products": {dtype: _divided(share, device) for dtype, share in efficiency.products.items()},
        "memory": _divided(efficiency.memory, device),
    }
    own = machine.measured
    return machine.model_copy(
        update={
            "efficiency": efficiency.model_copy(update=update),
            "links": sections.model_copy(
                update={
                    "within": _link(sections.within, links),
                    "between": _link(sections.between, links),
                    "operations": {kind: _link(each, links) for kind, each in sections.operations.items()},
                }
            ),
            "host": HostSection(forward_s=machine.host.forward_s * device, backward_s=machine.host.backward_s * device),
            "measured": own and _slower_measured(own, device),
        }
    )


def _with_spread(machine: Machine, scores: Sequence[Score]) -> Machine:
    """The machine with the same typical rates, and ranges as wide as the spread of the runs."""
    times = [end / each.step.predicted for each in scores for end in (each.measured.step_s[0], each.measured.step_s[2])]
    low, high = min(1.0, 1 / max(times)), max(1.0, 1 / min(times))
    efficiency = machine.efficiency

    def spread(share: Range) -> Range:
        return share[1] * low, share[1], share[1] * high

    def share_of_peak(share: Range) -> Range:
        least, typical, most = spread(share)
        return least, typical, min(most, max(typical, MOST_OF_PEAK))  # a machine's file may not have more

    own = machine.measured
    update = {
        "products": {dtype: share_of_peak(share) for dtype, share in efficiency.products.items()},
        "memory": share_of_peak(efficiency.memory),
        "links": share_of_peak(efficiency.links),
    }
    measured = own and own.model_copy(
        update={
            "products": tuple(
                each.model_copy(update={"flops_per_s": spread(each.flops_per_s)}) for each in own.products
            ),
            "attention_flops_per_s": spread(own.attention_flops_per_s),
        }
    )
    return machine.model_copy(update={"efficiency": efficiency.model_copy(update=update), "measured": measured})


def _slower_measured(own: MeasuredSection, factor: float) -> MeasuredSection:
    products = tuple(
        each.model_copy(update={"flops_per_s": _divided(each.flops_per_s, factor)}) for each in own.products
    )
    return own.model_copy(
        update={"products": products, "attention_flops_per_s": _divided(own.attention_flops_per_s, factor)}
    )


def _overhead(scores: Sequence[Score], machine: Machine) -> OverheadSection:
    """Fits the overhead: a CPU process's bytes beside tensors, or a GPU's fragmentation as a share of activations."""
    overhead = machine.overhead
    if not machine.gpu:
        # the typical peak counts the allocator's share of activations too
        typical = overhead.fragmentation[1]
        beside = [each.overhead - typical * (each.tensors.activations + each.tensors.logits) for each in scores]
        return overhead.model_copy(update={"bytes": _range([max(0.0, each) for each in beside])})
    return overhead.model_copy(update={"fragmentation": _range([each.fragmentation for each in scores])})


def _range(values: Sequence[float]) -> Range:
    return min(values), statistics.median(values), max(values)


def _divided(values: Range, factor: float) -> Range:
    return values[0] / factor, values[1] / factor, values[2] / factor


def _link(section: LinkSection, factor: float) -> LinkSection:
    return LinkSection(bytes_per_s=section.bytes_per_s / factor, latency_s=section.latency_s * factor)
