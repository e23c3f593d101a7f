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

EXAMPLES, _BEGINNING = 3, 160
"""Dropped texts of a source and reason that are kept as examples, and the characters of each."""

Location = Callable[[int], tuple[str, str, int]]
"""Function that returns source, file and position of the i-th text of a batch."""


class Cleaner:
    """Applies the cleaning chain of a config.

    Attributes:
        fields: names of the other record fields that the chain reads.
        dropped: "step: reason" -> number of dropped texts.
        dropped_bytes: "step: reason" -> UTF-8 bytes of the dropped texts, before cleaning.
        by_source: source -> "step: reason" -> number of dropped texts.
        examples: source -> "step: reason" -> the first dropped texts: [file, position, beginning of the text].
    """

    def __init__(self, config: CorpusConfig, directory: Path | None) -> None:
        """Builds the chains; `directory` gets the list of dropped texts, or no list is written if it is None."""
        self._default = build_chain(config.clean)
        self._own = {
            source.label: build_chain(source.clean, at=f"sources.{i}.clean")
            for i, source in enumerate(config.sources)
            if source.clean is not None
        }
        self._cleans = bool(config.all_steps)
        self._list: TextIO | None = None
        if config.list_dropped != "no" and directory is not None:
            self._list = (directory / DROPPED_TEXTS).open("w", encoding="ascii")
        self._with_text = config.list_dropped == "texts"
        self.fields = tuple(dict.fromkeys(name for chain in self._chains() for name in chain.fields))
        self.dropped: Counter[str] = Counter()
        self.dropped_bytes: Counter[str] = Counter()
        self.by_source: dict[str, Counter[str]] = {}
        self.examples: dict[str, dict[str, list[list[Any]]]] = {}
        self._edits: Counter[str] = Counter()

    @property
    def edits(self) -> dict[str, int]:
        """Number of edited texts, by step."""
        return dict(sum((chain.edits for chain in self._chains()), self._edits.copy()))

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
        if not self._cleans:
            return None
        cleaned: list[str] = []
        kept: list[int] = []
        for i, text in enumerate(texts):
            chain = self._own.get(location(i)[0], self._default) if self._own else self._default
            outcome = chain.clean(text, fields[i] if fields else {})
            if isinstance(outcome, Dropped):
                self.drop(outcome, text, location(i))
            else:
                cleaned.append(outcome.text)
                kept.append(i)
        return cleaned, kept

    def drop(self, why: Dropped, text: str, location: tuple[str, str, int]) -> None:
        """Counts and lists a dropped text."""
        reason, (source, file, at) = f"{why.step}: {why.reason}", location
        self.dropped[reason] += 1
        self.dropped_bytes[reason] += utf8_size(text)
        self.by_source.setdefault(source, Counter())[reason] += 1
        shown = self.examples.setdefault(source, {}).setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append([file, at, text[:_BEGINNING]])
        self._list_row(why, text, *location)

    def edit(self, why: Dropped, removed: str, location: tuple[str, str, int]) -> None:
        """Counts an edited text, and lists the part that was removed from it."""
        self._edits[why.step] += 1
        self._list_row(why, removed, *location)

    def close(self) -> None:
        """Closes the list."""
        if self._list is not None:
            self._list.close()

    def _chains(self) -> tuple[Chain, ...]:
        return (self._default, *self._own.values())

    def _list_row(self, outcome: Dropped, text: str, source: str, file: str, at: int) -> None:
        if self._list is None:
            return
        row: dict[str, Any] = {"source": source, "file": file, "at": at, "step": outcome.step, "reason": outcome.reason}
        if self._with_text:
            row["text"] = text
        self._list.write(json.dumps(row) + "\n")
