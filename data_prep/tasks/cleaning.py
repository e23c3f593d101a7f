"""Cleaning within a map task: applies the configured chain, counts dropped documents, and lists them on request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from data_prep.clean.chain import Chain, Dropped, build_chain
from data_prep.config.corpus import CorpusConfig
from data_prep.hashing import utf8_size

DROPPED_TEXTS = "dropped.jsonl"

Location = Callable[[int], tuple[str, str, int]]
"""Function that returns source, file and position of the i-th text of a batch."""


class Cleaner:
    """Applies the cleaning chain of a config.

    Attributes:
        fields: names of the other record fields that the chain reads.
        dropped: "step: reason" -> number of dropped texts.
        dropped_bytes: "step: reason" -> UTF-8 bytes of the dropped texts, before cleaning.
    """

    def __init__(self, config: CorpusConfig, directory: Path | None) -> None:
        """Builds the chain; `directory` gets the list of dropped texts, or no list is written if it is None."""
        self._chain: Chain | None = build_chain(config.clean) if config.clean else None
        self._list: TextIO | None = None
        if config.list_dropped != "no" and directory is not None:
            self._list = (directory / DROPPED_TEXTS).open("w", encoding="ascii")
        self._with_text = config.list_dropped == "texts"
        self.fields = self._chain.fields if self._chain is not None else ()
        self.dropped: Counter[str] = Counter()
        self.dropped_bytes: Counter[str] = Counter()
        self._edits: Counter[str] = Counter()

    @property
    def edits(self) -> dict[str, int]:
        """Number of edited texts, by step."""
        return dict(self._edits) | (dict(self._chain.edits) if self._chain is not None else {})

    def clean(
        self, texts: Sequence[str], fields: Sequence[Mapping[str, Any]], location: Location
    ) -> tuple[list[str], list[int]] | None:
        """Cleans a batch.

        Args:
            fields: other fields of each text's record; empty if none are read.
            location: function that returns the location of a text, for the list.

        Returns:
            The kept, cleaned texts and the index of each in `texts`; None if there are no steps.
        """
        if self._chain is None:
            return None
        cleaned: list[str] = []
        kept: list[int] = []
        for i, text in enumerate(texts):
            outcome = self._chain.clean(text, fields[i] if fields else {})
            if isinstance(outcome, Dropped):
                self.drop(outcome, text, location(i))
            else:
                cleaned.append(outcome.text)
                kept.append(i)
        return cleaned, kept

    def drop(self, why: Dropped, text: str, location: tuple[str, str, int]) -> None:
        """Counts and lists a dropped text."""
        self.dropped[f"{why.step}: {why.reason}"] += 1
        self.dropped_bytes[f"{why.step}: {why.reason}"] += utf8_size(text)
        self._list_row(why, text, *location)

    def edit(self, why: Dropped, removed: str, location: tuple[str, str, int]) -> None:
        """Counts an edited text, and lists the part that was removed from it."""
        self._edits[why.step] += 1
        self._list_row(why, removed, *location)

    def close(self) -> None:
        """Closes the list."""
        if self._list is not None:
            self._list.close()

    def _list_row(self, outcome: Dropped, text: str, source: str, file: str, at: int) -> None:
        if self._list is None:
            return
        row: dict[str, Any] = {"source": source, "file": file, "at": at, "step": outcome.step, "reason": outcome.reason}
        if self._with_text:
            row["text"] = text
        self._list.write(json.dumps(row) + "\n")
