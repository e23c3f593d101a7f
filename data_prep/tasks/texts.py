"""Reads the texts of a task's units: checked against the bad-record limits, cleaned, in batches, in input order.

Both the task that hashes lines and the map task use it: they see the same texts in the same order.
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

from data_prep.config.corpus import CorpusConfig, Source
from data_prep.hashing import U64, document_keys, id_keys, unit_key
from data_prep.sources.bad_records import BadRecordCount
from data_prep.sources.read_unit import read_unit, unit_digest, wanted_fields
from data_prep.sources.records import BATCH_CHARACTERS, BadRecord, TextBatch, WantedFields
from data_prep.sources.units import Unit
from data_prep.task import Counts, Report
from data_prep.tasks.cleaning import Cleaner
from data_prep.tasks.sorted_runs import Array

BAD_RECORDS = "bad.jsonl"


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """A batch of documents.

    Attributes:
        texts: the texts; for conversations, their JSON lines.
        at: int64 [n], position of each document in its file.
        key: uint64 [n], hash for the document's sort key within its source.
        unit: int64 [n], number of the document's unit in the task.
        conversations: whether the texts are conversations, which come from a single unit and are not cleaned.
    """

    texts: list[str]
    at: Array
    key: U64
    unit: Array
    conversations: bool = False

    def take(self, texts: list[str], which: Sequence[int]) -> DocumentBatch:
        """Selects documents by index and replaces their texts."""
        return DocumentBatch(texts, self.at[which], self.key[which], self.unit[which], self.conversations)


@dataclass
class _Pending:
    """Texts collected until a batch is full, from several units if the units are small."""

    texts: list[str] = field(default_factory=list)
    at: list[Array] = field(default_factory=list)
    keys: list[U64] = field(default_factory=list)
    fields: list[Mapping[str, Any]] = field(default_factory=list)
    """Other fields of each text, empty for a source without such fields; no entries if no source has any."""
    units: list[tuple[int, int]] = field(default_factory=list)
    """(number of the unit, number of texts)."""
    characters: int = 0

    def add(self, batch: TextBatch, keys: U64, unit: int) -> None:
        if batch.fields:  # neighbouring batches may come from sources without such fields
            self.fields += [{}] * (len(self.texts) - len(self.fields))
        self.texts += batch.texts
        self.fields += batch.fields or [{}] * (len(batch.texts) if self.fields else 0)
        self.at.append(np.array(batch.at, np.int64))
        self.keys.append(keys)
        self.units.append((unit, len(batch.texts)))
        self.characters += batch.characters


class TextStream:
    """Reads the units of a task.

    Args:
        directory: directory for the lists of skipped records and dropped texts; None writes no lists.

    Attributes:
        skipped: reason -> number of skipped records.
        files: [source, file, bytes, part, parts, XXH3-128] of each unit that has been read.
        cleaner: the cleaning chain, with its counts.
    """

    def __init__(self, units: Sequence[Unit], config: CorpusConfig, report: Report, *, directory: Path | None) -> None:
        self._units, self._config, self._report = units, config, report
        labels = [source.label for source in config.sources]
        self._source_of = [labels.index(unit.source) for unit in units]
        self._unit_keys = [unit_key(unit.source, unit.file, seed=config.seed) for unit in units]
        self.skipped: Counter[str] = Counter()
        self.files: list[list[Any]] = []
        self.cleaner = Cleaner(config, directory)
        self._bad = BadRecordCount(config)
        self._bad_file: TextIO | None = None
        if directory is not None:
            self._bad_file = (directory / BAD_RECORDS).open("w", encoding="ascii")
        self._reported_bytes = 0

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.cleaner.close()
        if self._bad_file is not None:
            self._bad_file.close()

    def source_of(self, unit: int) -> Source:
        """The source of a unit."""
        return self._config.sources[self._source_of[unit]]

    def batches(self) -> Iterator[DocumentBatch]:
        """Yields all kept texts."""
        pending = _Pending()
        for number, unit in enumerate(self._units):
            digest = unit_digest(unit)
            conversations = self.source_of(number).messages_field is not None
            for record in read_unit(unit, self._wanted(number), digest):
                if isinstance(record, BadRecord):
                    self.skip_record(record)
                elif conversations:
                    at, unit_of = np.array(record.at, np.int64), np.full(len(record.at), number)
                    yield DocumentBatch(record.texts, at, self._keys(record, number), unit_of, conversations=True)
                else:
                    pending.add(record, self._keys(record, number), number)
                if pending.characters >= BATCH_CHARACTERS:
                    yield from self._cleaned(pending)
                    pending = _Pending()
                self._report_input(digest.hashed_bytes)
            self.files.append([unit.source, unit.file, unit.file_bytes, unit.part, unit.parts, digest.finish()])
            self._report_input(unit.end - unit.start)
            self._reported_bytes = 0
        yield from self._cleaned(pending)

    def _wanted(self, number: int) -> WantedFields:
        limit = self._config.max_record_bytes
        return wanted_fields(self.source_of(number), self.cleaner.fields, max_bytes=limit)

    def skip_record(self, bad: BadRecord) -> None:
        """Lists an unreadable record and counts it.

        Raises:
            DataError: there are more unreadable records than the config allows.
        """
        if self._bad_file is not None:
            self._bad_file.write(json.dumps(bad.listing()) + "\n")
        self.skipped[bad.reason] += 1
        self._bad.add(bad)
        self._bad.check()

    def _cleaned(self, pending: _Pending) -> Iterator[DocumentBatch]:
        if not pending.texts:
            return
        unit = np.repeat(*np.array(pending.units, np.int64).T)
        batch = DocumentBatch(pending.texts, np.concatenate(pending.at), np.concatenate(pending.keys), unit)
        before = Counter(self.cleaner.dropped)

        def location(i: int) -> tuple[str, str, int]:
            return self._units[unit[i]].source, self._units[unit[i]].file, int(batch.at[i])

        cleaned = self.cleaner.clean(pending.texts, pending.fields, location)
        if cleaned is None:
            yield batch
            return
        texts, kept = cleaned
        self._report(Counts(dropped=self.cleaner.dropped - before))
        if texts:
            yield batch.take(texts, kept)

    def _keys(self, batch: TextBatch, unit: int) -> U64:
        """Keys of the documents of a batch: from ids if the source has an `id_field`, else from file positions."""
        source = self.source_of(unit)
        if source.id_field is not None:
            ids = [fields[source.id_field] for fields in batch.fields]
            return id_keys(source.label, ids, seed=self._config.seed)
        at = np.array(batch.at, np.int64)
        return document_keys(np.full(len(at), self._unit_keys[unit], np.uint64), at)

    def _report_input(self, passed: int) -> None:
        """Reports the bytes of a unit that have been read since the last report."""
        if passed > self._reported_bytes:
            self._report(Counts(input_bytes=passed - self._reported_bytes))
            self._reported_bytes = passed
