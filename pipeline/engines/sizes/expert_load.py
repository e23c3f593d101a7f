"""Load of the fullest rank of an expert-parallel group: its rows divided by the mean of all ranks.

No row is dropped, so memory and time depend on the fullest rank. Its load is estimated from the run's method of
balancing experts, unless it is given (`--imbalance`).

If the largest expert gets 1 + v times the mean, so does a rank with only this expert. With n experts on a rank,
deviations partly cancel: 1 + v / sqrt(n). Since a token's k experts are distinct, at most min(k, n) of its rows go to
one rank; the load is therefore at most ep min(k, n) / k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.rank_model import Widths

VIOLATION = {"bias": 0.04, "aux_loss": 0.72, "none": 2.4}
"""moe.balance -> v. Balanced: a layer's largest expert over a validation set, for 1B parameters and 64 experts (Wang et
al. 2024, arXiv:2408.15664, table 2). Not balanced: simulated for 128 experts, 8 chosen, with logits that differ between
experts as much as between tokens."""
_SOURCE = {
    "bias": "published for a balance by bias",
    "aux_loss": "published for an auxiliary loss",
    "none": "simulated without a balance",
}


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the fullest rank.

    Attributes:
        factor: the rank's rows divided by the mean; 1 without expert parallelism.
        most: upper bound of the factor.
        source: source of the factor, in words.
    """

    factor: float
    most: float
    source: str

    @property
    def text(self) -> str:
        """Describes the load in one line."""
        return (
            f"the fullest rank of ep gets {self.factor:.3g} x the mean of rows ({self.source}; {self.most:.3g} at most)"
        )


def expert_load(run: ResolvedRun, widths: Widths) -> ExpertLoad:
    """Returns the load for the formulas of memory and time.

    Args:
        run: the resolved config; its `imbalance`, if given, is used up to the bound.
        widths: sizes of a decoder layer of the run's model.
    """
    ep, chosen = run.topology.ep, widths.experts
    if ep == 1 or not chosen:
        return ExpertLoad(1.0, 1.0, "no expert parallelism")
    each = widths.all_experts / ep
    most = ep * min(chosen, each) / chosen
    if run.imbalance is not None:
        return ExpertLoad(min(most, run.imbalance), most, "as given by --imbalance")
    balance = run.config.moe.balance
    return ExpertLoad(min(most, 1 + VIOLATION[balance] / math.sqrt(each)), most, _SOURCE[balance])
