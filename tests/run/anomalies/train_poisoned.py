"""train.py with an objective that multiplies the loss of one sample. POISON=FACTOR:SAMPLE, FACTOR may be nan.

The sample is bad whenever it is seen: on any rank, in any step, any number of times.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from foundation.cli import guarded, leave
from pipeline.data.stage_mixtures import open_mixtures
from pipeline.engines.objective import CrossEntropy, Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.run.session import train
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.arguments import parse_arguments, resolve_run


class BadSample(CrossEntropy):
    """Cross-entropy, times a factor where a batch has certain labels [T]."""

    def __init__(self, labels: Tensor, factor: float) -> None:
        super().__init__()
        self._labels, self._factor = labels, factor

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        loss = super().__call__(logits, labels, *extra_targets, vocabulary=vocabulary)
        alike = labels.shape[1] == self._labels.shape[0]  # stages may have other lengths
        bad = alike and (labels == self._labels.to(labels.device)).all(dim=1).any()
        return Loss(loss.total * (self._factor if bad else 1.0), loss.parts)


def main() -> int:
    run = resolve_run(parse_arguments("Train with a bad sample."))
    factor, sample = os.environ["POISON"].split(":")
    stage = run.accounts.stage(run.accounts.step_of_sample(int(sample)))
    row = open_mixtures(run)[stage].read([int(sample)])[0]
    with StopSignals(announce=detect().rank == 0) as signals:
        return train(run, lambda *_rank: BadSample(torch.from_numpy(row[1:].copy()), float(factor)), signals=signals)


if __name__ == "__main__":
    leave(guarded(main))
