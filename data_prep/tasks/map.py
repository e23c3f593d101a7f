"""Map: one task's units, read, cleaned, tokenised and written as runs.

`MAP/` of a finished task holds `run-000/` and on (see `runs.py`), `bad.jsonl` (what was not readable), `dropped.jsonl`
(what cleaning left out, if asked for) and `done.json`: the counts, and the XXH3-128 of each unit's share of its file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.chat.conversation import ConversationError
from data_prep.chat.encoder import Conversation, open_chat_encoder
from data_prep.config import CorpusConfig
from data_prep.hashing import HELDOUT, below, content_hashes, document_keys, unit_key
from data_prep.limits import BadCount
from data_prep.plan import Unit
from data_prep.readers.records import Bad, Batch
from data_prep.readers.unit import digest_of, read_unit, wanted_of
from data_prep.runs import Array, Facts, RunWriter
from data_prep.tasks.base import Counts, Report, plain_errors, whole_or_absent
from data_prep.tasks.cleaning import Cleaner
from data_prep.tokenfile import SPLITS
from data_prep.tokenizer.encoder import Encoder, open_encoder
from data_prep.tokenizer.engines import Tokens

MARKER = "done.json"
BAD_RECORDS = "bad.jsonl"


@dataclass(frozen=True)
class MapTask:
    """Task `index` of a job: these units, with this config, to `directory`, by the tokenizer in `tokenizer`."""

    index: int
    units: list[Unit]
    config: CorpusConfig
    tokenizer: Path
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"map task {self.index}"

    @property
    def finished(self) -> bool:
        """See `Task.finished`."""
        return (self.directory / MARKER).is_file()

    @property
    def input_bytes(self) -> int:
        """Of its units, as stored."""
        return sum(unit.end - unit.start for unit in self.units)

    def run(self, report: Report) -> dict[str, Any]:
        """See `Task.run`."""
        if (done := read_marker(self.directory)) is not None:
            return done
        with plain_errors(self.name), whole_or_absent(self.directory) as scratch:
            with (scratch / BAD_RECORDS).open("w", encoding="ascii") as bad_file:
                done = _Mapper(self, scratch, report, bad_file).run()
            # ASCII: a file's name need not be UTF-8
            (scratch / MARKER).write_text(json.dumps(done), encoding="ascii")
        return done


def read_marker(directory: Path) -> dict[str, Any] | None:
    """What a finished map task said, or None when it has not finished."""
    try:
        done: dict[str, Any] = json.loads((directory / MARKER).read_text())
    except FileNotFoundError:
        return None
    return done


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


class _Mapper:
    """The work of one task."""

    def __init__(self, task: MapTask, scratch: Path, report: Report, bad_file: TextIO) -> None:
        self._task, self._config, self._report, self._bad_file = task, task.config, report, bad_file
        self._encoder: Encoder = open_encoder(task.tokenizer, task.config.text_policy())
        frame = self._encoder.before, self._encoder.after
        self._runs = RunWriter(scratch, self._encoder.dtype, *frame, masked=task.config.has_conversations)
        self._skipped: Counter[str] = Counter()
        self._bad = BadCount(task.config)
        self._cleaner = Cleaner(task.config, scratch)
        self._told_dropped: Counter[str] = Counter()
        self._counts = np.zeros((len(task.config.sources), len(SPLITS), 3), np.int64)
        self._documents, self._batches, self._told = 0, 0, 0
        self._sample: list[str] = []
        labels = [source.label for source in task.config.sources]
        self._source = np.array([labels.index(unit.source) for unit in task.units], np.int64)
        self._is_chat = [task.config.sources[i].messages_field is not None for i in self._source]
        keys = [unit_key(unit.source, unit.file, seed=task.config.seed) for unit in task.units]
        self._unit_key = np.array(keys, np.uint64)

    def run(self) -> dict[str, Any]:
        files, pending = [], _Pending()
        for number, unit in enumerate(self._task.units):
            digest = digest_of(unit)
            wanted = wanted_of(self._config.sources[self._source[number]], self._cleaner.fields)
            for record in read_unit(unit, wanted, digest):
                if isinstance(record, Bad):
                    self._leave_out(record)
                    continue
                if self._is_chat[number]:
                    self._process_conversations(record, number)
                    self._report_input(digest.passed)
                    continue
                pending.add(record, number)
                if pending.characters >= _ENOUGH_CHARACTERS:
                    self._process(pending)
                    pending = _Pending()
                    self._report_input(digest.passed)
            files.append([unit.source, unit.file, unit.file_bytes, unit.part, unit.parts, digest.finish()])
            self._report_input(unit.end - unit.start)
            self._told = 0
        if pending.texts:
            self._process(pending)
        self._encoder.check(self._sample, where=self._task.name)
        self._runs.flush()
        self._cleaner.close()
        return {
            "counts": self._counts.tolist(),
            "skipped": dict(sorted(self._skipped.items())),
            "dropped": dict(sorted(self._cleaner.dropped.items())),
            "edited": dict(sorted(self._cleaner.edits.items())),
            "files": files,
        }

    def _report_input(self, passed: int) -> None:
        """Reports what has been read of a unit since the last time."""
        self._report(Counts(input_bytes=passed - self._told))
        self._told = passed

    def _leave_out(self, bad: Bad) -> None:
        self._bad_file.write(json.dumps(bad.listing()) + "\n")
        self._skipped[bad.reason] += 1
        self._bad.add(bad)
        self._bad.check()

    def _process_conversations(self, batch: Batch, number: int) -> None:
        """Renders and tokenises conversations; what cannot be trained on counts as unreadable."""
        unit, kept = self._task.units[number], Batch()
        source = self._config.sources[self._source[number]]
        encoder = open_chat_encoder(self._task.tokenizer, special=self._config.parse_special_tokens)
        found: list[Conversation] = []
        for line, at in zip(batch.texts, batch.at, strict=True):
            try:
                found.append(encoder.encode(line, everything=source.learn == "everything"))
                kept.add(found[-1].text, at)
            except ConversationError as error:
                where = "row" if unit.type != "jsonl" else "byte"
                self._leave_out(Bad(unit.source, unit.file, where, at, "not a conversation", str(error)))
        if not found:
            return
        offsets = np.cumsum([0, *(len(conversation.ids) for conversation in found)])
        tokens = Tokens(np.concatenate([conversation.ids for conversation in found]), offsets)
        units = np.full(len(found), number)
        facts = self._facts(units, np.array(kept.at), [text.encode() for text in kept.texts])
        self._runs.add(tokens, facts, mask=np.concatenate([conversation.mask for conversation in found]))
        self._count(tokens, facts)

    def _process(self, pending: _Pending) -> None:
        texts, at, unit = pending.texts, np.array(pending.at, np.int64), np.repeat(*np.array(pending.units).T)
        cleaned = self._cleaner.clean(texts, pending.fields, lambda i: self._place(int(unit[i]), int(at[i])))
        if cleaned is not None:
            self._report(Counts(dropped=Counter(self._cleaner.dropped) - self._told_dropped))
            self._told_dropped = Counter(self._cleaner.dropped)
            texts, at, unit = cleaned[0], at[cleaned[1]], unit[cleaned[1]]
            if not texts:
                return
        tokens = self._encoder.encode(texts)
        self._keep_sample(texts)
        facts = self._facts(unit, at, [text.encode() for text in texts])
        empty = np.diff(tokens.offsets) == 0
        if empty.any():  # empty texts, and those of which a normaliser leaves nothing
            self._skipped["empty"] += int(empty.sum())
            tokens = Tokens(tokens.ids, tokens.offsets[np.append(True, ~empty)])
            facts = facts.take(~empty)
        if len(facts.key):
            self._runs.add(tokens, facts)
        self._count(tokens, facts)

    def _keep_sample(self, texts: list[str]) -> None:
        """Keeps the beginning of a text now and then, for the comparison with the reference."""
        if self._batches % _SAMPLE_EVERY == 0 and len(self._sample) < _SAMPLES:
            self._sample.append(texts[len(texts) // 2][:_SAMPLE_CHARACTERS])
        self._batches += 1

    def _place(self, unit: int, at: int) -> tuple[str, str, int]:
        return self._task.units[unit].source, self._task.units[unit].file, at

    def _facts(self, unit: Array, at: Array, raw: list[bytes]) -> Facts:
        hashes = content_hashes(raw)
        heldout = below(hashes[:, 0], share=self._config.heldout_fraction, seed=self._config.seed, purpose=HELDOUT)
        first = self._task.index * _MOST_DOCUMENTS + self._documents
        self._documents += len(raw)
        return Facts(
            key=document_keys(self._unit_key[unit], at),
            rank=np.arange(first, first + len(raw)),
            bytes=np.fromiter(map(len, raw), np.int64, len(raw)),
            source=self._source[unit],
            split=np.where(heldout, SPLITS.index("heldout"), SPLITS.index("train")),
        )

    def _count(self, tokens: Tokens, facts: Facts) -> None:
        lengths = np.diff(tokens.offsets) + self._encoder.frame
        sums = (np.ones_like(lengths), lengths, facts.bytes)
        for column, values in enumerate(sums):
            np.add.at(self._counts[:, :, column], (facts.source, facts.split), values)
        self._report(Counts(text_bytes=int(facts.bytes.sum()), documents=len(lengths), tokens=int(lengths.sum())))


_ENOUGH_CHARACTERS = 1 << 18
_SAMPLE_EVERY, _SAMPLES, _SAMPLE_CHARACTERS = 16, 8, 2048
_MOST_DOCUMENTS = 1 << 36  # of one task


def counts_of(markers: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """int64 [sources, splits, 3]: documents, tokens and bytes that the map tasks have written."""
    counts: np.ndarray[Any, Any] = np.array([marker["counts"] for marker in markers], np.int64)
    return np.asarray(counts.sum(axis=0))
