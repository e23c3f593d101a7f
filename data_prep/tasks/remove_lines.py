"""The pre-pass of line dedup: a map task's texts, read and cleaned, as hashes of their lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.corpus import CorpusConfig
from data_prep.config.dedup import LinesSection
from data_prep.dedup.line_tasks import DroppedLines, write_line_hashes
from data_prep.dedup.lines import line_hashes, remove_lines
from data_prep.sources.units import Unit
from data_prep.task import DirectoryTask, Report
from data_prep.tasks.texts import TextStream


@dataclass(frozen=True)
class HashLinesTask(DirectoryTask):
    """Hashes the lines of map task `index`'s documents into `directory`."""

    index: int
    units: list[Unit]
    config: CorpusConfig
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"lines task {self.index}"

    @property
    def input_bytes(self) -> int:
        """Of its units, as stored."""
        return sum(unit.end - unit.start for unit in self.units)

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        section = lines_of(self.config)
        with TextStream(self.units, self.config, report, directory=None) as stream:
            batches = (batch.texts for batch in stream.batches() if not batch.conversations)
            hashes = (np.concatenate([line_hashes(text, section=section) for text in texts]) for texts in batches)
            return {"lines": write_line_hashes(scratch, hashes)}


class LineRemover:
    """Takes the lines out of a map task's texts that are copies; to be shown all of them, in order."""

    def __init__(self, config: CorpusConfig, tasks: list[Path], *, index: int) -> None:
        """`tasks`: directories of the finished tasks that have found them. `index`: of the map task."""
        self._section = lines_of(config)
        self._dropped = DroppedLines(tasks, run=index)

    def remove(self, text: str) -> tuple[str, str | None]:
        """What is left of a text, and what was taken out, if anything was."""
        dropped = self._dropped.next_document(len(line_hashes(text, section=self._section)))
        if not dropped.any():
            return text, None
        return remove_lines(text, dropped, section=self._section), remove_lines(text, ~dropped, section=self._section)


def lines_of(config: CorpusConfig) -> LinesSection:
    """The section of line dedup, which is on."""
    assert config.dedup is not None
    assert config.dedup.lines is not None
    return config.dedup.lines
