"""A run from its first start to its last step, struck again and again on the way."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.errors import EXIT_USAGE
from pipeline.faults.report import read_faults
from tests.faults.campaign import checks
from tests.faults.campaign.checkpoints import Damage, leftovers
from tests.faults.campaign.checks import Reference, Violation
from tests.faults.campaign.layouts import MEETING_S, Layout, config_of, write
from tests.faults.campaign.moments import PATIENCE_S, WEIGHTS, wait
from tests.faults.campaign.start import Start, end_all, steps_of
from tests.faults.campaign.strikes import LAUNCHER_S, Blow, Kind, free, is_full

SMALL_DISK = "16m"
"""Room for six checkpoints."""


@dataclass
class Outcome:
    """What came of a strike.

    Attributes:
        kind, moment, launcher, layout: names.
        phase: how far the run had got: in start-up, or the steps it had done since.
        work: the directory of the life.
        seconds: to the end of all processes.
        code: of the launcher.
        lost: steps that were done and have to be done again.
        violations: broken promises.
    """

    kind: str
    moment: str
    launcher: str
    layout: str
    work: Path
    phase: str = ""
    seconds: float = 0.0
    code: int | None = None
    lost: int = 0
    violations: list[Violation] = field(default_factory=list)


class Life:
    """One run's directory, and the starts in it.

    Args:
        work: is made.
        layout: what trains; the same at every start.
        tokens: to train on.
        reference: a run that nobody touched.
        small_disk: the run's directory is on a file system that can be filled.
    """

    def __init__(self, work: Path, layout: Layout, tokens: Path, reference: Reference, *, small_disk: bool) -> None:
        self.work, self.layout, self.small_disk = work, layout, small_disk
        self._reference, self._damage = reference, Damage()
        self._starts, self._owed, self.finished = 0, 0, False
        self.small = work / "disk"
        for folder in (work / "tmp", self.small):
            folder.mkdir(parents=True)
        if small_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(self.small)]
            subprocess.run(mount, check=True)
        self.run_dir = self.small / "run"
        write(config_of(layout, tokens, self.run_dir), work / "c.json")

    def close(self, *, keep: bool) -> None:
        """Ends what is left and takes the directory away, but for one that somebody has to look at."""
        end_all(self.work)
        if self.small_disk:
            free(self.small)
            if keep:
                shutil.copytree(self.run_dir, self.work / "kept", symlinks=True, dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(self.small)], check=True)
        if not keep:
            shutil.rmtree(self.work, ignore_errors=True)

    def begin(self, launcher: str) -> Start:
        """Starts the run, or goes on with it."""
        self._starts += 1
        return Start(self.work, self.run_dir, self.layout, launcher, self._starts)

    def strike(self, kind: Kind, launcher: str, rng: random.Random) -> Outcome | None:
        """One start, struck; None when it came to its end before."""
        moment = kind.moment or rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        outcome = Outcome(kind.name, moment, launcher, self.layout.name, self.work)
        newest, faults = self._newest(outcome), len(read_faults(self.run_dir))
        damaged = set(self._damage.steps)
        start = self.begin(launcher)
        come = wait(moment, start, rng)
        if not come and start.alive:
            start.kill()
            outcome.violations.append(Violation("hung", f"it did not come to '{moment}' within {PATIENCE_S:g} s"))
            return outcome
        outcome.phase = f"{start.done()} steps" if start.resumed_after() is not None else "start-up"
        blow = kind.strike(start, rng) if come else None
        if blow is None and come and start.alive:  # its ranks are not there yet
            start.kill()
            return None
        if blow is None:
            return self._over(start, outcome, newest, damaged)
        self._await_end(start, blow, outcome, launcher)
        broken = outcome.violations
        broken += checks.wrong_resume(start, newest, damaged)
        self._check(start, blow, kind, outcome, faults)
        if kind.damages and not outcome.violations:
            outcome.phase += f", {self._damage.inflict(kind.damages, self.run_dir, rng)}"
        self._count_lost(start, outcome)
        self.finished = start.process.returncode == 0 and "finished:" in start.said
        return outcome

    def finish(self, launcher: str) -> Outcome | None:
        """The last start, which nobody disturbs; None when all is as it ought to be."""
        outcome = Outcome("none", "to the end", launcher, self.layout.name, self.work)
        newest, damaged = self._newest(outcome), set(self._damage.steps)
        start = self.begin(launcher)
        start.wait_for(lambda: False, within_s=PATIENCE_S)
        if start.alive:
            start.kill()
            outcome.violations.append(Violation("hung", f"it did not end within {PATIENCE_S:g} s"))
            return outcome
        return self._over(start, outcome, newest, damaged)

    def _newest(self, outcome: Outcome) -> int:
        """The newest checkpoint that is whole."""
        whole, broken = self._damage.look(self.run_dir)
        if broken:
            outcome.violations.append(Violation("resumed wrongly", f"checkpoints of the steps {broken} are not whole"))
        return max(whole, default=0)

    def _await_end(self, start: Start, blow: Blow, outcome: Outcome, launcher: str) -> None:
        limit_s = blow.limit_s + (LAUNCHER_S if launcher in ("torchrun", "deepspeed") else 0.0)
        seconds = start.wait_until_gone(limit_s)
        outcome.seconds = limit_s if seconds is None else seconds
        if seconds is None:
            outcome.violations.append(Violation("hung", f"processes were left after {limit_s:g} s"))
        if blow.what:
            outcome.violations.append(Violation("hung", blow.what))
        outcome.code = start.process.returncode

    def _check(self, start: Start, blow: Blow, kind: Kind, outcome: Outcome, faults: int) -> None:
        broken = outcome.violations
        broken += checks.told_wrongly(start, blow, kind, faults)
        if kind.needs_small_disk:
            broken += self._refused_while_full(start)
            free(self.small)
        broken += checks.wrong_journal(start.rows(), self._reference)
        whole, _ = self._damage.look(self.run_dir)
        self._newest(outcome)
        if not kind.needs_small_disk:
            broken += checks.lost_more(start, whole, outcome.code)

    def _refused_while_full(self, before: Start) -> Iterable[Violation]:
        """A run that is started on a full disk says so, and changes nothing."""
        if not is_full(self.small) or before.alive:
            return
        rows = before.rows()
        start = self.begin("warm")
        if start.wait_until_gone(PATIENCE_S) is None:
            yield Violation("hung", "started on a full disk, it did not end")
        code, said = start.process.returncode, start.said
        if code != EXIT_USAGE or "error:" not in said or "Traceback" in said:
            yield Violation("told wrongly", f"started on a full disk, it ended with exit code {code}:\n{said[-600:]}")
        if steps_of(start.rows()) != steps_of(rows)[: len(steps_of(start.rows()))]:
            yield Violation("resumed wrongly", "started on a full disk, it has changed the journal")

    def _count_lost(self, start: Start, outcome: Outcome) -> None:
        """Steps that are to be done again, but for those that an earlier strike has cost already."""
        if start.resumed_after() is not None:
            self._owed = 0
        whole, _ = self._damage.look(self.run_dir)
        owed = len(steps_of(start.rows())) - max(whole, default=0)
        outcome.lost, self._owed = max(0, owed - self._owed), max(0, owed)

    def _over(self, start: Start, outcome: Outcome, newest: int, damaged: Set[int]) -> Outcome | None:
        """Looks at a run that has come to its end by itself."""
        left = start.wait_until_gone(MEETING_S)
        broken = outcome.violations
        if left is None:
            broken.append(Violation("hung", "processes were left after the end"))
        outcome.code, self.finished = start.process.returncode, True
        broken += checks.wrong_resume(start, newest, damaged)
        broken += checks.wrong_journal(start.rows(), self._reference)
        broken += checks.wrong_end(start)
        if found := leftovers(self.run_dir):
            broken.append(Violation("told wrongly", f"left behind: {found}"))
        self._newest(outcome)
        return outcome if broken else None


def reference(work: Path, layout: Layout, tokens: Path, say: Callable[[str], None]) -> Reference:
    """Trains once without being disturbed.

    Raises:
        RuntimeError: even that fails.
    """
    say(f"reference: {layout.name}")
    (work / "tmp").mkdir(parents=True)
    write(config_of(layout, tokens, work / "run"), work / "c.json")
    start = Start(work, work / "run", layout, "warm", 0)
    start.wait_for(lambda: False, within_s=2 * PATIENCE_S)
    code, said = start.process.poll(), start.said
    if code != 0:
        start.kill()
        raise RuntimeError(f"{layout.name}: exit code {code}\n{said[-4000:]}")
    made = Reference.of(start.rows())
    with suppress(OSError):
        shutil.rmtree(work)
    return made
