"""Signals that ask a run to stop: it finishes its step, saves itself and leaves with an exit code that says so.

| signal | sent by | exit code |
|---|---|---|
| SIGTERM | Slurm at a preemption or `scancel`, Kubernetes, torchrun | 75 |
| SIGUSR1 | Slurm, `--signal=B:USR1@180`, before the time limit | 75 |
| SIGINT | Ctrl-C | 130 |

75 (`EXIT_REQUEUE`) asks whoever started the run to start it again. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from enum import IntEnum
from types import FrameType
from typing import Any

from headrace.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from pipeline.launch import Rendezvous
from pipeline.launch.arrivals import STOPPED

_LEFT = "left"
_PATIENCE_S = 10.0
_SETTLE_S = 1.0


class Stop(IntEnum):
    """Why a run stops before its end; of several ranks' reasons the highest counts."""

    NO = 0
    INTERRUPT = 1
    WARNING = 2
    TERMINATE = 3

    @property
    def exit_code(self) -> int:
        """What the process leaves with."""
        return {Stop.NO: 0, Stop.INTERRUPT: EXIT_INTERRUPTED}.get(self, EXIT_REQUEUE)

    def __str__(self) -> str:
        return {1: "SIGINT", 2: "SIGUSR1", 3: "SIGTERM"}.get(int(self), "no signal")


_SIGNALS = {signal.SIGUSR1: Stop.WARNING, signal.SIGTERM: Stop.TERMINATE, signal.SIGINT: Stop.INTERRUPT}


class StopSignals:
    """Notes the signals instead of dying of them, from `with` to the end of the block. In the main thread.

    Ctrl-C ends the process as ever until `take_interrupts`: while a run starts up there is nothing to save.

    Args:
        tells: whether this process says so when it is asked.

    Attributes:
        asked: what this process was asked.
    """

    def __init__(self, *, tells: bool) -> None:
        self.asked = Stop.NO
        self._tells = tells
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        """Takes the signals over that schedulers send; without effect in other threads than the main one."""
        self._take(signal.SIGUSR1, signal.SIGTERM)
        return self

    def take_interrupts(self) -> None:
        """Takes Ctrl-C over, too."""
        self._take(signal.SIGINT)

    def _take(self, *numbers: signal.Signals) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before |= {number: signal.signal(number, self._note) for number in numbers}

    def __exit__(self, *_: object) -> None:
        """Gives them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self.asked is Stop.INTERRUPT
        if again:
            signal.default_int_handler(number, frame)
        self.asked = max(self.asked, _SIGNALS[signal.Signals(number)])
        if self._tells:
            hint = "; Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            with suppress(OSError):  # print would raise here, where the main thread has just begun to print
                os.write(2, f"{self.asked}: the step is finished and saved first{hint}\n".encode())


def leave_in_order(code: int, meeting: Rendezvous | None, *, launcher: str) -> int:
    """The exit code of this rank, when all stop together: rank 0 has `code` and goes last, the others have 0.

    To be called while the process group is open: the notes lie in its store. srun and deepspeed kill whoever is left
    after the first exit code that is not 0, and then report the kill. Of torchrun's ranks all have `code`: for an agent
    whose ranks have all left with 0 the run is over, and other agents would go on without it.
    """
    if meeting is None or meeting.world_size == 1 or code == 0:
        return code
    if meeting.rank > 0:
        meeting.note(f"{_LEFT}/{meeting.rank}")
        return code if launcher == "torchrun" else 0
    meeting.note(STOPPED)
    deadline = time.monotonic() + _PATIENCE_S
    while meeting.missing(_LEFT, range(1, meeting.world_size)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(_SETTLE_S)  # from their note to their end
    return code
