"""Graceful stop on signals: the run finishes its step, saves a checkpoint and exits with a code that tells why.

| signal | sent by | exit code |
|---|---|---|
| SIGTERM | Slurm at a preemption or `scancel`, Kubernetes, torchrun | 75 |
| SIGUSR1 | Slurm, `--signal=B:USR1@180`, before the time limit | 75 |
| SIGINT | Ctrl-C | 130 |

75 (`EXIT_REQUEUE`) asks the launcher or scheduler to start the run again. A second Ctrl-C ends it at once.
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

from foundation.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from pipeline.runtime.launch import Rendezvous
from pipeline.runtime.launch.rendezvous import RUN_STOPPED

_READY_TO_EXIT = "ready-to-exit"
_WAIT_S = 10.0
_EXIT_S = 1.0


class Stop(IntEnum):
    """Reason why a run stops before its end; if ranks have different reasons, the highest counts."""

    NO = 0
    INTERRUPT = 1
    WARNING = 2
    TERMINATE = 3

    @property
    def exit_code(self) -> int:
        """Exit code of the process."""
        return {Stop.NO: 0, Stop.INTERRUPT: EXIT_INTERRUPTED}.get(self, EXIT_REQUEUE)

    def __str__(self) -> str:
        return {1: "SIGINT", 2: "SIGUSR1", 3: "SIGTERM"}.get(int(self), "no signal")


_SIGNALS = {signal.SIGUSR1: Stop.WARNING, signal.SIGTERM: Stop.TERMINATE, signal.SIGINT: Stop.INTERRUPT}


class StopSignals:
    """Records stop signals within a `with` block of the main thread, so that they do not end the process.

    Ctrl-C ends the process as usual until `handle_interrupts`: while a run starts up there is nothing to save.

    Args:
        announce: print a line when a signal arrives.

    Attributes:
        requested: the stop that was requested of this process.
    """

    def __init__(self, *, announce: bool) -> None:
        self.requested = Stop.NO
        self._announce = announce
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        """Installs handlers for the signals that schedulers send; without effect outside the main thread."""
        self._install(signal.SIGUSR1, signal.SIGTERM)
        return self

    def handle_interrupts(self) -> None:
        """Handles Ctrl-C (SIGINT) as well from here on."""
        self._install(signal.SIGINT)

    def _install(self, *numbers: signal.Signals) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers |= {number: signal.signal(number, self._handle) for number in numbers}

    def __exit__(self, *_: object) -> None:
        """Restores the previous handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested is Stop.INTERRUPT:
            signal.default_int_handler(number, frame)
        self.requested = max(self.requested, _SIGNALS[signal.Signals(number)])
        if self._announce:
            hint = "; Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            with suppress(OSError):  # print would raise if the signal interrupts a print of the main thread
                os.write(2, f"{self.requested}: the step is finished and saved first{hint}\n".encode())


def coordinate_exit(code: int, rendezvous: Rendezvous | None, *, launcher: str) -> int:
    """Returns this rank's exit code when all stop together: rank 0 exits last and with `code`, the others with 0.

    Call it while the process group is open: its store carries the flags. srun and deepspeed kill the remaining ranks
    after the first exit code that is not 0, and then report the kill. Under torchrun all ranks exit with `code`: an
    agent whose ranks have all exited with 0 takes the run for finished, and the other agents would go on without it. In
    pods all ranks exit with `code`, too: a pod that ends with 0 is not started again.
    """
    if rendezvous is None or rendezvous.world_size == 1 or code == 0:
        return code
    if rendezvous.rank > 0:
        rendezvous.mark(_READY_TO_EXIT)
        return code if launcher in ("torchrun", "pods") else 0
    rendezvous.set_flag(RUN_STOPPED)
    deadline = time.monotonic() + _WAIT_S
    others = range(1, rendezvous.world_size)
    while rendezvous.ranks_without(_READY_TO_EXIT, others) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(_EXIT_S)  # time for the other ranks to exit after setting their flag
    return code
