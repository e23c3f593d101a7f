"""Tokens: opening 20,000 shards, the order of samples, and what a rank reads of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foundation.section import parse
from pipeline.config.batch import BatchSizes
from pipeline.config.sections.data import DataSection
from pipeline.data.loader import StepLoader
from pipeline.data.mixture import DataMixture, open_mixture
from pipeline.data.sample_order import SampleOrder
from tests.data.sparse import write_sparse
from tests.scale.measuring import Figures, Part, measured

SHARDS = (2500, 5000, 10_000, 20_000)
_LENGTH = 4096
_TOKENS = 500_000_000
"""Of a shard: 10^13 in 20,000 of them."""


def opened(paths: list[Path], *, stat_files: bool = True, **fields: object) -> DataMixture:
    """A mixture of tokens directories."""
    sources = [{"path": str(path), "weight": 1.0} for path in paths]
    return open_mixture(
        parse(DataSection, {"sources": sources, "sequence_length": _LENGTH, **fields}), seed=5, stat_files=stat_files
    )


def written(shards: int, work: Path, *, sources: int = 50) -> list[Path]:
    """Tokens directories of so many shards together, 50,000 documents each: 10^9 in 20,000."""
    return [
        write_sparse(work / f"source-{number:02}", shards=shards // sources, tokens=_TOKENS, documents=50_000)
        for number in range(sources)
    ]


def opening(shards: int, work: Path) -> Figures:
    """Rank 0 opens the mixture and compares the sizes of all files."""
    paths = written(shards, work)
    with measured() as figures:
        opened(paths)
    return figures


def opening_elsewhere(shards: int, work: Path) -> Figures:
    """Every other rank opens it by the manifests."""
    paths = written(shards, work)
    with measured() as figures:
        opened(paths, stat_files=False)
    return figures


def order(sources: int, work: Path) -> Figures:
    """The samples of 100 steps of 4,096 are located in a mixture of 10^13 tokens."""
    del work
    windows = [int(1e13) // _LENGTH // sources] * sources
    made = SampleOrder(windows, weights=[1.0 + number for number in range(sources)], seed=3)
    with measured() as figures:
        for step in range(100):
            made.locate(np.arange(4096, dtype=np.int64) + (2_000_000 + step) * 4096)
    return figures


def _steps(samples: int, work: Path, *, masked: bool) -> Figures:
    """A rank's part of 32 steps, per step: it has one sample of each, whatever the global batch is."""
    mixture, steps = opened(written(4000, work, sources=1), stat_files=False), 32
    batch = BatchSizes(samples=samples, micro=1, accumulation=1, dp=samples, sequence_length=_LENGTH)
    about = {"dp_rank": 3, "steps": (1, steps), "mask_documents": masked}
    loader = StepLoader(mixture, batch, **about, target_sum=lambda own: lambda: own)
    with measured() as figures:
        assert len(list(loader)) == steps
    return figures.times(1 / steps)


def plain_step(samples: int, work: Path) -> Figures:
    """Without a document mask."""
    return _steps(samples, work, masked=False)


def masked_step(samples: int, work: Path) -> Figures:
    """With a document mask."""
    return _steps(samples, work, masked=True)


PARTS = [
    Part(
        "tokens: opening, rank 0",
        "a mixture of 50 sources is opened, and the sizes of all files are compared.",
        "shards",
        SHARDS,
        20_000,
        opening,
    ),
    Part(
        "tokens: opening, others",
        "the mixture is opened by its manifests alone.",
        "shards",
        SHARDS,
        20_000,
        opening_elsewhere,
    ),
    Part(
        "tokens: order",
        "the samples of 100 steps of 4,096 are located in a mixture of 10^13 tokens.",
        "sources",
        (10, 25, 50, 100),
        50,
        order,
    ),
    Part(
        "tokens: a step",
        "a rank reads its one sample of a global batch, from 4,000 shards.",
        "samples",
        (512, 1024, 2048, 4096),
        4096,
        plain_step,
    ),
    Part(
        "tokens: a step with document masks",
        "the same; the targets of the whole global batch are added up over the ranks (not measured here).",
        "samples",
        (512, 1024, 2048, 4096),
        4096,
        masked_step,
    ),
]
