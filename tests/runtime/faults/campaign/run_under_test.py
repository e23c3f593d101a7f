"""A training run from its first start to its last step, with faults injected on the way, and the checks of each."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from foundation.errors import EXIT_USAGE
from pipeline.runtime.faults.report import read_faults
from tests.runtime.faults.campaign import checks
from tests.runtime.faults.campaign.checkpoints import Damage, leftovers
from tests.runtime.faults.campaign.checks import Reference, Violation
from tests.runtime.faults.campaign.injections import LAUNCHER_S, FaultKind, Injection, free, is_full
from tests.runtime.faults.campaign.layouts import RENDEZVOUS_S, Layout, config_of, write
from tests.runtime.faults.campaign.moments import PATIENCE_S, WEIGHTS, wait
from tests.runtime.faults.campaign.start import Start, kill_all, steps_of

SMALL_DISK = "16m"
"""Room for six checkpoints."""


@dataclass
class Outcome:
    """Outcome of an injected fault; `lost` steps were done and have to be repeated."""

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


class RunUnderTest:
    """A run's directory, which is created, and the starts in it; on a `small_disk` it can be filled."""

    def __init__(self, work: Path, layout: Layout, tokens: Path, reference: Reference, *, small_disk: bool) -> None:
        self.work, self.layout, self.small_disk = work, layout, small_disk
        self._reference, self._damage = reference, Damage()
        self._starts, self._to_repeat, self.finished = 0, 0, False
        self.small = work / "disk"
        for folder in (work / "tmp", self.small):
            folder.mkdir(parents=True)
        if small_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(self.small)]
            subprocess.run(mount, check=True)
        self.run_dir = self.small / "run"
        write(config_of(layout, tokens, self.run_dir), work / "c.json")

    def close(self, *, keep: bool) -> None:
        """Kills remaining processes and removes the directory, unless it is kept for inspection."""
        kill_all(self.work)
        if self.small_disk:
            free(self.small)
            if keep:
                shutil.copytree(self.run_dir, self.work / "kept", symlinks=True, dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(self.small)], check=True)
        if not keep:
            shutil.rmtree(self.work, ignore_errors=True)

    def begin(self, launcher: str) -> Start:
        self._starts += 1
        return Start(self.work, self.run_dir, self.layout, launcher, self._starts)

    def inject(self, kind: FaultKind, launcher: str, rng: random.Random) -> Outcome | None:
        """One start with a fault; None when it exited before."""
        moment = kind.moment or rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        outcome = Outcome(kind.name, moment, launcher, self.layout.name, self.work)
        newest, faults = self._newest(outcome), len(read_faults(self.run_dir))
        damaged = set(self._damage.steps)
        start = self.begin(launcher)
        reached = wait(moment, start, rng)
        if not reached and start.alive:
            start.kill()
            outcome.violations.append(Violation("hung", f"it did not reach '{moment}' within {PATIENCE_S:g} s"))
            return outcome
        outcome.phase = f"{start.done()} steps" if start.resumed_after() is not None else "start-up"
        injection = kind.inject(start, rng) if reached else None
        if injection is None and reached and start.alive:  # its ranks have not started yet
            start.kill()
            return None
        if injection is None:
            return self._check_end(start, outcome, newest, damaged)
        self._await_end(start, injection, outcome, launcher)
        broken = outcome.violations
        broken += checks.wrong_resume(start, newest, damaged)
        self._check(start, injection, kind, outcome, faults)
        if kind.damages and not outcome.violations:
            outcome.phase += f", {self._damage.inflict(kind.damages, self.run_dir, rng)}"
        self._count_lost(start, outcome)
        self.finished = start.process.returncode == 0 and "finished:" in start.output
        return outcome

    def finish(self, launcher: str) -> Outcome | None:
        """The last, undisturbed start; None when all checks pass."""
        outcome = Outcome("none", "to the end", launcher, self.layout.name, self.work)
        newest, damaged = self._newest(outcome), set(self._damage.steps)
        start = self.begin(launcher)
        start.wait_for(lambda: False, within_s=PATIENCE_S)
        if start.alive:
            start.kill()
            outcome.violations.append(Violation("hung", f"it did not exit within {PATIENCE_S:g} s"))
            return outcome
        return self._check_end(start, outcome, newest, damaged)

    def _newest(self, outcome: Outcome) -> int:
        intact, broken = self._damage.inspect(self.run_dir)
        if broken:
            outcome.violations.append(Violation("resumed wrongly", f"checkpoints of the steps {broken} are damaged"))
        return max(intact, default=0)

    def _await_end(self, start: Start, injection: Injection, outcome: Outcome, launcher: str) -> None:
        limit_s = injection.limit_s + (LAUNCHER_S if launcher in ("torchrun", "deepspeed") else 0.0)
        seconds = start.wait_until_gone(limit_s)
        outcome.seconds = limit_s if seconds is None else seconds
        if seconds is None:
            outcome.violations.append(Violation("hung", f"processes were left after {limit_s:g} s"))
        if injection.what:
            outcome.violations.append(Violation("hung", injection.what))
        outcome.code = start.process.returncode

    def _check(self, start: Start, injection: Injection, kind: FaultKind, outcome: Outcome, faults: int) -> None:
        broken = outcome.violations
        broken += checks.wrong_report(start, injection, kind, faults)
        if kind.needs_small_disk:
            broken += self._refused_while_full(start)
            free(self.small)
        broken += checks.wrong_journal(start.rows(), self._reference)
        intact, _ = self._damage.inspect(self.run_dir)
        self._newest(outcome)
        if not kind.needs_small_disk:
            broken += checks.lost_more(start, intact, outcome.code)

    def _refused_while_full(self, before: Start) -> Iterable[Violation]:
        """A run that is started on a full disk fails with an error, and changes nothing."""
        if not is_full(self.small) or before.alive:
            return
        rows = before.rows()
        start = self.begin("warm")
        if start.wait_until_gone(PATIENCE_S) is None:
            yield Violation("hung", "started on a full disk, it did not exit")
        code, output = start.process.returncode, start.output
        if code != EXIT_USAGE or "error:" not in output or "Traceback" in output:
            yield Violation(
                "reported wrongly", f"started on a full disk, it ended with exit code {code}:\n{output[-600:]}"
            )
        if steps_of(start.rows()) != steps_of(rows)[: len(steps_of(start.rows()))]:
            yield Violation("resumed wrongly", "started on a full disk, it has changed the journal")

    def _count_lost(self, start: Start, outcome: Outcome) -> None:
        """Counts the steps that have to be repeated, except those lost by an earlier fault already."""
        if start.resumed_after() is not None:
            self._to_repeat = 0
        intact, _ = self._damage.inspect(self.run_dir)
        to_repeat = len(steps_of(start.rows())) - max(intact, default=0)
        outcome.lost, self._to_repeat = max(0, to_repeat - self._to_repeat), max(0, to_repeat)

    def _check_end(self, start: Start, outcome: Outcome, newest: int, damaged: Set[int]) -> Outcome | None:
        left = start.wait_until_gone(RENDEZVOUS_S)
        broken = outcome.violations
        if left is None:
            broken.append(Violation("hung", "processes were left after the end"))
        outcome.code, self.finished = start.process.returncode, True
        broken += checks.wrong_resume(start, newest, damaged)
        broken += checks.wrong_journal(start.rows(), self._reference)
        broken += checks.wrong_end(start)
        if found := leftovers(self.run_dir):
            broken.append(Violation("reported wrongly", f"left behind: {found}"))
        self._newest(outcome)
        return outcome if broken else None


def reference(work: Path, layout: Layout, tokens: Path, log: Callable[[str], None]) -> Reference:
    """Trains once undisturbed."""
    log(f"reference: {layout.name}")
    (work / "tmp").mkdir(parents=True)
    write(config_of(layout, tokens, work / "run"), work / "c.json")
    start = Start(work, work / "run", layout, "warm", 0)
    start.wait_for(lambda: False, within_s=2 * PATIENCE_S)
    code, output = start.process.poll(), start.output
    if code != 0:
        start.kill()
        raise RuntimeError(f"{layout.name}: exit code {code}\n{output[-4000:]}")
    made = Reference.of(start.rows())
    with suppress(OSError):
        shutil.rmtree(work)
    return made
