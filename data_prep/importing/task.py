"""The task of an import: writes one shard from a few consecutive files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.formats.maskfile import MaskWriter
from data_prep.formats.tokenfile import TokenFileWriter, dtype_for
from data_prep.importing.documents import I64, Documents, TokenSource, split_at
from data_prep.task import Counts, Report
from data_prep.tasks.reduce import LENGTH_BINS, length_histogram
from data_prep.tokenizer.text_bytes import IdBytes
from foundation.errors import DataError

Borders = Literal["format", "eos", "none"]


@dataclass(frozen=True)
class Rules:
    """Rules by which tokens become documents.

    Attributes:
        vocab_size: number of ids of the tokenizer.
        borders: document borders: "format" as recorded, "eos" at end-of-text ids, "none" for one document per file.
        eos: end-of-text id for borders "eos", or None.
        eos_first: whether the end-of-text id begins a document instead of ending it.
        masked: whether a loss mask is written.
    """

    vocab_size: int
    borders: Borders
    eos: int | None
    eos_first: bool
    masked: bool

    def documents(self, sources: tuple[TokenSource, ...]) -> Iterator[Documents]:
        """Yields the documents of files, by these rules.

        Raises:
            DataError: a file is damaged, or holds an id that the tokenizer does not have.
        """
        if self.borders == "eos":
            assert self.eos is not None
            parts = (part for source in sources for part in self.checked(source))
            yield from split_at(parts, self.eos, first=self.eos_first)
            return
        for source in sources:
            if self.borders == "format":
                yield from self.checked(source)
            else:
                yield from split_at(self.checked(source), -1, first=False)

    def checked(self, source: TokenSource) -> Iterator[Documents]:
        """Yields the documents that a file records; checks that ids are within the vocabulary.

        Raises:
            DataError: the file is damaged, or holds an id that the tokenizer does not have.
        """
        before = 0
        for part in source.read():
            ids = part.tokens
            if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
                at = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
                raise DataError(
                    f"{source.path} holds the id {ids[at]} as token {before + at:,}, and the tokenizer has"
                    f" {self.vocab_size:,} ids\n  try: the tokenizer that made it, or another --dtype"
                )
            yield part
            before += ids.size


@dataclass(frozen=True)
class ImportTask:
    """Writes one shard of an import.

    Attributes:
        sources: consecutive files.
        prefix: path prefix of the shard.
        tokenizer: Hugging Face folder of the tokenizer.
        rules: rules by which tokens become documents.
        heldout: whether the bytes of text must be counted (held-out splits).
    """

    sources: tuple[TokenSource, ...]
    prefix: Path
    tokenizer: Path
    rules: Rules
    heldout: bool

    @property
    def name(self) -> str:
        """Implements `Task.name`."""
        return f"import of {self.sources[0].path.name}"

    @property
    def finished(self) -> bool:
        """Implements `Task.finished`: an import does not resume, it starts over."""
        return False

    def run(self, report: Report) -> dict[str, Any]:
        """Implements `Task.run`; returns the shard's manifest entry, the histogram of its lengths and SHA-256 sums."""
        text_bytes, lengths = 0, np.zeros(LENGTH_BINS, np.int64)
        sizes = IdBytes.of(self.tokenizer, required=self.heldout)
        with ExitStack() as stack:
            writer = stack.enter_context(TokenFileWriter(self.prefix, dtype=dtype_for(self.rules.vocab_size)))
            mask = stack.enter_context(MaskWriter(self.prefix)) if self.rules.masked else None
            for part in self.rules.documents(self.sources):
                whole: I64 = part.lengths[part.lengths > 0]
                writer.append(part.tokens, whole)
                if mask is not None:
                    counts = np.ones(part.tokens.size, np.uint8) if part.mask is None else part.mask
                    mask.append([np.ascontiguousarray(counts, dtype=np.uint8).data])
                text_bytes += sizes.count(part.tokens, documents=whole.size) if sizes else 0
                lengths += length_histogram(whole)
                report(Counts(tokens=int(part.tokens.size), documents=whole.size))
            sums = writer.close() | (mask.close() if mask is not None else {})
        entry = {"documents": int(lengths.sum()), "tokens": writer.tokens, "bytes": text_bytes}
        return {"name": self.prefix.name, **entry, "lengths": lengths.tolist(), "sha256": sums}
