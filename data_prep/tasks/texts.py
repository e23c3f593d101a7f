"""The texts of a task's units: read, checked against the limits, cleaned, in batches, in the order of the input.

Two tasks go over the same texts, one that hashes their lines and one that tokenises them: they see the same ones in the
same order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from data_prep.config import CorpusConfig, Source
from data_prep.limits import BadCount
from data_prep.plan import Unit
from data_prep.readers.records import Bad, Batch
from data_prep.readers.unit import digest_of, read_unit, wanted_of
from data_prep.runs import Array
from data_prep.tasks.base import Counts, Report
from data_prep.tasks.cleaning import Cleaner

BAD_RECORDS = "bad.jsonl"
_ENOUGH_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch of documents.

    Attributes:
        texts: the texts; of conversations, their lines of JSON.
        at: int64 [n], the place of each in its file.
        unit: int64 [n], the number of its unit in the task.
        conversations: whether they are conversations, which are all of one unit and have not been cleaned.
    """

    texts: list[str]
    at: Array
    unit: Array
    conversations: bool = False


@dataclass
class _Pending:
    """Texts that have been read and wait for enough company; of several units where those are small."""

    texts: list[str] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    fields: list[Mapping[str, Any]] = field(default_factory=list)
    units: list[tuple[int, int]] = field(default_factory=list)
    """(number of the unit, how many texts)."""
    characters: int = 0

    def add(self, batch: Batch, unit: int) -> None:
        self.texts += batch.texts
        self.at += batch.at
        self.fields += batch.fields
        self.units.append((unit, len(batch.texts)))
        self.characters += batch.characters


class TextStream:
    """Reads the units of a task.

    Args:
        directory: where what is left out is listed; None lists nothing.

    Attributes:
        skipped: records left out, by reason.
        files: [source, file, bytes, part, parts, XXH3-128] of each unit that has been read.
        cleaner: what cleaning has done.
    """

    def __init__(self, units: Sequence[Unit], config: CorpusConfig, report: Report, *, directory: Path | None) -> None:
        self._units, self._config, self._report = units, config, report
        labels = [source.label for source in config.sources]
        self._source_of = [labels.index(unit.source) for unit in units]
        self.skipped: Counter[str] = Counter()
        self.files: list[list[Any]] = []
        self.cleaner = Cleaner(config, directory)
        self._bad = BadCount(config)
        self._bad_file: TextIO | None = None
        if directory is not None:
            self._bad_file = (directory / BAD_RECORDS).open("w", encoding="ascii")
        self._told = 0

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.cleaner.close()
        if self._bad_file is not None:
            self._bad_file.close()

    def source_of(self, unit: int) -> Source:
        """The source of a unit."""
        return self._config.sources[self._source_of[unit]]

    def batches(self) -> Iterator[Texts]:
        """All texts that are kept."""
        pending = _Pending()
        for number, unit in enumerate(self._units):
            digest = digest_of(unit)
            conversations = self.source_of(number).messages_field is not None
            for record in read_unit(unit, wanted_of(self.source_of(number), self.cleaner.fields), digest):
                if isinstance(record, Bad):
                    self.leave_out(record)
                elif conversations:
                    yield Texts(record.texts, np.array(record.at, np.int64), np.full(len(record.at), number), True)
                else:
                    pending.add(record, number)
                if pending.characters >= _ENOUGH_CHARACTERS:
                    yield from self._cleaned(pending)
                    pending = _Pending()
                self._report_input(digest.passed)
            self.files.append([unit.source, unit.file, unit.file_bytes, unit.part, unit.parts, digest.finish()])
            self._report_input(unit.end - unit.start)
            self._told = 0
        yield from self._cleaned(pending)

    def leave_out(self, bad: Bad) -> None:
        """Lists an unreadable record and counts it.

        Raises:
            DataError: these are more than the config allows.
        """
        if self._bad_file is not None:
            self._bad_file.write(json.dumps(bad.listing()) + "\n")
        self.skipped[bad.reason] += 1
        self._bad.add(bad)
        self._bad.check()

    def _cleaned(self, pending: _Pending) -> Iterator[Texts]:
        if not pending.texts:
            return
        at, unit = np.array(pending.at, np.int64), np.repeat(*np.array(pending.units, np.int64).T)
        before = Counter(self.cleaner.dropped)

        def place(i: int) -> tuple[str, str, int]:
            return self._units[unit[i]].source, self._units[unit[i]].file, int(at[i])

        cleaned = self.cleaner.clean(pending.texts, pending.fields, place)
        if cleaned is None:
            yield Texts(pending.texts, at, unit)
            return
        texts, kept = cleaned
        self._report(Counts(dropped=self.cleaner.dropped - before))
        if texts:
            yield Texts(texts, at[kept], unit[kept])

    def _report_input(self, passed: int) -> None:
        """Reports what has been read of a unit since the last time."""
        if passed > self._told:
            self._report(Counts(input_bytes=passed - self._told))
            self._told = passed
