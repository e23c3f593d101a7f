"""A rank is killed, stopped, or runs an operator that does not end: it is named, all processes end, the run goes on.

A trial begins where the one before was interrupted, from its newest checkpoint, so that each restart is seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import TrainingError
from foundation.processes import state_of
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.small_runs import SmallRun, TrainingProcess, small_run, start
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.metrics.journal import NAME, read_rows

HEARTBEAT_S, HANG_S, OUT_S = 8.0, 15.0, 60.0
"""The watchdog's timeouts in this check, and seconds within which all processes have to end."""
_FAULTS = {
    "killed (SIGKILL)": signal.SIGKILL,
    "stopped (SIGSTOP)": signal.SIGSTOP,
    "in an operator that does not end": signal.SIGURG,
    "in a call that holds Python's lock": signal.SIGWINCH,
}
_SCRIPT = "headrace.doctor.checks.endless_operator"
_MEANING = "after such a fault, all GPUs would wait for NCCL's timeout of half an hour, or for a person"
_REMEDY = "see the check's log; keep section watchdog of the config on, and its timeouts below launch's"


def run(context: Context) -> Iterable[Finding]:
    """Runs the check; the last fault only with `--all`.

    Raises:
        TrainingError: a training has ended by itself, or does not begin.
    """
    small = small_run(context, steps=10)
    if small.shrunk.topology.world_size == 1:
        yield Finding(None, "The layout has one rank, which no other rank waits for.")
        return
    trials = [_Trial(small, context.work / "lost", deadline=time.monotonic() + 0.9 * context.limit_s)]
    for number, (name, fault) in enumerate(_FAULTS.items()):
        if number < len(_FAULTS) - 1 or context.all_layouts:
            yield trials[0].strike(name, fault)
    step = trials[0].begin()[1]
    trials[0].kill()
    yield Finding(True, f"After the last fault the run went on, with step {step}.", figures={"step": step})


@dataclass
class _Trial:
    """The run that is struck, and the end of the time for it."""

    small: SmallRun
    folder: Path
    deadline: float

    def begin(self) -> tuple[TrainingProcess, int]:
        """Starts the run, or starts it again; returns it once it has done two steps, and its last step."""
        done, ranks = self._step(), self.small.shrunk.topology.world_size
        config = self.small.config(self.folder, steps=1_000_000, checkpoint_every=2)
        watchdog = {"heartbeat_timeout": HEARTBEAT_S, "hang_timeout": HANG_S}
        config |= {"watchdog": watchdog, "scheduler": None}
        training = start(config, self.folder, processes=ranks, script=("-m", _SCRIPT, str(self.folder)))
        self._wait(lambda: self._step() >= done + 2 or training.process.poll() is not None)
        if self._step() < done + 2:
            raise TrainingError(f"a training did not go on after step {done}: {training.last_line()}")
        return training, self._step()

    def strike(self, name: str, fault: signal.Signals) -> Finding:
        """Puts a fault into the last rank; returns what came of it."""
        training, step = self.begin()
        rank, known, pids = self.small.shrunk.topology.world_size - 1, len(self._faults()), self._pids()
        os.kill(pids[rank], fault)
        began = time.monotonic()
        gone = self._wait(lambda: training.process.poll() is not None and not any(map(_alive, pids)), OUT_S)
        seconds = time.monotonic() - began
        named = {each["rank"] for fault in self._faults()[known:] for each in fault["ranks"]}
        self.kill()
        text, figures = f"Rank {rank}, {name} after step {step}:", {"seconds_until_all_ended": round(seconds, 1)}
        if named == {rank} and gone:
            return Finding(
                True, f"{text} it was named, and all processes ended within {seconds:.0f} s.", figures=figures
            )
        shown = f"ranks {sorted(named)} were named" if named else "no rank was named"
        left = "all processes ended" if gone else f"processes were left after {OUT_S:.0f} s"
        return Finding(False, f"{text} {shown}, and {left}.", _MEANING, _REMEDY, figures, where=f"rank {rank}")

    def kill(self) -> None:
        """Kills all processes of the run."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait(lambda: not any(map(_alive, self._pids())), 10.0)

    def _pids(self) -> list[int]:
        ranks = range(self.small.shrunk.topology.world_size)
        return [int((self.folder / f"rank-{rank}.pid").read_text()) for rank in ranks]

    def _step(self) -> int:
        if not (self.folder / "run" / NAME).exists():
            return 0
        return max((row["step"] for row in read_rows(self.folder / "run", kind="step")), default=0)

    def _faults(self) -> list[dict[str, Any]]:
        return [dict(row) for row in read_faults(self.folder / "run")]

    def _wait(self, condition: Callable[[], bool], within_s: float = 1e9) -> bool:
        """Waits until a condition holds; returns whether it does in time."""
        until = min(self.deadline, time.monotonic() + within_s)
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True


def _alive(pid: int) -> bool:
    return state_of(pid)[0] not in ("", "Z")
