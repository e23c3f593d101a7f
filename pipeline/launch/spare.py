"""Processes that a layout has no place for: they wait, and go when the run is over.

They do not leave at once. A task of srun that ends early may end the others (`srun --wait`), and a torchrun agent whose
workers have all ended is lost to the run: when another node fails it does not join the next round, though its spare
processes are what the run then needs. So that a stop or a restart need not wait for them, they leave when asked to.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config.schema import LaunchSection
from pipeline.launch.environment import Launch
from pipeline.launch.group import OVER, ask, open_store

_POLL_S = 0.5
_ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def stand_by(launch: Launch, *, processes: int, config: LaunchSection) -> None:
    """Waits until the ranks that train have finished, have gone, or this process is asked to stop.

    Args:
        launch: of this process, whose rank has no place.
        processes: ranks that train.
        config: how long to wait for rank 0.

    Raises:
        TrainingError: rank 0 never came.
    """
    with _asked_to_stop() as asked:
        store = open_store(launch, config.timeout)
        place = f"the layout takes {processes} of {launch.world_size} processes"
        print(f"rank {launch.rank} is spare: {place}", file=sys.stderr, flush=True)
        # a store that is gone went with rank 0
        while not asked and not ask(lambda: store.check([OVER]), otherwise=True):
            time.sleep(_POLL_S)


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that is empty until a signal asks this process to stop."""
    asked: list[int] = []
    before = {which: signal.signal(which, lambda number, _frame: asked.append(number)) for which in _ASKED}
    try:
        yield asked
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
