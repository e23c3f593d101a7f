"""Random moments for faults, which together cover every phase of a run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.runtime.faults.campaign.checkpoints import being_written, finished, is_intact
from tests.runtime.faults.campaign.layouts import EVALUATE_EVERY, SAVE_EVERY, STEPS
from tests.runtime.faults.campaign.start import POLL_S, Start

PATIENCE_S = 240.0
"""Timeout for a run to reach a moment; one that does not is hung."""
START_UP_S = 9.0
"""About number long imports, rendezvous, loading and the first step take."""
WARM_START_UP_S = 3.0
"""Without the imports."""
WEIGHTS = {
    "start-up": 3,
    "training": 4,
    "writing": 4,
    "after a step": 1,
    "beside a checkpoint": 2,
    "evaluating": 1,
    "finishing": 1,
}


def wait(moment: str, start: Start, rng: random.Random) -> bool:
    """Waits for a moment; False when the run exits before it."""
    return _MOMENTS[moment](start, rng)


def _pause(start: Start, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while start.alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return start.alive


def _trains(start: Start) -> bool:
    return start.wait_for(lambda: start.done() > 0, within_s=PATIENCE_S)


def _start_up(start: Start, rng: random.Random) -> bool:
    return _pause(start, rng.uniform(0.0, WARM_START_UP_S if start.launcher == "warm" else START_UP_S))


def _training(start: Start, rng: random.Random) -> bool:
    return _trains(start) and _pause(start, rng.uniform(0.0, 4.0))


def _writing(start: Start, rng: random.Random) -> bool:
    """Between the first file of a checkpoint and its commit; sometimes while older ones are deleted."""
    if not (_trains(start) and _pause(start, rng.uniform(0.0, 2.0))):
        return False
    begun = start.wait_for(lambda: being_written(start.run_dir), within_s=PATIENCE_S)
    return begun and _pause(start, rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.3)]))


def _after(multiple_of: int, up_to_s: float) -> Callable[[Start, random.Random], bool]:
    def moment(start: Start, rng: random.Random) -> bool:
        if not (_trains(start) and _pause(start, rng.uniform(0.0, 2.0))):
            return False
        last = start.done()
        reached = start.wait_for(lambda: start.done() > last and start.done() % multiple_of == 0, within_s=PATIENCE_S)
        return reached and _pause(start, rng.uniform(0.0, up_to_s))

    return moment


def _finishing(start: Start, rng: random.Random) -> bool:
    reached = start.wait_for(lambda: start.done() == STEPS, within_s=PATIENCE_S)
    return reached and _pause(start, rng.uniform(0.0, 0.6))


def _two_checkpoints(start: Start, rng: random.Random) -> bool:
    """Two intact checkpoints, so that one can be damaged."""

    def enough() -> bool:
        return start.done() > 0 and sum(map(is_intact, finished(start.run_dir).values())) > 1

    return start.wait_for(enough, within_s=PATIENCE_S) and _pause(start, rng.uniform(0.0, 2.0))


_MOMENTS: dict[str, Callable[[Start, random.Random], bool]] = {
    "start-up": _start_up,
    "training": _training,
    "writing": _writing,
    "after a step": _after(1, 0.0),
    "beside a checkpoint": _after(SAVE_EVERY, 0.15),
    "evaluating": _after(EVALUATE_EVERY, 0.1),
    "finishing": _finishing,
    "with two checkpoints": _two_checkpoints,
}
