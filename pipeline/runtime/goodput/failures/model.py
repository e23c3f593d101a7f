"""Inputs of the goodput under failures, and its closed formula. Times are in seconds unless stated otherwise.

Failures are a Poisson process: each node in use fails with rate 1 / `node_mtbf_s`, at any time, even during a restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foundation.errors import ConfigError

HOUR, DAY = 3600.0, 86400.0
LLAMA_NODE_MTBF_S = 54 * DAY * (16384 / 8) / 419
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100, 8 to a node (arXiv:2407.21783, section 3.3.4):
one in 3.09 h, and one per node in 264 days."""
LLAMA_HARDWARE_SHARE = 0.78
"""Share of Llama 3's interruptions with hardware as the known or suspected cause (same section)."""


def _input(default: float, meaning: str, *, positive: bool = False) -> Any:
    """Declares a field of the model: its default, its meaning, and whether it must be positive."""
    return field(default=default, metadata={"meaning": meaning, "positive": positive})


@dataclass(frozen=True)
class FailureModel:
    """A run under failures; the meaning of a field is in its metadata, from which the command's options are made.

    Raises:
        ConfigError: a field is out of its range, or a save takes longer than the interval.
    """

    nodes: int = _input(1250, "nodes that train", positive=True)
    gpus_per_node: int = _input(8, "GPUs of a node, for the totals", positive=True)
    node_mtbf_s: float = _input(
        LLAMA_NODE_MTBF_S, "mean time between failures of a node (default: Llama 3's, 264 days)", positive=True
    )
    detect_s: float = _input(20.0, "seconds from a failure until the other ranks know")
    requeue_s: float = _input(0.0, "seconds until nodes are allocated")
    start_s: float = _input(34.0, "seconds until the ranks are connected: launch, check, imports, rendezvous")
    load_s: float = _input(30.0, "seconds to load the newest checkpoint")
    first_step_s: float = _input(30.0, "extra seconds of the first step: compilation, allocation")
    save_blocking_s: float = _input(1.0, "seconds that training waits for a checkpoint")
    save_s: float = _input(60.0, "seconds in the background from then until the checkpoint counts")
    interval_s: float = _input(
        600.0,
        "seconds of training between two checkpoints (default: the best by Daly, at least --save-s)",
        positive=True,
    )
    spares: int = _input(25, "nodes in reserve, which take the place of lost ones")
    node_loss_share: float = _input(
        LLAMA_HARDWARE_SHARE,
        "share of failures that take a node out until it is repaired (default: Llama 3's hardware, 0.78)",
    )
    repair_s: float = _input(DAY, "seconds until a node is repaired")
    days: float = _input(30.0, "days of the run", positive=True)

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), positive=each.metadata["positive"])
        if self.save_s > self.interval_s:
            why = f"a checkpoint takes {self.save_s:g} s in the background, and the next one waits for it"
            raise ConfigError("interval_s", self.interval_s, why=why, remedy=f"use {self.save_s:g} or more")

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of all nodes together, in seconds."""
        return self.node_mtbf_s / self.nodes

    @property
    def restart_s(self) -> float:
        """Seconds from a failure to the next step."""
        return self.detect_s + self.requeue_s + self.start_s + self.load_s + self.first_step_s


def _check(name: str, value: float, *, positive: bool) -> None:
    if math.isnan(value) or value < 0 or (positive and value == 0):
        least = "above 0" if positive else "0 or more"
        raise ConfigError(name, value, why=f"it has to be {least}", remedy="see headrace goodput --help")
    if name == "node_loss_share" and value > 1:
        raise ConfigError(name, value, why="it is a share of the failures", remedy="use 0 to 1")


def expected_goodput(model: FailureModel) -> float:
    """Computes the expected share of time spent on steps that count, if all nodes are always available.

        interval * exp(-save / M) / (M * exp(restart / M) * (exp((interval + blocking) / M) - 1))

    with M the mean time between failures of all nodes. For a save without background this is the model of J. T. Daly, A
    higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006) 303-312. A checkpoint
    counts only `save` seconds after it was taken, hence the factor exp(-save / M). Without failures it is interval /
    (interval + blocking).
    """
    cycle = model.interval_s + model.save_blocking_s
    if math.isinf(model.node_mtbf_s):
        return model.interval_s / cycle
    rate = 1 / model.mtbf_s
    if rate * max(cycle, model.restart_s, model.save_s) > 500:  # exp would overflow: no step is ever finished
        return 0.0
    return model.interval_s * rate * math.exp(-rate * (model.save_s + model.restart_s)) / math.expm1(rate * cycle)


def daly_interval_s(*, mtbf_s: float, blocking_s: float) -> float:
    """Computes the training seconds between checkpoints that maximize `expected_goodput`, by the series of Daly (2006).

    With d the blocking time and M the mean time between failures: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d
    for d < 2 M, otherwise M. Neither the restart nor the background part of a save affects it.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    x = blocking_s / (2 * mtbf_s)
    return math.sqrt(2 * blocking_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - blocking_s


def best_interval_s(*, mtbf_s: float, blocking_s: float, save_s: float) -> float:
    """Returns Daly's interval, but at least the duration of a save (saves must not overlap) and at least 1 s."""
    return max(daly_interval_s(mtbf_s=mtbf_s, blocking_s=blocking_s), save_s, 1.0)


def with_best_interval(model: FailureModel) -> FailureModel:
    """Returns the model with the best interval; unchanged if no node ever fails."""
    if math.isinf(model.node_mtbf_s):
        return model
    best = best_interval_s(mtbf_s=model.mtbf_s, blocking_s=model.save_blocking_s, save_s=model.save_s)
    return replace(model, interval_s=best)
