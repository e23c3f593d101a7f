"""Inputs of the goodput under failures, and its closed formula. Times are seconds unless they say otherwise.

Failures are a Poisson process: each node in use fails with rate 1 / `node_mtbf_s`, at any time, a restart included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from headrace.base.errors import ConfigError

HOUR, DAY = 3600.0, 86400.0
LLAMA_NODE_MTBF_S = 54 * DAY * (16384 / 8) / 419
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100, 8 to a node (arXiv:2407.21783, section 3.3.4):
one in 3.09 h, and one per node in 264 days."""
LLAMA_HARDWARE_SHARE = 0.78
"""Of these, hardware that failed or was suspected (same section)."""


@dataclass(frozen=True)
class FailureModel:
    """A run under failures.

    Attributes:
        nodes: that train.
        gpus_per_node: for the totals only.
        node_mtbf_s: mean time between failures of one node.
        detect_s: from a failure until the others know.
        requeue_s: until nodes are there.
        start_s: until the ranks are connected: launch, check, imports, rendezvous.
        load_s: of the newest checkpoint.
        first_step_s: what the first step takes longer: compilation, allocation.
        save_blocking_s: that training waits for a checkpoint.
        save_s: from then until the checkpoint counts, in the background.
        interval_s: of training between two checkpoints.
        spares: nodes that take the place of lost ones.
        node_loss_share: of the failures, those that take a node out until it is repaired.
        repair_s: until such a node is back.
        days: of the run.
    """

    nodes: int = 1250
    gpus_per_node: int = 8
    node_mtbf_s: float = LLAMA_NODE_MTBF_S
    detect_s: float = 20.0
    requeue_s: float = 0.0
    start_s: float = 34.0
    load_s: float = 30.0
    first_step_s: float = 30.0
    save_blocking_s: float = 1.0
    save_s: float = 60.0
    interval_s: float = 600.0
    spares: int = 25
    node_loss_share: float = LLAMA_HARDWARE_SHARE
    repair_s: float = DAY
    days: float = 30.0

    def __post_init__(self) -> None:
        """Refuses what has no meaning.

        Raises:
            ConfigError: a field out of its range, or a save that takes longer than the interval.
        """
        for field in fields(self):
            _check(field.name, getattr(self, field.name))
        if self.save_s > self.interval_s:
            why = f"a checkpoint takes {self.save_s:g} s in the background, and the next one waits for it"
            raise ConfigError("interval_s", self.interval_s, why=why, remedy=f"use {self.save_s:g} or more")

    @property
    def mtbf_s(self) -> float:
        """Of all nodes together."""
        return self.node_mtbf_s / self.nodes

    @property
    def restart_s(self) -> float:
        """From a failure to the next step."""
        return self.detect_s + self.requeue_s + self.start_s + self.load_s + self.first_step_s


_POSITIVE = frozenset({"nodes", "gpus_per_node", "node_mtbf_s", "interval_s", "days"})


def _check(name: str, value: float) -> None:
    if math.isnan(value) or value < 0 or (name in _POSITIVE and value == 0):
        least = "above 0" if name in _POSITIVE else "0 or more"
        raise ConfigError(name, value, why=f"it has to be {least}", remedy="see python -m pipeline.planner goodput -h")
    if name == "node_loss_share" and value > 1:
        raise ConfigError(name, value, why="it is a share of the failures", remedy="use 0 to 1")


def expected_goodput(model: FailureModel) -> float:
    """Expected share of the time that goes into steps that count, with all nodes at all times.

        interval * exp(-save / M) / (M * exp(restart / M) * (exp((interval + blocking) / M) - 1))

    with M the mean time between failures of all nodes. For a save without background this is the model of J. T. Daly, A
    higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006) 303-312. A checkpoint
    counts `save` later than it was taken, so that a failure finds it with probability exp(-save / M) less.
    Without failures it is interval / (interval + blocking).
    """
    cycle = model.interval_s + model.save_blocking_s
    if math.isinf(model.node_mtbf_s):
        return model.interval_s / cycle
    rate = 1 / model.mtbf_s
    if rate * max(cycle, model.restart_s, model.save_s) > 500:  # exp would overflow: nothing is ever finished
        return 0.0
    return model.interval_s * rate * math.exp(-rate * (model.save_s + model.restart_s)) / math.expm1(rate * cycle)


def daly_interval_s(*, mtbf_s: float, blocking_s: float) -> float:
    """Seconds of training between two checkpoints that maximize `expected_goodput`, by the series of Daly (2006).

    With d the blocking time and M the mean time between failures: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d
    for d < 2 M, else M. Neither the restart nor the background part of a save enters.
    """
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    x = blocking_s / (2 * mtbf_s)
    return math.sqrt(2 * blocking_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - blocking_s


def with_best_interval(model: FailureModel) -> FailureModel:
    """The model with Daly's interval, or the time of a save where that is longer: saves do not overtake each other."""
    if math.isinf(model.node_mtbf_s):
        return model
    best = daly_interval_s(mtbf_s=model.mtbf_s, blocking_s=model.save_blocking_s)
    return replace(model, interval_s=max(best, model.save_s, 1.0))
