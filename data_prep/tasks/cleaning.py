"""Cleaning within a map task: the chain of the config, what it drops, and the list of that if it is asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from data_prep.clean.chain import Chain, Dropped, build
from data_prep.config.corpus import CorpusConfig

DROPPED_TEXTS = "dropped.jsonl"

Place = Callable[[int], tuple[str, str, int]]
"""Source, file and position of the i-th text of a batch."""


class Cleaner:
    """Applies the chain of a config.

    Attributes:
        fields: of the records, the further ones that it reads.
        dropped: texts left out, by "step: reason".
    """

    def __init__(self, config: CorpusConfig, directory: Path | None) -> None:
        """`directory`: where the list goes; None makes none."""
        self._chain: Chain | None = build(config.clean) if config.clean else None
        self._list: TextIO | None = None
        if config.list_dropped != "no" and directory is not None:
            self._list = (directory / DROPPED_TEXTS).open("w", encoding="ascii")
        self._with_text = config.list_dropped == "texts"
        self.fields = self._chain.fields if self._chain is not None else ()
        self.dropped: Counter[str] = Counter()
        self._edits: Counter[str] = Counter()

    @property
    def edits(self) -> dict[str, int]:
        """Texts changed, by step."""
        return dict(self._edits) | (dict(self._chain.edits) if self._chain is not None else {})

    def clean(
        self, texts: Sequence[str], fields: Sequence[Mapping[str, Any]], place: Place
    ) -> tuple[list[str], list[int]] | None:
        """What is left of a batch: the texts, and which of the given ones they are; None without any steps.

        Args:
            fields: of each text's record; empty where none are read.
            place: where a text is from, for the list.
        """
        if self._chain is None:
            return None
        left: list[str] = []
        kept: list[int] = []
        for i, text in enumerate(texts):
            outcome = self._chain.clean(text, fields[i] if fields else {})
            if isinstance(outcome, Dropped):
                self.drop(outcome, text, place(i))
            else:
                left.append(outcome.text)
                kept.append(i)
        return left, kept

    def drop(self, why: Dropped, text: str, place: tuple[str, str, int]) -> None:
        """Counts and lists a text that is left out."""
        self.dropped[f"{why.step}: {why.reason}"] += 1
        self._note(why, text, *place)

    def edit(self, why: Dropped, removed: str, place: tuple[str, str, int]) -> None:
        """Counts a text of which something was left out, and lists that."""
        self._edits[why.step] += 1
        self._note(why, removed, *place)

    def close(self) -> None:
        """Ends the list."""
        if self._list is not None:
            self._list.close()

    def _note(self, outcome: Dropped, text: str, source: str, file: str, at: int) -> None:
        if self._list is None:
            return
        row: dict[str, Any] = {"source": source, "file": file, "at": at, "step": outcome.step, "reason": outcome.reason}
        if self._with_text:
            row["text"] = text
        self._list.write(json.dumps(row) + "\n")
