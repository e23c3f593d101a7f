"""What the agents of a run (`pipeline.elastic`) have decided last, from their files in `.agents` of its directory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.elastic.files import DEAD_S, NodeState, state_of

FOLDER = ".agents"


@dataclass(frozen=True)
class Agents:
    """The newest plan of the agents.

    Attributes:
        start: number of the start of the ranks.
        members: nodes with ranks, in the order of the ranks.
        reason: of the newest plan.
        outcome: exit code of the job; None while it goes on.
        restarts: starts after a loss since the newest checkpoint.
        silent: members whose agent has not written its file for some time.
        excluded: node -> why it gets no ranks any more.
    """

    start: int
    members: tuple[str, ...]
    reason: str
    outcome: int | None
    restarts: int
    silent: tuple[str, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)


def read_agents(run_dir: Path) -> Agents | None:
    """The newest plan of all agents; None where the run has none."""
    states: dict[str, tuple[NodeState, float]] = {}
    for path in (run_dir / FOLDER).glob("[!.]*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # being replaced, or another program's
            state = state_of(json.loads(path.read_text()))
            states[state.node] = state, path.stat().st_mtime
    if not states:
        return None
    plan = max((state.plan for state, _ in states.values()), key=lambda plan: plan.version)
    now = time.time()
    late = {node for node, (_, written) in states.items() if now - written > DEAD_S}
    silent = tuple(node for node in plan.members if node in late or node not in states)
    return Agents(plan.start, plan.members, plan.reason, plan.outcome, plan.restarts, silent, plan.excluded)
