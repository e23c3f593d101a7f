"""Load of the fullest rank of an expert-parallel group: its rows over the mean of all ranks.

Nothing is dropped, so that memory and time follow the fullest rank. Its load is assumed from how the run balances its
experts, unless it is given (`--imbalance`).

An expert that gets 1 + v times the mean of the experts alone makes its rank get as much. With n experts on a rank their
deviations partly cancel: 1 + v / sqrt(n). No rank gets more than all rows that can meet there: each of a token's k
experts is another one, so that ep min(k, n) / k bounds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.parallel.rank_model import Widths

VIOLATION = {"bias": 0.04, "aux_loss": 0.72, "none": 2.4}
"""moe.balance -> v. Balanced: the largest of a layer's experts over a validation set, of 1B and 64 experts (Wang et al.
2024, arXiv:2408.15664, table 2). Not balanced: simulated, routers whose experts' logits differ by as much as a token's
do, 128 experts, 8 chosen."""
_SOURCE = {
    "bias": "published for a balance by bias",
    "aux_loss": "published for an auxiliary loss",
    "none": "simulated without a balance",
}


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the fullest rank.

    Attributes:
        factor: rows of that rank over the mean; 1 without expert parallelism.
        most: upper bound of the factor.
        source: source of the factor, in words.
    """

    factor: float
    most: float
    source: str

    @property
    def text(self) -> str:
        """One line on the load."""
        return (
            f"the fullest rank of ep gets {self.factor:.3g} x the mean of rows ({self.source}; {self.most:.3g} at most)"
        )


def expert_load(run: ResolvedRun, widths: Widths) -> ExpertLoad:
    """Returns the load for the formulas of memory and time.

    Args:
        run: the resolved config; its `imbalance` is taken, up to the bound, where it is given.
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
