"""Map: one task's units, read, cleaned, tokenised and written as runs.

`MAP/` of a finished task holds `run-000/` and on (see `runs.py`), `bad.jsonl` (what was not readable), `dropped.jsonl`
(what cleaning left out, if asked for) and `done.json`: the counts, and the XXH3-128 of each unit's share of its file.
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
from data_prep.dedup.signatures import open_minhasher
from data_prep.formats.tokenfile import SPLITS
from data_prep.hashing import HELDOUT, U64, content_hashes, mix, select_fraction, utf8_size
from data_prep.sources.conversation import ConversationError
from data_prep.sources.records import BadRecord
from data_prep.sources.units import Unit
from data_prep.task import Counts, DirectoryTask, Report
from data_prep.tasks.remove_lines import LineRemover
from data_prep.tasks.sorted_runs import Array, Facts, RunWriter
from data_prep.tasks.texts import Texts, TextStream
from data_prep.tokenizer.encoder import Encoder, open_encoder
from data_prep.tokenizer.engines import Tokens


@dataclass(frozen=True)
class MapTask(DirectoryTask):
    """Task `index` of a job: these units, with this config, to `directory`, by the tokenizer in `tokenizer`.

    Args:
        lines: directories of the tasks that have found lines to drop; empty without line dedup.
    """

    index: int
    units: list[Unit]
    config: CorpusConfig
    tokenizer: Path
    directory: Path
    lines: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"map task {self.index}"

    @property
    def input_bytes(self) -> int:
        """Of its units, as stored."""
        return sum(unit.end - unit.start for unit in self.units)

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with TextStream(self.units, self.config, report, directory=scratch) as stream:
            return _Mapper(self, scratch, stream, report).run()


class _Mapper:
    """The work of one task."""

    def __init__(self, task: MapTask, scratch: Path, stream: TextStream, report: Report) -> None:
        self._task, self._config, self._stream, self._report = task, task.config, stream, report
        self._encoder: Encoder = open_encoder(task.tokenizer, task.config.text_policy())
        frame = self._encoder.before, self._encoder.after
        self._runs = RunWriter(scratch, self._encoder.dtype, *frame, masked=task.config.has_conversations)
        self._signer = open_minhasher(task.tokenizer.parent) if _near(task.config) is not None else None
        self._lines = LineRemover(task.config, task.lines, index=task.index) if task.lines else None
        self._counts = np.zeros((len(task.config.sources), len(SPLITS), 3), np.int64)
        self._documents, self._batches = 0, 0
        self._sample: list[str] = []
        labels = [source.label for source in task.config.sources]
        self._named = np.array([stream.source_of(i).id_field is not None for i in range(len(task.units))])
        self._source = np.array([labels.index(unit.source) for unit in task.units], np.int64)

    def run(self) -> dict[str, Any]:
        for batch in self._stream.batches():
            if batch.conversations:
                self._take_conversations(batch)
            else:
                self._take_texts(batch)
        self._encoder.check(self._sample, where=self._task.name)
        self._runs.flush()
        cleaner = self._stream.cleaner
        return {
            "runs": self._runs.runs,
            "counts": self._counts.tolist(),
            "skipped": dict(sorted(self._stream.skipped.items())),
            "dropped": dict(sorted(cleaner.dropped.items())),
            "edited": dict(sorted(cleaner.edits.items())),
            "files": self._stream.files,
        }

    def _take_conversations(self, batch: Texts) -> None:
        """Renders and tokenises conversations; what cannot be trained on counts as unreadable."""
        from data_prep.chat.encoder import Conversation, open_chat_encoder  # noqa: PLC0415 - brings jinja2 along
        from data_prep.sources.line_numbers import place_of  # noqa: PLC0415

        number = int(batch.unit[0])
        everything = self._stream.source_of(number).learn == "everything"
        encoder = open_chat_encoder(self._task.tokenizer, special=self._config.parse_special_tokens)
        found: list[Conversation] = []
        kept: list[int] = []
        for i, (line, place) in enumerate(zip(batch.texts, batch.at.tolist(), strict=True)):
            try:
                found.append(encoder.encode(line, everything=everything))
                kept.append(i)
            except ConversationError as error:
                unit = self._task.units[number]
                where = place_of(unit, place)
                self._stream.leave_out(BadRecord(unit.source, unit.file, *where, "not a conversation", str(error)))
        if not found:
            return
        offsets = np.cumsum([0, *(len(conversation.ids) for conversation in found)])
        tokens = Tokens(np.concatenate([conversation.ids for conversation in found]), offsets)
        texts = batch.take([conversation.text for conversation in found], kept)
        self._add(tokens, self._facts(texts), mask=np.concatenate([conversation.mask for conversation in found]))

    def _take_texts(self, batch: Texts) -> None:
        if self._lines is not None:
            batch = self._without_lines(self._lines, batch)
            if not batch.texts:
                return
        tokens = self._encoder.encode(batch.texts)
        self._keep_sample(batch.texts)
        facts = self._facts(batch)
        empty = np.diff(tokens.offsets) == 0
        if empty.any():  # empty texts, and those of which a normaliser leaves nothing
            self._stream.skipped["empty"] += int(empty.sum())
            tokens = Tokens(tokens.ids, tokens.offsets[np.append(True, ~empty)])
            facts = facts.take(~empty)
        self._add(tokens, facts)

    def _without_lines(self, lines: LineRemover, batch: Texts) -> Texts:
        """A batch without the lines that are copies, and without the texts of which nothing is left."""
        cleaner, before = self._stream.cleaner, Counter(self._stream.cleaner.dropped)
        left: list[str] = []
        kept: list[int] = []
        for i, text in enumerate(batch.texts):
            rest, removed = lines.remove(text)
            if removed is not None:
                unit = self._task.units[batch.unit[i]]
                place = unit.source, unit.file, int(batch.at[i])
                if not rest.strip():
                    cleaner.drop(Dropped("lines", "nothing but copies"), text, place)
                    continue
                cleaner.edit(Dropped("lines", "copies"), removed, place)
            left.append(rest)
            kept.append(i)
        self._report(Counts(dropped=cleaner.dropped - before))
        return batch.take(left, kept)

    def _add(self, tokens: Tokens, facts: Facts, *, mask: Array | None = None) -> None:
        if len(facts.key):
            if self._signer is not None:
                facts = replace(facts, bands=self._signer.bands(tokens, section=_near(self._config)))
            self._runs.add(tokens, facts, mask=mask)
        lengths = np.diff(tokens.offsets) + self._encoder.frame
        sums = (np.ones_like(lengths), lengths, facts.bytes)
        for column, values in enumerate(sums):
            np.add.at(self._counts[:, :, column], (facts.source, facts.split), values)
        self._report(Counts(text_bytes=int(facts.bytes.sum()), documents=len(lengths), tokens=int(lengths.sum())))

    def _keep_sample(self, texts: list[str]) -> None:
        """Keeps the beginning of a text now and then, for the comparison with the reference."""
        if self._batches % _SAMPLE_EVERY == 0 and len(self._sample) < _SAMPLES:
            self._sample.append(texts[len(texts) // 2][:_SAMPLE_CHARACTERS])
        self._batches += 1

    def _facts(self, batch: Texts) -> Facts:
        hashes = content_hashes(batch.texts)
        heldout = select_fraction(
            hashes[:, 0], fraction=self._config.heldout_fraction, seed=self._config.seed, purpose=HELDOUT
        )
        first = self._task.index * _MOST_DOCUMENTS + self._documents
        self._documents += len(batch.texts)
        dedup = self._config.dedup
        return Facts(
            key=self._keys(batch, hashes),
            rank=np.arange(first, first + len(batch.texts)),
            bytes=np.fromiter(map(utf8_size, batch.texts), np.int64, len(batch.texts)),
            source=self._source[batch.unit],
            split=np.where(heldout, SPLITS.index("heldout"), SPLITS.index("train")),
            at=batch.at,
            unit=batch.unit,
            hashes=hashes if dedup is not None and dedup.exact else None,
        )

    def _keys(self, batch: Texts, hashes: U64) -> U64:
        """Keys that are evenly spread: ids need not differ from one another, so the texts enter, too."""
        named = self._named[batch.unit]
        return np.where(named, mix(batch.key ^ hashes[:, 0]), batch.key) if named.any() else batch.key


_SAMPLE_EVERY, _SAMPLES, _SAMPLE_CHARACTERS = 4, 8, 2048
_MOST_DOCUMENTS = 1 << 36  # of one task


def _near(config: CorpusConfig) -> NearSection | None:
    return config.dedup.near if config.dedup is not None else None


def counts_of(markers: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """int64 [sources, splits, 3]: documents, tokens and bytes that the map tasks have written."""
    counts: np.ndarray[Any, Any] = np.array([marker["counts"] for marker in markers], np.int64)
    return np.asarray(counts.sum(axis=0))
