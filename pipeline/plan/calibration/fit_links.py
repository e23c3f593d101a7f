"""Fits latency and bandwidth of the links to measured collectives, for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.plan.predict.collectives import RankGroup, collective_s
from pipeline.plan.predict.links import Link, LinkTopology
from pipeline.runtime.machines.machine import MeasuredCollective, Operation

_LEAST_S = 1e-9
"""Latency where the fit finds none or a negative one, in seconds."""

_ONE_LINK = {"bytes_per_s": 1e9, "latency_s": 1e-4}
"""Placeholder for links that were not measured: a single device has none."""


def links_of(
    rows: Sequence[MeasuredCollective],
) -> tuple[dict[str, float], dict[Operation, dict[str, float]], list[float]]:
    """Returns the links of all-reduces and of other collectives, and the share of their bandwidth that is reached.

    Bandwidths are those of the fastest repetition. The share has the spread of the largest all-reduce: low, typical,
    high.
    """
    if not rows:
        return dict(_ONE_LINK), {}, [1.0, 1.0, 1.0]
    reductions = [row for row in rows if row.kind == "all_reduce"]
    least, median, most = max(reductions, key=lambda row: row.bytes).seconds
    low, high = median / most, median / least
    kinds: list[Operation] = sorted({row.kind for row in rows})
    found = {}
    for kind in kinds:
        link = link_of([row for row in rows if row.kind == kind])
        found[kind] = {"bytes_per_s": link.bandwidth * high, "latency_s": link.latency_s}
    within = found.pop("all_reduce")
    return within, found, [low / high, 1 / high, 1.0]


def link_of(rows: Sequence[MeasuredCollective]) -> Link:
    """Fits a link to the medians: least squares of the relative errors of the plan's formula.

    The formula is linear in the latency and in the inverse of the bandwidth.
    """
    seconds = np.array([row.seconds[1] for row in rows])
    terms = np.array([[_formula(row, latency=True), _formula(row, latency=False)] for row in rows])
    relative = terms / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=None)
    if latency <= 0 or per_byte <= 0:  # noise: the largest collective gives the bandwidth
        largest: Any = int(np.argmax(terms[:, 1]))
        latency, per_byte = _LEAST_S, seconds[largest] / terms[largest, 1]
    return Link(float(1 / per_byte), float(latency))


def _formula(row: MeasuredCollective, *, latency: bool) -> float:
    """Seconds of a collective with a latency of 1 s and unlimited bandwidth, or with no latency and 1 byte/s."""
    link = Link(float("inf"), 1.0) if latency else Link(1.0, 0.0)
    return collective_s(row.kind, "ring", RankGroup(row.ranks, 1), LinkTopology(row.ranks, link, link), size=row.bytes)
