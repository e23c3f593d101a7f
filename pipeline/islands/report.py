"""What the journal and the terminal are told of an exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipeline.islands.ledger import Decision, Ledger
from pipeline.islands.lighthouse import Quorum
from pipeline.islands.surroundings import Surroundings


def report_failure(around: Surroundings, step: int, why: str) -> None:
    """An exchange that failed, and is tried again."""
    around.record(step, event="exchange_failed", why=why)
    around.say(f"step {step}: exchange with the other islands failed: {why}")


def report_exchange(
    around: Surroundings, step: int, decision: Decision, quorum: Quorum, *, before: Ledger, **costs: float
) -> None:
    """An exchange, or the joining of other islands.

    Args:
        around: the island.
        step: inner steps that it has done.
        decision: what was done.
        quorum: that has decided it.
        before: where the island stood.
        costs: further values: seconds.
    """
    row = exchange_row(decision, name=around.name, samples=around.samples, before=before)
    row |= {"refused": list(quorum.refused), **costs}
    around.record(step, event="exchange" if decision.contributors else "joined", **row)
    for name, (first, last) in row["lost"].items():
        around.say(f"step {step}: lost: samples {first} to {last} of island {name}, which did not contribute")
    if around.name in row["healed"]:
        names, source = decision.names, decision.names[decision.source]
        around.say(f"step {step}: joined {', '.join(names)} with the state of island {source}")


def exchange_row(decision: Decision, *, name: str, samples: int, before: Ledger) -> dict[str, Any]:
    """The values of an event, without costs.

    Args:
        decision: what was done.
        name: of this island.
        samples: of a slot.
        before: where the island stood.
    """
    deal, names = decision.ledger.deal, decision.names
    assert deal is not None

    def ends(slots: range) -> list[int]:
        return [slots.start * samples, slots.stop * samples - 1] if slots else []

    trained = {names[n]: ends(before.deal.slots(names[n])) for n in decision.contributors if before.deal}
    healed = [names[n] for n in decision.healed]
    return {
        "round": decision.ledger.round,
        "islands": list(names),
        "trained": trained if name not in healed else {},
        "lost": {each: ends(slots) for each, slots in decision.lost.items() if slots},
        "healed": healed,
        "next_samples": ends(deal.slots(name)),
        "samples_dealt": decision.ledger.slots * samples,
    }


def over_ranks(around: Surroundings, value: float) -> float:
    """The sum over the ranks of the island. Collective."""
    total = torch.tensor(value, dtype=torch.float64, device=around.agreement.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)
