"""The datasets of a run, opened and checked against each other, read in the order of law 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from pipeline.config.schema import DataSection
from pipeline.data.dataset import TokenDataset, tokenizer_details
from pipeline.data.documents import Borders, join
from pipeline.data.order import SampleOrder


class Blend:
    """The training samples of a run: global sample number -> T + 1 tokens.

    Args:
        sources: opened datasets, in the config's order.
        weights: share of each.
        seed: the run's seed.
    """

    def __init__(self, sources: Sequence[TokenDataset], *, weights: Sequence[float], seed: int) -> None:
        self.sources = list(sources)
        self.weights = list(weights)
        self.order = SampleOrder([s.windows for s in sources], weights=weights, seed=seed)
        self.sequence_length = sources[0].sequence_length

    def read(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Gathers samples.

        Args:
            samples: int64 [n], global sample numbers from 0.

        Returns:
            int64 [n, T + 1].
        """
        place = self.order.place(samples)
        rows = np.empty((place.source.size, self.sequence_length + 1), dtype=np.int64)
        for number in np.unique(place.source):
            mine = place.source == number
            rows[mine] = self.sources[number].read(place.window[mine])
        return rows

    def borders(self, samples: npt.ArrayLike) -> Borders:
        """Where documents begin within samples; see `TokenDataset.borders`. No token is read."""
        place = self.order.place(samples)
        parts = []
        for number in np.unique(place.source):
            mine = np.flatnonzero(place.source == number)
            parts.append((mine, self.sources[number].borders(place.window[mine])))
        return join(parts)

    @property
    def parents(self) -> dict[str, Any]:
        """Path and fingerprint of every source, for manifests and for the check on resume."""
        return {
            f"data.sources.{i}": {"path": str(s.path), "fingerprint": s.manifest.fingerprint}
            for i, s in enumerate(self.sources)
        }

    @property
    def tokens(self) -> int:
        """Tokens in the training splits of all sources."""
        return sum(s.tokens for s in self.sources)


def open_blend(section: DataSection, *, seed: int) -> Blend:
    """Opens every source's train split.

    Raises:
        DataError: a source is missing, damaged or too short.
        ConfigError: two sources were made with different tokenizers.
    """
    sources = open_sources(section, split="train")
    return Blend(sources, weights=[s.weight for s in section.sources], seed=seed)


def open_sources(section: DataSection, *, split: str) -> list[TokenDataset]:
    """Opens one split of every source; see `open_blend` for what it raises."""
    opened = [TokenDataset.open(s.path, split=split, sequence_length=section.sequence_length) for s in section.sources]
    prints = [tokenizer_details(dataset.manifest)["fingerprint"] for dataset in opened]
    for number, fingerprint in enumerate(prints):
        if fingerprint != prints[0]:
            why = f"its tokenizer is not that of {section.sources[0].path}: the same id would mean different text"
            remedy = 'make it with "tokenizer": {"path": ".../tokenizer"} of the first'
            raise ConfigError(f"data.sources.{number}.path", section.sources[number].path, why=why, remedy=remedy)
    return opened
