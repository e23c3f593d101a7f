"""Rows and console lines that report an exchange between islands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeline.run.groups.islands.context import IslandContext
from pipeline.run.groups.islands.ledger import Deal, Decision, Ledger, Tail
from pipeline.runtime.metrics.sinks import JournalRow


def report_failure(context: IslandContext, step: int, why: str) -> None:
    """Reports a failed exchange, which is tried again."""
    context.record(step, event="exchange_failed", why=why)
    context.say(f"step {step}: exchange with the other islands failed: {why}")


def report_exchange(
    context: IslandContext, step: int, decision: Decision, *, refused: Sequence[str], **costs: float
) -> None:
    """Reports an exchange, or the joining of other islands.

    Args:
        context: the island.
        step: number of inner steps that the island has done.
        decision: the decision that was carried out.
        refused: islands whose reports did not verify.
        costs: further values: bytes and seconds.
    """
    row = exchange_row(decision, name=context.name, samples=context.samples)
    row |= {"refused": list(refused), **costs}
    context.record(step, event="exchange" if decision.contributors else "joined", **row)
    for lost in (row.get("tail_lost", {}), row["lost"]):
        for name, (first, last) in lost.items():
            context.say(f"step {step}: lost: samples {first} to {last} of island {name}, which did not contribute")
    if "damaged_messages" in costs:
        damaged = f"{costs['damaged_messages']} messages of other islands arrived damaged, and were sent again"
        context.say(f"step {step}: {damaged}: check this host's network")
    if context.name in row["healed"]:
        names, source = decision.names, decision.names[decision.source]
        context.say(f"step {step}: joined {', '.join(names)} with the state of island {source}")


def exchange_row(decision: Decision, *, name: str, samples: int) -> JournalRow:
    """Returns the values of an event, without costs; samples of the previous round only if there are any.

    Args:
        decision: the decision that was carried out.
        samples: number of samples in a slot.
    """
    deal, names = decision.ledger.deal, decision.names
    assert deal is not None

    def each(slots: dict[str, range]) -> dict[str, list[int]]:
        return {name: _ends(some, samples) for name, some in slots.items() if some}

    healed = [names[n] for n in decision.healed]
    tails = {"tail_trained": each(decision.tail_trained), "tail_lost": each(decision.tail_lost)}
    if name in healed:
        tails["tail_trained"] = {}
    return {
        "round": decision.ledger.round,
        "islands": list(names),
        "trained": {} if name in healed else each(decision.trained),
        "lost": each(decision.lost),
        **{key: value for key, value in tails.items() if value},
        "healed": healed,
        "next_samples": _ends(deal.slots(name), samples),
        "samples_dealt": decision.ledger.slots * samples,
        "group": "kept" if decision.formed else "new",
    }


def report_update(
    context: IslandContext,
    step: int,
    ledger: Ledger,
    *,
    done: Deal | None,
    islands: Sequence[str],
    lost: Sequence[Tail],
    **costs: float,
) -> None:
    """Reports an exchange of one island with the holder, in asynchronous mode.

    Args:
        context: the island.
        step: number of inner steps that the island had done.
        ledger: the island's ledger after the exchange.
        done: round whose pseudo-gradient was applied; None if the island has just joined.
        islands: names of the islands that live.
        lost: slots of islands that have died.
        costs: further values: staleness, bytes and seconds.
    """
    deal, name = ledger.deal, context.name
    assert deal is not None
    row: JournalRow = {
        "round": ledger.round,
        "islands": list(islands),
        "trained": {name: _ends(done.slots(name), context.samples)} if done else {},
        "lost": {_unique(lost, n): _ends(each.slots, context.samples) for n, each in enumerate(lost)},
        "healed": [] if done else [name],
        "refused": [],
        "next_samples": _ends(deal.slots(name), context.samples),
        **costs,
    }
    context.record(step, event="exchange" if done else "joined", **row)
    for island, (first, last) in row["lost"].items():
        context.say(f"step {step}: lost: samples {first} to {last} of island {island}, which did not contribute")


def over_ranks(context: IslandContext, value: float) -> float:
    """Sums over the ranks of the island. Collective."""
    total = torch.tensor(value, dtype=torch.float64, device=context.agreement.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def _unique(lost: Sequence[Tail], n: int) -> str:
    """Returns the name of the island that lost slots; numbered if it has died more than once."""
    before = sum(each.name == lost[n].name for each in lost[:n])
    return f"{lost[n].name} ({before + 1})" if before else lost[n].name


def _ends(slots: range, samples: int) -> list[int]:
    """Returns the first and the last sample of slots; empty without slots."""
    return [slots.start * samples, slots.stop * samples - 1] if slots else []
