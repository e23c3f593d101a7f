"""The map task: reads, cleans and tokenizes the units of one task and writes sorted runs.

The directory of a finished task has `run-000/` and so on (see `sorted_runs.py`), `bad.jsonl` (unreadable records),
`dropped.jsonl` (texts dropped by cleaning, if the config asks for it), and `done.json` with the counts and the XXH3-128
of each unit's part of its file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean.chain import Dropped
from data_prep.config.corpus import CorpusConfig
from data_prep.config.dedup import NearSection
from data_prep.dedup.document_tasks import SEEN_RANKS
from data_prep.dedup.minhash_task import open_minhasher
from data_prep.formats.tokenfile import SPLITS
from data_prep.hashing import HELDOUT, U64, content_hashes, mix, select_fraction, utf8_size
from data_prep.sources.conversation import ConversationError
from data_prep.sources.line_numbers import record_position
from data_prep.sources.records import BadRecord
from data_prep.sources.units import Unit
from data_prep.task import Counts, DirectoryTask, Marker, Report
from data_prep.tasks.remove_lines import LineRemover
from data_prep.tasks.sorted_runs import Array, DocumentMetadata, RunWriter
from data_prep.tasks.texts import DocumentBatch, TextStream
from data_prep.tokenizer.encoder import Encoder, open_encoder
from data_prep.tokenizer.engines import Tokens
from data_prep.tokenizer.long_words import longest_word


@dataclass(frozen=True)
class MapTask(DirectoryTask):
    """Map task `index` of a job.

    Args:
        tokenizer: folder of the tokenizer.
        directory: directory of the result.
        lines: directories of the finished tasks that found repeated lines; empty without line deduplication.
    """

    index: int
    units: list[Unit]
    config: CorpusConfig
    tokenizer: Path
    directory: Path
    lines: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Implements `Task.name`."""
        return f"map task {self.index}"

    @property
    def input_bytes(self) -> int:
        """Stored (compressed) size of the task's units."""
        return sum(unit.end - unit.start for unit in self.units)

    def _work(self, scratch: Path, report: Report) -> Marker:
        with TextStream(self.units, self.config, report, directory=scratch) as stream:
            return _Mapper(self, scratch, stream, report).run()


class _Mapper:
    """Runs one map task."""

    def __init__(self, task: MapTask, scratch: Path, stream: TextStream, report: Report) -> None:
        self._task, self._config, self._stream, self._report = task, task.config, stream, report
        self._encoder: Encoder = open_encoder(task.tokenizer, task.config.text_policy())
        frame = self._encoder.prefix_ids, self._encoder.suffix_ids
        self._runs = RunWriter(scratch, self._encoder.dtype, *frame, masked=task.config.has_conversations)
        self._minhasher = open_minhasher(task.tokenizer.parent) if _near(task.config) is not None else None
        self._lines = LineRemover(task.config, task.lines, index=task.index) if task.lines else None
        self._counts = np.zeros((len(task.config.sources), len(SPLITS), 3), np.int64)
        self._documents, self._batches = 0, 0
        self._sample: list[str] = []
        self._long_words: list[tuple[int, int, int]] = []
        self._unprinted: Counter[str] = Counter()
        labels = [source.label for source in task.config.sources]
        self._has_id = np.array([stream.source_of(i).id_field is not None for i in range(len(task.units))])
        self._seen = np.array([stream.source_of(i).seen for i in range(len(task.units))], np.bool_)
        self._source = np.array([labels.index(unit.source) for unit in task.units], np.int64)

    def run(self) -> Marker:
        for batch in self._stream.batches():
            if batch.conversations:
                self._map_conversations(batch)
            else:
                self._map_texts(batch)
        self._encoder.check(self._sample, where=self._task.name)
        self._runs.flush()
        cleaner = self._stream.cleaner
        return {
            "runs": self._runs.runs,
            "counts": self._counts.tolist(),
            "skipped": dict(sorted(self._stream.skipped.items())),
            "dropped": dict(sorted(cleaner.dropped.items())),
            "dropped_bytes": dict(sorted(cleaner.dropped_bytes.items())),
            "dropped_by_source": {name: dict(sorted(of.items())) for name, of in sorted(cleaner.by_source.items())},
            "dropped_examples": {name: dict(sorted(of.items())) for name, of in sorted(cleaner.examples.items())},
            "edited": dict(sorted(cleaner.edits.items())),
            "files": self._stream.files,
            "long_words": self._named_long_words(),
            "unprinted": dict(sorted(self._unprinted.items())),
        }

    def _map_conversations(self, batch: DocumentBatch) -> None:
        """Renders and tokenizes conversations; unusable ones count as unreadable records."""
        from data_prep.chat.encoder import EncodedConversation, open_chat_encoder  # noqa: PLC0415 - brings jinja2 along

        number = int(batch.unit[0])
        everything = self._stream.source_of(number).learn == "everything"
        special, date = self._config.parse_special_tokens, self._config.tokenizer.date
        encoder = open_chat_encoder(self._task.tokenizer, parse_special_tokens=special, date=date)
        found: list[EncodedConversation] = []
        kept: list[int] = []
        ends: list[bool] = []
        for i, (line, position) in enumerate(zip(batch.texts, batch.at.tolist(), strict=True)):
            try:
                framed = encoder.encode(line, everything=everything)
                found.append(framed.without(self._encoder.prefix_ids, self._encoder.suffix_ids))
                ends.append(found[-1].end_learnt)
                kept.append(i)
                self._unprinted.update({} if self._seen[number] else framed.unprinted)
            except ConversationError as error:
                unit = self._task.units[number]
                where = record_position(unit, position)
                self._stream.skip_record(BadRecord(unit.source, unit.file, *where, "not a conversation", str(error)))
        if not found:
            return
        offsets = np.cumsum([0, *(len(conversation.ids) for conversation in found)])
        tokens = Tokens(np.concatenate([conversation.ids for conversation in found]), offsets)
        texts = batch.take([conversation.text for conversation in found], kept)
        mask = np.concatenate([conversation.mask for conversation in found])
        self._add(tokens, self._metadata(texts), mask=mask, end_learnt=np.array(ends))

    def _map_texts(self, batch: DocumentBatch) -> None:
        if self._lines is not None:
            batch = self._without_lines(self._lines, batch)
            if not batch.texts:
                return
        tokens = self._encoder.encode(batch.texts)
        self._keep_sample(batch.texts)
        metadata = self._metadata(batch)
        empty = np.diff(tokens.offsets) == 0
        if empty.any():  # empty texts, also after normalization
            self._stream.skipped["empty"] += int(empty.sum())
            tokens = Tokens(tokens.ids, tokens.offsets[np.append(True, ~empty)])
            metadata = metadata.take(~empty)
        self._add(tokens, metadata)

    def _without_lines(self, lines: LineRemover, batch: DocumentBatch) -> DocumentBatch:
        """Removes repeated lines from a batch, and texts that have no other lines."""
        cleaner, before = self._stream.cleaner, Counter(self._stream.cleaner.dropped)
        texts: list[str] = []
        kept: list[int] = []
        for i, text in enumerate(batch.texts):
            remaining, removed = lines.remove(text)
            if removed is not None:
                unit = self._task.units[batch.unit[i]]
                location = unit.source, unit.file, int(batch.at[i])
                if not remaining.strip():
                    cleaner.drop(Dropped("lines", "nothing but copies"), text, location)
                    continue
                cleaner.edit(Dropped("lines", "copies"), removed, location)
            texts.append(remaining)
            kept.append(i)
        self._report(Counts(dropped=cleaner.dropped - before))
        return batch.take(texts, kept)

    def _add(
        self, tokens: Tokens, metadata: DocumentMetadata, *, mask: Array | None = None, end_learnt: Array | None = None
    ) -> None:
        if len(metadata.key):
            if self._minhasher is not None:
                bands, signatures = self._minhasher.hashes(tokens, section=_near(self._config))
                metadata = replace(metadata, bands=bands, signatures=signatures)
            self._runs.add(tokens, metadata, mask=mask, end_learnt=end_learnt)
        lengths = np.diff(tokens.offsets) + self._encoder.added_ids
        sums = (np.ones_like(lengths), lengths, metadata.bytes)
        for column, values in enumerate(sums):
            np.add.at(self._counts[:, :, column], (metadata.source, metadata.split), values)
        self._report(Counts(text_bytes=int(metadata.bytes.sum()), documents=len(lengths), tokens=int(lengths.sum())))

    def _keep_sample(self, texts: list[str]) -> None:
        """Keeps the beginnings of some texts, on which to compare the engine with the reference tokenizer."""
        if self._batches % _SAMPLE_EVERY == 0 and len(self._sample) < _SAMPLES:
            self._sample.append(texts[len(texts) // 2][:_SAMPLE_CHARACTERS])
        self._batches += 1

    def _metadata(self, batch: DocumentBatch) -> DocumentMetadata:
        long_words = ((longest_word(text), i) for i, text in enumerate(batch.texts))
        self._long_words += [(length, int(batch.unit[i]), int(batch.at[i])) for length, i in long_words if length]
        hashes = content_hashes(batch.texts)
        heldout = select_fraction(
            hashes[:, 0], fraction=self._config.heldout_fraction, seed=self._config.seed, purpose=HELDOUT
        )
        first = self._task.index * _MAX_DOCUMENTS + self._documents
        self._documents += len(batch.texts)
        dedup = self._config.dedup
        return DocumentMetadata(
            key=self._keys(batch, hashes),
            rank=np.arange(first, first + len(batch.texts)) - np.where(self._seen[batch.unit], SEEN_RANKS, 0),
            bytes=np.fromiter(map(utf8_size, batch.texts), np.int64, len(batch.texts)),
            source=self._source[batch.unit],
            split=np.where(heldout, SPLITS.index("heldout"), SPLITS.index("train")),
            at=batch.at,
            unit=batch.unit,
            hashes=hashes if dedup is not None and dedup.exact else None,
        )

    def _named_long_words(self) -> list[list[Any]]:
        """Documents with the longest words: [characters, source, file, "line", "row" or "record", number] each."""
        longest = sorted(self._long_words, key=lambda found: (-found[0], found[1:]))[:NAMED_DOCUMENTS]
        named: list[list[Any]] = []
        for length, number, at in sorted(longest, key=lambda found: found[1:]):  # line counting needs their order
            unit = self._task.units[number]
            named.append([length, unit.source, unit.file, *record_position(unit, at)])
        return named

    def _keys(self, batch: DocumentBatch, hashes: U64) -> U64:
        """Keys that are evenly distributed: ids need not be unique, and are mixed with the text's hash."""
        has_id = self._has_id[batch.unit]
        return np.where(has_id, mix(batch.key ^ hashes[:, 0]), batch.key) if has_id.any() else batch.key


NAMED_DOCUMENTS = 20
"""Number of documents with the longest words that a task, a manifest and the statistics name."""
_SAMPLE_EVERY, _SAMPLES, _SAMPLE_CHARACTERS = 4, 8, 2048
_MAX_DOCUMENTS = 1 << 36  # of one task


def _near(config: CorpusConfig) -> NearSection | None:
    return config.dedup.near if config.dedup is not None else None


def sum_counts(markers: list[Marker]) -> np.ndarray[Any, Any]:
    """Sums documents, tokens and bytes over the markers of all map tasks: int64 [sources, splits, 3]."""
    counts: np.ndarray[Any, Any] = np.array([marker["counts"] for marker in markers], np.int64)
    return np.asarray(counts.sum(axis=0))
