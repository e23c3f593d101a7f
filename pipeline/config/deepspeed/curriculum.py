"""DeepSpeed's curriculum of sequence lengths, written as the `stages` that have the same lengths at the same steps.

It is printed and not translated: DeepSpeed truncates samples, while a stage divides the tokens into windows anew.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_MOST = 8
"""Largest number of stages that is printed."""


def stages_of(key: str, section: Any) -> str | None:
    """Returns the stages of a curriculum as a config's key and JSON value.

    Source: deepspeed 0.19.8 `runtime/data_pipeline/curriculum_scheduler.py`; the first step is number 1.

    Args:
        key: `curriculum_learning`, or `data_efficiency`, where metrics of truncated sequences count.
        section: The key's value.

    Returns:
        None for another metric or schedule, incomplete values, lengths that do not grow, or more than 8 stages.
    """
    try:
        found = _only_metric(section) if key == "data_efficiency" else section
        given = {**found, **found["schedule_config"]}
        if key == "curriculum_learning" and given["curriculum_type"] != "seqlen":
            return None
        discrete = given["schedule_type"] == "fixed_discrete"
        steps = list(_listed(given) if discrete else _computed(given))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError):
        return None
    numbers = [*(length for length, _ in steps), *(last for _, last in steps[:-1])]
    whole = all(type(each) is int and each > 0 for each in numbers)
    if not (1 < len(steps) <= _MOST and whole and all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(steps))):
        return None
    stages: list[dict[str, Any]] = [
        {"name": f"seqlen-{length}", "until": {"steps": last}, "data": {"sequence_length": length}}
        for length, last in steps
    ]
    del stages[-1]["until"]
    return f'"stages": {json.dumps(stages)}'


def _only_metric(section: Any) -> dict[str, Any]:
    """Returns the schedule of the metric that truncates sequences; raises ValueError where there are other metrics."""
    learning = section["data_sampling"]["curriculum_learning"]
    ((name, metric),) = learning["curriculum_metrics"].items()
    if not (learning["enabled"] and name.startswith("seqlen") and metric["clustering_type"] == "single_cluster"):
        raise ValueError(name)
    found: dict[str, Any] = metric
    return found


def _listed(given: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """Yields every length of a schedule `fixed_discrete` with its last step."""
    for length, last in zip(given["difficulty"], [*given["max_step"], math.inf], strict=True):
        reached = length >= given["max_difficulty"]  # DeepSpeed changes nothing after that
        yield length, math.inf if reached else last
        if reached:
            return


def _computed(given: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """Yields the lengths of a schedule `fixed_linear` or `fixed_root` with their last steps; 9 of them at most."""
    least, most, unit = given["min_difficulty"], given["max_difficulty"], given["difficulty_step"]
    total = given["total_curriculum_step"]
    root: Any = {"fixed_linear": 1, "fixed_root": given.get("root_degree")}[given["schedule_type"]]

    def length(step: int) -> int:
        grown = math.floor((float(step) / total) ** (1.0 / root) * (most - least) + least)
        return int(min(max(grown - grown % unit, -(-least // unit) * unit), most))

    end = math.ceil(total * ((most + unit - least) / (most - least)) ** root) + 1  # `most` may be no multiple of `unit`
    step = 1
    for _ in range(_MOST + 1):
        last = bisect_right(range(1, end + 1), length(step), key=length)
        yield length(step), last if last < end else math.inf
        if last >= end:
            return
        step = last + 1
