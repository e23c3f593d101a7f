"""A rank is killed, stopped, or runs an operator that does not end: it is named, all processes end, the run goes on.

A trial begins where the one before was interrupted, from its newest checkpoint, so that each restart is seen.

`-m headrace.doctor.checks.trainings_lost_ranks FOLDER ARGUMENTS` is pipeline/train.py whose ranks can be made to hang.
Every rank writes its process id into the folder. After SIGURG the next layer of its model calls an operator that does
not end: on a GPU kernels that only wait, on a CPU a call of C without Python's lock. SIGWINCH: a call that holds it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from foundation.cli import guarded, leave
from foundation.errors import TrainingError
from foundation.processes import state_of
from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import SmallRun, judged, last_line, small_run, start
from pipeline import train
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.metrics.journal import NAME, read_rows

WATCHDOG, OUT_S = {"heartbeat_timeout": 8.0, "hang_timeout": 15.0}, 60.0
"""The watchdog's timeouts in this check, and seconds within which all processes have to end."""
_FAULTS = {
    "killed (SIGKILL)": signal.SIGKILL,
    "stopped (SIGSTOP)": signal.SIGSTOP,
    "in an operator that does not end": signal.SIGURG,
    "in a call that holds Python's lock": signal.SIGWINCH,
}
_MEANING = "after such a fault, all GPUs would wait for NCCL's timeout of half an hour, or for a person"
_REMEDY = "see the check's log; keep section watchdog of the config on, and its timeouts below launch's"


def run(context: Context) -> Iterable[Finding]:
    """Runs the check; the last fault only with `--all`.

    Raises:
        TrainingError: a training has ended by itself, or does not begin.
    """
    small = small_run(context, steps=10)
    if small.ranks == 1:
        yield Finding(None, "The layout has one rank, which no other rank waits for.")
        return
    trial = _Trial(small, context.work / "lost", time.monotonic() + 0.9 * context.limit_s)
    for name, fault in _FAULTS.items():
        if fault != signal.SIGWINCH or context.all_layouts:
            yield trial.strike(name, fault)
    trial.begin()
    trial.kill()
    yield Finding(True, f"After the last fault the run went on, with step {trial.step()}.")


@dataclass
class _Trial:
    """The run that is struck, and the end of the time for it."""

    small: SmallRun
    folder: Path
    deadline: float

    def begin(self) -> Callable[[], bool]:
        """Starts the run, or starts it again, until it has done two steps; returns whether its launcher has ended."""
        done = self.step()
        config = self.small.config(self.folder, steps=1_000_000, checkpoint_every=2) | {"watchdog": WATCHDOG}
        config["scheduler"] = None
        script = ("-m", "headrace.doctor.checks.trainings_lost_ranks", str(self.folder))
        launcher = start(config, self.folder, ranks=self.small.ranks, script=script)
        self._wait(lambda: self.step() >= done + 2 or launcher.poll() is not None)
        if self.step() < done + 2:
            raise TrainingError(f"a training did not go on after step {done}: {last_line(self.folder)}")
        return lambda: launcher.poll() is not None

    def strike(self, name: str, fault: signal.Signals) -> Finding:
        """Puts a fault into the last rank; returns what came of it."""
        ended = self.begin()
        rank, known, step = self.small.ranks - 1, len(read_faults(self.folder / "run")), self.step()
        os.kill(self._pids()[rank], fault)
        began = time.monotonic()
        gone = self._wait(lambda: ended() and not self._alive(), OUT_S)
        seconds = time.monotonic() - began
        named = {each["rank"] for row in read_faults(self.folder / "run")[known:] for each in row["ranks"]}
        self.kill()
        left = f"all processes ended within {seconds:.0f} s" if gone else f"processes were left after {OUT_S:.0f} s"
        text = f"Rank {rank}, {name} after step {step}: named were ranks {sorted(named)}, and {left}."
        figures = {"seconds_until_all_ended": round(seconds, 1)}
        return judged(gone and named == {rank}, text, _MEANING, _REMEDY, figures, f"rank {rank}")

    def kill(self) -> None:
        """Kills all processes of the run."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait(lambda: not self._alive(), 10.0)

    def step(self) -> int:
        """The last step in the journal; 0 where there is none."""
        run = self.folder / "run"
        return max((row["step"] for row in read_rows(run, kind="step")), default=0) if (run / NAME).exists() else 0

    def _pids(self) -> list[int]:
        return [int((self.folder / f"rank-{rank}.pid").read_text()) for rank in range(self.small.ranks)]

    def _alive(self) -> bool:
        return any(state_of(pid)[0] not in ("", "Z") for pid in self._pids())

    def _wait(self, condition: Callable[[], bool], within_s: float = 1e9) -> bool:
        """Waits until a condition holds; returns whether it does in time."""
        until = min(self.deadline, time.monotonic() + within_s)
        while not (holds := condition()) and time.monotonic() < until:
            time.sleep(0.1)
        return holds


def _on_signal(number: int, _frame: object) -> None:
    # in an operator, as a wrong kernel would: not inside a collective, where this process may be just now
    register_module_forward_pre_hook(lambda module, _: None if [*module.children()] else _hang(number))


def _hang(number: int) -> None:
    if number == signal.SIGURG and torch.cuda.is_available():
        for _ in range(1000):
            torch.cuda._sleep(10**11)  # a minute each
        return
    while True:
        (ctypes.CDLL if number == signal.SIGURG else ctypes.PyDLL)(None).sleep(1_000_000)


def main() -> int:
    """Trains."""
    folder = Path(sys.argv.pop(1))
    if "RANK" in os.environ:
        for number in (signal.SIGURG, signal.SIGWINCH):
            signal.signal(number, _on_signal)
        (folder / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    return train.main()


if __name__ == "__main__":
    leave(guarded(main))
