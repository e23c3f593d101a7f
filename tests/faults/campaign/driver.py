"""Several runs at once, each struck by its share of the kinds."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.faults.campaign.checks import Reference, Violation
from tests.faults.campaign.layouts import Layout
from tests.faults.campaign.life import Life, Outcome, reference
from tests.faults.campaign.strikes import KINDS, Kind, can_mount


@dataclass
class Campaign:
    """What is to be done, and what has come of it.

    Attributes:
        work: directory of all.
        tokens: to train on.
        layouts: drawn from for every life.
        launchers: drawn from for every start on several processes.
        seed: of all that is drawn.
        report: called after every strike.
        say: called with what else happens.
        outcomes: so far.
        stopped: nothing more is begun.
    """

    work: Path
    tokens: Path
    layouts: Sequence[Layout]
    launchers: Sequence[str]
    seed: int
    report: Callable[[Outcome], None]
    say: Callable[[str], None]
    outcomes: list[Outcome] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._making = {layout: threading.Lock() for layout in self.layouts}
        self._reference = cache(self._make_reference)

    def run(self, kinds: Sequence[str], *, jobs: int) -> list[Outcome]:
        """Deals the kinds to so many runs at once; returns what came of all."""
        shares = [[KINDS[name] for name in kinds[job::jobs]] for job in range(jobs)]
        pool = ThreadPoolExecutor(jobs)
        try:
            list(pool.map(self._job, range(jobs), shares))
        finally:
            self.stopped = True  # Ctrl-C is seen here, and by none of the threads
            pool.shutdown()
        return self.outcomes

    def _job(self, job: int, kinds: list[Kind]) -> None:
        rng, lives = random.Random(f"{self.seed}/{job}"), 0
        deck = list(rng.sample(self.layouts, len(self.layouts)))
        while kinds and not self.stopped:
            layout = deck[(lives + job) % len(deck)]
            with self._making[layout]:
                known = self._reference(layout)
            work = self.work / f"job-{job}-life-{lives}"
            life = Life(work, layout, self.tokens, known, small_disk=can_mount() and lives % 2 == 0)
            lives += 1
            try:
                whole = self._live(life, kinds, rng)
            except Exception:
                life.close(keep=True)
                self.say(traceback.format_exc())
                raise
            life.close(keep=not whole)

    def _live(self, life: Life, kinds: list[Kind], rng: random.Random) -> bool:
        """Strikes until the run is at its end, or something is wrong; False then."""
        while not (life.finished or self.stopped):
            launcher = rng.choice(self._launchers(life.layout))
            kind = next((each for each in kinds if _fits(each, life, launcher)), None)
            if kind is None:
                if any(_fits(each, life, other) for each in kinds for other in self._launchers(life.layout)):
                    continue  # with another launcher
                outcome = life.finish(launcher)
                return outcome is None or self._take(outcome)
            outcome = life.strike(kind, launcher, rng)
            if outcome is None:  # it had ended before the strike
                continue
            kinds.remove(kind)
            if not self._take(outcome):
                return False
        return True

    def _launchers(self, layout: Layout) -> Sequence[str]:
        """Those that can be drawn: what starts one process is python itself, or the fork."""
        if layout.processes > 1:
            return self.launchers
        return [launcher if launcher == "warm" else "plain" for launcher in self.launchers]

    def _take(self, outcome: Outcome) -> bool:
        with self._lock:
            self.outcomes.append(outcome)
            self.report(outcome)
        return not outcome.violations

    def _make_reference(self, layout: Layout) -> Reference:
        number = self.layouts.index(layout)
        return reference(self.work / f"reference-{number}", layout, self.tokens, self.say)


def dealt(count: int, rng: random.Random) -> list[str]:
    """So many kinds of strikes, all equally often as far as that goes, in random order."""
    possible = [kind.name for kind in KINDS.values() if can_mount() or not kind.needs_small_disk]
    names: list[str] = []
    while len(names) < count:
        names += rng.sample(possible, len(possible))
    return names[:count]


def broken(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Violation]]:
    """All promises that were not kept."""
    return [(outcome, violation) for outcome in outcomes for violation in outcome.violations]


def _fits(kind: Kind, life: Life, launcher: str) -> bool:
    return (life.small_disk or not kind.needs_small_disk) and (kind.launchers is None or launcher in kind.launchers)
