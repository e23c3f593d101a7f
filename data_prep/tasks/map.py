"""Map: one task's units, read, split, tokenised and written as one token file per split.

`MAP/` of a finished task holds `SPLIT.bin`, `SPLIT.idx`, `SPLIT.bytes` (int64[documents], UTF-8 bytes of each text),
`bad.jsonl` (what was not readable) and `done.json` (the counts, and a SHA-256 for each unit's share of its file).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.config import CorpusConfig
from data_prep.limits import BadCount
from data_prep.plan import Unit
from data_prep.readers.records import Bad
from data_prep.readers.unit import hash_unit, read_unit
from data_prep.split import split_of
from data_prep.tasks.base import Counts, Report, plain_errors, whole_or_absent
from data_prep.tokenfile import SPLITS, TokenFileWriter, dtype_for
from data_prep.tokenizer.load import Encoder, load_encoder

MARKER = "done.json"
BAD_RECORDS = "bad.jsonl"
_BATCH_BYTES = 1 << 20  # enough to keep the tokenizer's own loop busy, small next to its memory
_BATCH_DOCUMENTS = 1024


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

    def run(self, report: Report) -> dict[str, Any]:
        """See `Task.run`."""
        if (done := read_marker(self.directory)) is not None:
            return done
        with plain_errors(self.name), whole_or_absent(self.directory) as scratch:
            done = _run(self, scratch, report)
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


def read_text_bytes(directory: Path, split: str) -> np.ndarray[Any, Any]:
    """int64[documents]: UTF-8 bytes of each document of a split."""
    return np.fromfile(directory / f"{split}.bytes", dtype="<i8")


@dataclass
class _Split:
    """One split of a task while it is being written."""

    writer: TokenFileWriter
    text_bytes: list[int] = field(default_factory=list)

    def add(self, tokens: list[np.ndarray[Any, Any]], text_bytes: list[int]) -> None:
        self.writer.append(np.concatenate(tokens), [len(t) for t in tokens])
        self.text_bytes += text_bytes

    def close(self, path: Path) -> dict[str, int]:
        self.writer.close()
        sizes = np.asarray(self.text_bytes, dtype="<i8")
        sizes.tofile(path)
        return {"documents": len(sizes), "tokens": self.writer.tokens, "bytes": int(sizes.sum())}


def _run(task: MapTask, scratch: Path, report: Report) -> dict[str, Any]:
    encoder = load_encoder(task.tokenizer, append_eos=task.config.append_eos)
    dtype = dtype_for(encoder.vocab_size)
    splits = {split: _Split(TokenFileWriter(scratch / split, dtype=dtype)) for split in SPLITS}
    skipped: Counter[str] = Counter()
    bad = BadCount(task.config)
    with (scratch / BAD_RECORDS).open("w", encoding="ascii") as bad_file:
        for unit in task.units:
            for batch in _batches(_texts(unit, task.config, skipped, bad, bad_file)):
                report(_encode(batch, task.config, encoder, splits, skipped))
            report(Counts(input_bytes=unit.end - unit.start))
    counts = {split: open_split.close(scratch / f"{split}.bytes") for split, open_split in splits.items()}
    files = [[u.source, u.file, u.file_bytes, u.part, u.parts, hash_unit(u)] for u in task.units]
    return {"splits": counts, "skipped": dict(sorted(skipped.items())), "files": files}


def _texts(
    unit: Unit, config: CorpusConfig, skipped: Counter[str], bad: BadCount, bad_file: TextIO
) -> Iterator[tuple[str, bytes]]:
    """Yields (text, its UTF-8), writing down what was not readable; stops at the limits of the config."""
    source = next(s for s in config.sources if s.label == unit.source)
    for record in read_unit(unit, source):
        if isinstance(record, Bad):
            bad_file.write(json.dumps(record.listing()) + "\n")
            skipped[record.reason] += 1
            bad.add(record)
            bad.check()
        elif not record.text:
            skipped["empty"] += 1
        else:
            yield record.text, record.text.encode()


def _batches(texts: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    batch: list[tuple[str, bytes]] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text[1])
        if held >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _encode(
    batch: list[tuple[str, bytes]],
    config: CorpusConfig,
    encoder: Encoder,
    splits: dict[str, _Split],
    skipped: Counter[str],
) -> Counts:
    found: dict[str, tuple[list[np.ndarray[Any, Any]], list[int]]] = {split: ([], []) for split in SPLITS}
    for tokens, (_, raw) in zip(encoder.encode([text for text, _ in batch]), batch, strict=True):
        if not len(tokens):  # a normaliser may leave nothing of a text
            skipped["empty"] += 1
            continue
        tokens_of, bytes_of = found[split_of(raw, seed=config.seed, heldout_fraction=config.heldout_fraction)]
        tokens_of.append(tokens)
        bytes_of.append(len(raw))
    for split, (tokens_of, bytes_of) in found.items():
        if tokens_of:
            splits[split].add(tokens_of, bytes_of)
    counted = [len(tokens) for tokens_of, _ in found.values() for tokens in tokens_of]
    return Counts(text_bytes=sum(len(raw) for _, raw in batch), documents=len(counted), tokens=sum(counted))
