"""Trains as pipeline/train.py does, and is disturbed in the middle of a step: after backward passes, before exchange.

python -m tests.run.groups.replicas.disturbed --die 6 | --hold 8 FILE --config FILE --set ...
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from foundation.cli import guarded, leave
from pipeline import train
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.run.groups.replicas.replica import ReplicaOfRun


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--die", type=int, help="killed in this step")
    parser.add_argument("--hold", nargs=2, help="step, and the file it waits for; later ones take 0.1 s, alone 1 s")
    arguments, others = parser.parse_known_args()
    sys.argv[1:] = others
    ordinary = ReplicaOfRun.sum_gradients

    def disturbed(
        self: ReplicaOfRun, step: StepBatch, gradients: Sequence[Tensor], sums: Tensor
    ) -> Sequence[MicroBatch]:
        if step.step == arguments.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments.hold and step.step >= int(arguments.hold[0]):
            time.sleep(1 if self.own_share == 1 else 0.1)  # alone: time for another to join
            while not Path(arguments.hold[1]).exists():
                time.sleep(0.1)
        return ordinary(self, step, gradients, sums)

    ReplicaOfRun.sum_gradients = disturbed  # type: ignore[method-assign]
    return train.main()


if __name__ == "__main__":
    leave(guarded(main))
