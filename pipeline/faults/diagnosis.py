"""Who is to blame: a judgement over what the ranks have told. No clock, no sockets, no files.

All ranks run the same program, so they come to the same places in the same order: the number of places a rank has come
to says who is ahead and who is behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.faults.stack_dumps import debugged, waits

SETTLE_S = 2.0
"""Seconds in which the cause is waited for, after an error that looks like the consequence of another one."""

Kind = Literal["died", "silent", "stuck", "failed", "lost"]


@dataclass(frozen=True)
class RankStatus:
    """What is known of a rank.

    Attributes:
        rank: global rank.
        host: its name.
        pid: of its process.
        machine: identity of the kernel and the process namespace it runs in; equal where `pid` means the same.
        born: when its process began, in the kernel's ticks: a pid may be given out again.
        main: identity of its main thread.
        heard: when it was heard last, in seconds of the listener's clock.
        moved: when it was heard first to be where it is.
        places: number of places (step, phase) it has come to.
        ticks: signs of progress within the place.
        step: the step it is in, or the last one.
        phase: start-up, training, ...
        stack: of its main thread, innermost call first.
        starved: its last sign of life was given without the interpreter's lock, which some call holds.
        left: it has said goodbye.
        gone: its connection is closed.
        failed: first line of its own error.
        consequence: that error looks like one that follows from another rank's end.
        failed_at: when the error was told.
    """

    rank: int
    host: str
    pid: int
    heard: float
    moved: float
    machine: str = ""
    born: int = 0
    main: int = 0
    places: int = 0
    ticks: int = 0
    step: int = 0
    phase: str = "start-up"
    stack: tuple[str, ...] = ()
    starved: bool = False
    left: bool = False
    gone: bool = False
    failed: str | None = None
    consequence: bool = False
    failed_at: float = 0.0

    @property
    def present(self) -> bool:
        """It is to be heard of."""
        return not self.left and not self.gone


@dataclass(frozen=True)
class Diagnosis:
    """What ended the run.

    Attributes:
        kind: died (its connection closed without a word), silent, stuck, failed (with an error of its own), or lost
            (it lost its link to another rank, and none has died, failed or fallen silent).
        ranks: to blame, in order.
        seconds: since they were heard last; with "stuck", since anything moved.
    """

    kind: Kind
    ranks: tuple[int, ...]
    seconds: float


def diagnose(
    records: Sequence[RankStatus], now: float, *, silent_s: float, stuck_s: float, beat_s: float = 1.0
) -> Diagnosis | None:
    """Looks at all ranks; None while nothing is wrong.

    Args:
        records: of the ranks that have come.
        now: on the clock of their times.
        silent_s: seconds without a sign of life after which a rank counts as stopped.
        stuck_s: seconds without progress of any rank after which the run counts as stuck.
        beat_s: seconds between signs of life.
    """
    present = [record for record in records if record.present]
    failed = sorted((r for r in records if r.failed is not None), key=lambda r: r.failed_at)
    causes = [r for r in failed if not r.consequence]
    dead = [r for r in records if r.gone and not r.left and r.failed is None]
    unlinked = [r for r in failed if r.gone or now - r.failed_at > SETTLE_S]
    # nccl ends ranks half a minute after another's host has lost its power: who was overdue by then is the cause.
    # Half the limit is what a call may take that keeps the interpreter's lock
    overdue = [r for r in present if now - r.heard > silent_s / 2 + 2 * beat_s] if dead or unlinked else []
    return (
        _blame("failed", causes[:1], now)
        or _blame("silent", overdue, now)
        or _blame("died", dead, now)
        or _blame("lost", unlinked, now)
        or _blame("silent", [r for r in present if now - r.heard > silent_s], now)
        or _stuck(present, now, stuck_s)
    )


def _blame(kind: Kind, guilty: Sequence[RankStatus], now: float) -> Diagnosis | None:
    if not guilty:
        return None
    ranks = tuple(sorted(record.rank for record in guilty))
    return Diagnosis(kind, ranks, now - min(record.heard for record in guilty))


def _stuck(present: Sequence[RankStatus], now: float, stuck_s: float) -> Diagnosis | None:
    if not present or any(debugged(record.stack) for record in present):
        return None
    still_s = now - max(record.moved for record in present)
    if still_s <= stuck_s:
        return None
    return Diagnosis("stuck", tuple(sorted(record.rank for record in _behind(present))), still_s)


def _behind(present: Sequence[RankStatus]) -> Sequence[RankStatus]:
    """Who has come the least far; among equals who does not wait for others; among those the few that differ."""
    first = min(record.places for record in present)
    behind = [record for record in present if record.places == first]
    if len(behind) < len(present):
        return behind
    behind = [record for record in present if not waits(record.stack)] or behind
    if len(behind) < len(present):
        return behind
    where = Counter(record.stack[:1] for record in behind)
    rarest, count = min(where.items(), key=lambda item: item[1])
    return [record for record in behind if record.stack[:1] == rarest] if count * 2 < len(behind) else behind
