"""The data mixtures of a run's stages, and where in its sources each stage begins: a pure function of the config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.data import DataSection
from pipeline.data.mixing_weights import Extent
from pipeline.data.mixture import DataMixture, open_mixture
from pipeline.data.sample_order import OrderStart

_Windows = tuple[str, str | None, int, int, str]
"""Path, name and occurrence of a source, sequence length and packing: where all are equal, window numbers mean the same
text."""


class _SourcePositions:
    """How far earlier stages have drawn from each source, and the keys of the shuffles."""

    def __init__(self) -> None:
        self._reached: dict[_Windows, tuple[int, int]] = {}
        self._keys = 0

    def start(self, data: DataSection, *, first: int, afresh: bool) -> OrderStart:
        """Returns where a stage begins: known sources go on unless it begins `afresh`; the others get new keys."""
        found = []
        for windows in _windows(data):
            known = None if afresh else self._reached.get(windows)
            found.append(known or (self._keys, 0))
            self._keys += known is None
        return OrderStart(first, tuple(key for key, _ in found), tuple(drawn for _, drawn in found))

    def end(self, data: DataSection, start: OrderStart, seen: Sequence[int]) -> None:
        """Records the samples drawn from each source at the end of a stage."""
        for windows, key, drawn in zip(_windows(data), start.keys, seen, strict=True):
            self._reached[windows] = key, drawn


def open_mixtures(run: ResolvedRun, *, stat_files: bool = True) -> list[DataMixture]:
    """Opens the training samples of every stage of a run; of the run itself if it has no stages.

    Args:
        run: the resolved config.
        stat_files: whether to compare the sizes of the files with the manifests now.

    Raises:
        ConfigError, DataError: `open_mixture` refuses the data of a stage; the error names the stage.
    """
    positions, opened = _SourcePositions(), []
    for stage in run.stages or (run,):
        data, extent = stage.config.data, Extent.of(stage)
        section = None if stage.place is None else stage.place.stage.section
        afresh = section is not None and section.continue_sources is False
        start = positions.start(data, first=stage.accounts.samples(stage.first_step - 1), afresh=afresh)
        with stage.naming():
            mixture = open_mixture(data, seed=stage.config.run.seed, extent=extent, start=start, stat_files=stat_files)
        positions.end(data, start, mixture.order.samples_seen(extent.samples).tolist())
        opened.append(mixture)
    return opened


def _windows(data: DataSection) -> list[_Windows]:
    """Returns the identity of each source's windows, in the config's order."""
    count: Counter[tuple[str, str | None]] = Counter()
    found: list[_Windows] = []
    for source in data.sources:
        named = source.path, source.source
        found.append((*named, count[named], data.sequence_length, data.packing))
        count[named] += 1
    return found
