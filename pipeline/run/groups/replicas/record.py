"""Journal rows and console lines of a replica: the samples of every replica, and from which step on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.run.groups.replicas.deal import ReplicaDecision, ReplicaMember, count_of


@dataclass
class ReplicaRecord:
    """Records quorums that change something.

    Attributes:
        event: records an event, given a step and values, in the journal; ignored on all ranks but rank 0.
        say: prints a line on rank 0.
    """

    event: Callable[..., None]
    say: Callable[[str], None]
    _parts: dict[str, Any] = field(default_factory=dict, init=False)

    def began(self, member: ReplicaMember, decision: ReplicaDecision) -> None:
        """Records how a beginning step is divided, if the division has changed."""
        step, parts = member.step + 1, _plain(decision)
        if parts == self._parts and not decision.healed:
            return
        before, self._parts = self._parts, parts
        joined = [name for name in decision.names if before and name not in before]
        left = [name for name in before if name not in decision.names]
        self.event(step, event="quorum", parts=parts, joined=joined, left=left, healed=list(decision.healed))
        if member.name in decision.healed:
            others = [name for name in decision.names if name != member.name]
            self.say(f"step {step}: joined {', '.join(others)} with the state of replica {decision.source}")
        elif joined or left:
            change = [f"{', '.join(names)} {verb}" for names, verb in ((joined, "joined"), (left, "left")) if names]
            self.say(f"step {step}: {'; '.join(change)}: replicas {', '.join(decision.names)} go on")

    def went_on(self, member: ReplicaMember, decision: ReplicaDecision) -> None:
        """Records that the samples of a replica that died in mid-step were divided over the others."""
        if decision.parts:
            step, parts = (
                member.step + 1,
                {name: [list(each) for each in part] for name, part in decision.parts.items()},
            )
            self.event(step, event="redealt", parts=parts, replicas=list(decision.names))
            count = sum(map(count_of, decision.parts.values()))
            self.say(f"step {step}: {count} samples of a lost replica are run by {', '.join(decision.parts)}")

    def damaged(self, member: ReplicaMember, count: int) -> None:
        """Records that messages of other replicas arrived damaged (`count` at one rank) and were sent again."""
        step = member.step + 1
        self.event(step, event="exchange_damaged", messages=count)
        again = f"{count} messages of other replicas arrived damaged, and were sent again"
        self.say(f"step {step}: {again}: check this host's network")

    def failed(self, member: ReplicaMember, why: str) -> None:
        """Records a failed exchange, which is tried again."""
        step = member.step + 1
        self.event(step, event="exchange_failed", why=why)
        self.say(f"step {step}: exchange with the other replicas failed: {why}")


def _plain(decision: ReplicaDecision) -> dict[str, Any]:
    return {name: [list(each) for each in decision.parts.get(name, ())] for name in decision.names}
