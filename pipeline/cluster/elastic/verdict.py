"""The verdict on the ranks of a start, by the exit codes of all nodes. No processes, no clocks.

The first cause decides. A rank's own error comes before the ranks that ended because of it; a killed rank comes before
the ranks that only lost their link to it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from foundation.errors import EXIT_FOLLOWED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_REQUEUE
from pipeline.cluster.elastic.files import NodeState

CAUSE_S, FOLLOWED_S, SAVED_S = 10.0, 70.0, 300.0
"""Seconds to wait after the first exit for the cause to show, in three cases: a cause is known; ranks followed an error
that is not known yet (a rank has 60 s to report it); ranks have only ended well."""

Kind = Literal["finished", "stopped", "failed", "lost"]


@dataclass(frozen=True)
class Verdict:
    """The end of a start.

    Attributes:
        kind: finished; stopped (saved, on request); failed (an error of a rank's own); lost (a rank was killed or
            hangs).
        code: exit code.
        nodes: nodes with the first cause of the end, as far as known.
        text: the error of the first rank.
    """

    kind: Kind
    code: int
    nodes: tuple[str, ...] = ()
    text: str = ""


def verdict(states: Mapping[str, NodeState], *, waited_s: float) -> Verdict | None:
    """Returns the verdict on a start; None while its ranks run or the cause of their end may still show.

    Args:
        states: node -> state of all members; a node that has not begun counts as running.
        waited_s: seconds since the first exit was seen.
    """
    codes = {node: [_code(code) for code in state.codes.values()] for node, state in states.items()}
    every = {code for each in codes.values() for code in each}
    if not every:
        return None
    ended = not any(state.running for state in states.values())
    causes: tuple[tuple[Kind, Callable[[int], bool], float], ...] = (
        ("failed", _own, CAUSE_S),
        ("lost", _lost, CAUSE_S),
        ("lost", _followed, FOLLOWED_S),
    )
    for kind, wanted, wait_s in causes:
        nodes = tuple(node for node, each in codes.items() if any(map(wanted, each)))
        if nodes:
            return _begun(kind, nodes, states, codes) if ended or waited_s >= wait_s else None
    unheard = any(code == -signal.SIGUSR1 for state in states.values() for code in state.codes.values())
    if ended or (unheard and waited_s >= CAUSE_S):  # the others wait for a rank that ended before it handled signals
        return Verdict("stopped" if max(every) else "finished", max(every))
    return Verdict("lost", EXIT_LOST) if waited_s >= SAVED_S else None


def _begun(
    kind: Kind, nodes: tuple[str, ...], states: Mapping[str, NodeState], codes: Mapping[str, list[int]]
) -> Verdict:
    killed = tuple(node for node in nodes if any(map(_killed, codes[node])))  # a lost link does not tell the node
    text = next((states[node].error for node in (*killed, *nodes) if states[node].error), "")
    if kind == "failed":
        return Verdict(kind, next(code for code in codes[nodes[0]] if _own(code)), nodes, text)
    return Verdict(kind, EXIT_LOST, killed, text)


def _own(code: int) -> bool:
    return 0 < code < 128 and code not in (EXIT_REQUEUE, EXIT_LOST, EXIT_FOLLOWED)


def _killed(code: int) -> bool:
    return code >= 128 and code != EXIT_INTERRUPTED


def _lost(code: int) -> bool:
    return _killed(code) or code == EXIT_LOST


def _followed(code: int) -> bool:
    return code == EXIT_FOLLOWED


def _code(code: int) -> int:
    """Converts an exit code to a shell's; a rank that was stopped before it handled signals counts as stopped."""
    code = 128 - code if code < 0 else code
    return EXIT_REQUEUE if code == 128 + signal.SIGUSR1 else code
