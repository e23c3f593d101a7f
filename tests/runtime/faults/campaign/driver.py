"""Runs several training runs in parallel, and injects a share of the faults into each."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.runtime.faults.campaign.checks import Reference, Violation
from tests.runtime.faults.campaign.injections import FAULTS, FaultKind, can_mount
from tests.runtime.faults.campaign.layouts import Layout
from tests.runtime.faults.campaign.run_under_test import Outcome, RunUnderTest, reference


@dataclass
class Campaign:
    """Configuration and outcomes of a campaign: one layout is drawn for a run, one launcher for each start."""

    work: Path
    tokens: Path
    layouts: Sequence[Layout]
    launchers: Sequence[str]
    seed: int
    report: Callable[[Outcome], None]
    log: Callable[[str], None]
    outcomes: list[Outcome] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._making = {layout: threading.Lock() for layout in self.layouts}
        self._reference = cache(self._make_reference)

    def run(self, kinds: Sequence[str], *, jobs: int) -> list[Outcome]:
        """Distributes the faults to `jobs` parallel runs; returns all outcomes."""
        shares = [[FAULTS[name] for name in kinds[job::jobs]] for job in range(jobs)]
        pool = ThreadPoolExecutor(jobs)
        try:
            list(pool.map(self._job, range(jobs), shares))
        finally:
            self.stopped = True  # Ctrl-C is raised here, and in none of the threads
            pool.shutdown()
        return self.outcomes

    def _job(self, job: int, kinds: list[FaultKind]) -> None:
        rng, runs = random.Random(f"{self.seed}/{job}"), 0
        deck = list(rng.sample(self.layouts, len(self.layouts)))
        while kinds and not self.stopped:
            layout = deck[(runs + job) % len(deck)]
            with self._making[layout]:
                known = self._reference(layout)
            work = self.work / f"job-{job}-run-{runs}"
            run = RunUnderTest(work, layout, self.tokens, known, small_disk=can_mount() and runs % 2 == 0)
            runs += 1
            try:
                passed = self._inject_until_finished(run, kinds, rng)
            except Exception:
                run.close(keep=True)
                self.log(traceback.format_exc())
                raise
            run.close(keep=not passed)

    def _inject_until_finished(self, run: RunUnderTest, kinds: list[FaultKind], rng: random.Random) -> bool:
        """Injects faults until the run is finished, or a check fails; False then."""
        while not (run.finished or self.stopped):
            launcher = rng.choice(self._launchers(run.layout))
            kind = next((each for each in kinds if _fits(each, run, launcher)), None)
            if kind is None:
                if any(_fits(each, run, other) for each in kinds for other in self._launchers(run.layout)):
                    continue  # with another launcher
                outcome = run.finish(launcher)
                return outcome is None or self._record(outcome)
            outcome = run.inject(kind, launcher, rng)
            if outcome is None:  # it had exited before the fault
                continue
            kinds.remove(kind)
            if not self._record(outcome):
                return False
        return True

    def _launchers(self, layout: Layout) -> Sequence[str]:
        """The launchers to draw from: a single process is started by python itself, or forked."""
        if layout.processes > 1:
            return self.launchers
        return [launcher if launcher == "warm" else "plain" for launcher in self.launchers]

    def _record(self, outcome: Outcome) -> bool:
        with self._lock:
            self.outcomes.append(outcome)
            self.report(outcome)
        return not outcome.violations

    def _make_reference(self, layout: Layout) -> Reference:
        number = self.layouts.index(layout)
        return reference(self.work / f"reference-{number}", layout, self.tokens, self.log)


def draw_faults(count: int, rng: random.Random) -> list[str]:
    """`count` fault kinds in random order, all about equally often."""
    possible = [kind.name for kind in FAULTS.values() if can_mount() or not kind.needs_small_disk]
    names: list[str] = []
    while len(names) < count:
        names += rng.sample(possible, len(possible))
    return names[:count]


def violations_of(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Violation]]:
    return [(outcome, violation) for outcome in outcomes for violation in outcome.violations]


def _fits(kind: FaultKind, run: RunUnderTest, launcher: str) -> bool:
    return (run.small_disk or not kind.needs_small_disk) and (kind.launchers is None or launcher in kind.launchers)
