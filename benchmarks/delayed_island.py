"""`headrace` with a sleep before every batch of an island: a device that is slower by so much.

    python -m benchmarks.delayed_island SECONDS train --config FILE --set islands.name=NAME ...

Run by `benchmarks.uneven_islands`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from headrace.commands.app import main
from pipeline.data.micro_batch import StepBatch
from pipeline.run.groups.islands.local import LocalIsland


def delay_batches(seconds: float) -> None:
    """Makes all islands of this process sleep before every batch."""
    batches = LocalIsland.batches

    def delayed(self: LocalIsland) -> Iterator[StepBatch]:
        for batch in batches(self):
            time.sleep(seconds)
            yield batch

    LocalIsland.batches = delayed  # type: ignore[method-assign]


if __name__ == "__main__":
    delay_batches(float(sys.argv[1]))
    sys.argv[1:2] = []
    main()
