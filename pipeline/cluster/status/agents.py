"""The newest decisions of a run's agents (`pipeline.cluster.elastic`), from the files in `.agents`.

Under Slurm each start of a job has a directory of its own there, `.agents/JOB.N/`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cluster.elastic.files import DEAD_S, NodeState, read_state

FOLDER = ".agents"
_LOOKED_AT = 3
"""Number of directories that are read, the last changed first."""


@dataclass(frozen=True)
class Agents:
    """The newest plan of the agents.

    Attributes:
        start: number of the start of the ranks.
        members: nodes with ranks, in the order of the ranks.
        reason: why the newest plan was made.
        outcome: exit code of the job; None while it goes on.
        restarts: starts after a loss since the newest checkpoint.
        silent: members whose agent has not written its file for some time.
        written: time when an agent last wrote its file, in seconds since the epoch.
        excluded: node -> why it gets no ranks any more.
    """

    start: int
    members: tuple[str, ...]
    reason: str
    outcome: int | None
    restarts: int
    silent: tuple[str, ...]
    written: float
    excluded: Mapping[str, str] = field(default_factory=dict)


def folders_of(run_dir: Path) -> list[Path]:
    """Lists the directories in which a run's agents have written: one per start of a job, and `.agents` itself."""
    top = run_dir / FOLDER
    return [top, *sorted(path for path in top.glob("*") if path.is_dir())]


def read_agents(run_dir: Path) -> Agents | None:
    """Reads the newest plan of the agents that wrote last; None where the run has no agents."""
    newest = sorted(folders_of(run_dir), key=_changed)[-_LOOKED_AT:]  # a run may have hundreds of starts
    found = [states for folder in newest if (states := _read(folder))]
    if not found:
        return None
    states = max(found, key=_written)
    plan = max((state.plan for state, _ in states.values()), key=lambda plan: plan.version)
    now = time.time()
    late = {node for node, (_, written) in states.items() if now - written > DEAD_S}
    silent = tuple(node for node in plan.members if node in late or node not in states)
    return Agents(
        start=plan.start,
        members=plan.members,
        reason=plan.reason,
        outcome=plan.outcome,
        restarts=plan.restarts,
        silent=silent,
        written=_written(states),
        excluded=plan.excluded,
    )


def _read(folder: Path) -> dict[str, tuple[NodeState, float]]:
    """Reads node -> its agent's state and the time when it was written, from a directory."""
    states: dict[str, tuple[NodeState, float]] = {}
    for path in folder.glob("[!.]*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # the file is being replaced, or is another program's
            state = read_state(path)
            states[state.node] = state, path.stat().st_mtime
    return states


def _changed(folder: Path) -> float:
    """Returns when a file in a directory was last made or replaced; agents replace their files all the time."""
    return folder.stat().st_mtime if folder.is_dir() else 0.0


def _written(states: Mapping[str, tuple[NodeState, float]]) -> float:
    return max(written for _, written in states.values())
