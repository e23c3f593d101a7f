"""Line deduplication: the pre-pass that hashes the lines of cleaned texts, and the removal of repeated lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.config.corpus import CorpusConfig
from data_prep.config.dedup import LinesSection
from data_prep.dedup.line_tasks import DroppedLines, write_line_hashes
from data_prep.dedup.lines import line_hashes, remove_lines
from data_prep.sources.units import Unit
from data_prep.task import DirectoryTask, Marker, Report
from data_prep.tasks.texts import TextStream


@dataclass(frozen=True)
class HashLinesTask(DirectoryTask):
    """Writes the hashes of the lines of map task `index`'s documents to `directory`."""

    index: int
    units: list[Unit]
    config: CorpusConfig
    directory: Path

    @property
    def name(self) -> str:
        """Implements `Task.name`."""
        return f"lines task {self.index}"

    @property
    def input_bytes(self) -> int:
        """Stored (compressed) size of the task's units."""
        return sum(unit.end - unit.start for unit in self.units)

    def _work(self, scratch: Path, report: Report) -> Marker:
        section = lines_section(self.config)
        with TextStream(self.units, self.config, report, directory=None) as stream:
            batches = (batch.texts for batch in stream.batches() if not batch.conversations)
            hashes = (np.concatenate([line_hashes(text, section=section) for text in texts]) for texts in batches)
            lines = write_line_hashes(scratch, hashes)
            return {"lines": lines, "files": stream.files}


class LineRemover:
    """Removes repeated lines from a map task's texts. Must be called for all of its texts, in order."""

    def __init__(self, config: CorpusConfig, tasks: list[Path], *, index: int) -> None:
        """Opens the results in `tasks`, directories of finished `RepeatedLinesTask`s, for map task number `index`."""
        self._section = lines_section(config)
        self._dropped = DroppedLines(tasks, run=index)

    def remove(self, text: str) -> tuple[str, str | None]:
        """Returns the remaining text, and the removed lines or None."""
        dropped = self._dropped.next_document(len(line_hashes(text, section=self._section)))
        if not dropped.any():
            return text, None
        return remove_lines(text, dropped, section=self._section), remove_lines(text, ~dropped, section=self._section)


def lines_section(config: CorpusConfig) -> LinesSection:
    """The config section of line deduplication, which must be enabled."""
    assert config.dedup is not None
    assert config.dedup.lines is not None
    return config.dedup.lines
