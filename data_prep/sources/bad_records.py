"""Limits on unreadable records and damaged files (`max_bad_records`, `max_bad_files`), and the error beyond them."""

from __future__ import annotations

from collections.abc import Iterable

from data_prep.config.corpus import CorpusConfig
from data_prep.sources.records import DAMAGED_FILE, NO_TEXT, NOT_TEXT, BadRecord
from foundation.errors import DataError

_SHOWN = 5


class BadRecordCount:
    """Counts unreadable records and damaged files against the config's limits; keeps the first few for the message."""

    def __init__(self, config: CorpusConfig) -> None:
        self.records = 0
        self._files: set[tuple[str, str]] = set()
        self._first_records: list[BadRecord] = []
        self._first_files: list[BadRecord] = []
        self._config = config

    def add(self, bad: BadRecord) -> None:
        """Counts one record or file; a file counts once even if it is reported several times."""
        if bad.reason != DAMAGED_FILE:
            self.records += 1
            self._first_records += [bad] if len(self._first_records) < _SHOWN else []
        elif (bad.source, bad.file) not in self._files:
            self._files.add((bad.source, bad.file))
            self._first_files += [bad] if len(self._first_files) < _SHOWN else []

    def check(self) -> None:
        """Checks the counts against the limits.

        Raises:
            DataError: a limit is exceeded; the message names the first few records, their reasons, and the limit that
                would allow them.
        """
        self._check_one("files", len(self._files), self._config.max_bad_files, self._first_files)
        self._check_one("records", self.records, self._config.max_bad_records, self._first_records)

    def add_all(self, listed: Iterable[BadRecord]) -> None:
        """Counts all records, then checks: the message has the full number."""
        for bad in listed:
            self.add(bad)
        self.check()

    def check_any_used(self) -> None:
        """Refuses a corpus without documents if the reason is unreadable records.

        Raises:
            DataError: there are unreadable records; the message names the first few.
        """
        if self.records:
            why = f"no document is left: {self.records} records are unreadable, which max_bad_records allows"
            remedy = "repair what these lines say; if all conversations fail alike, correct the chat template"
            raise DataError(f"{why}:\n{_listed(self._first_records, self.records)}\n  try: {remedy}")

    def _check_one(self, noun: str, found: int, limit: int, first: list[BadRecord]) -> None:
        if found <= limit:
            return
        shown = _listed(first, found)
        remedy = f"repair them, or set max_bad_{noun} to {found} or more to skip them"
        if all(bad.reason == NOT_TEXT for bad in first):
            remedy = f"do what each line says, or set max_bad_{noun} to {found} or more to skip them"
        if all(bad.reason == NO_TEXT for bad in first):
            chats = {source.label for source in self._config.sources if source.messages_field is not None}
            talks = any(bad.source in chats for bad in first)
            field, what = ("messages_field", "messages") if talks else ("text_field", "text")
            remedy = f"set {field} of the source to the key that holds the {what}, or {remedy}"
        if all("the chat template" in bad.detail for bad in first):
            remedy = f"set tokenizer.chat_template or tokenizer.date as these lines say, or {remedy}"
        raise DataError(f"{found} unreadable {noun} so far, max_bad_{noun} is {limit}:\n{shown}\n  try: {remedy}")


def _listed(first: list[BadRecord], found: int) -> str:
    """Makes a line for each of the first records, and one for the rest of `found`."""
    lines = [f"  {bad.source}: {bad.place()}: {bad.reason} ({bad.detail})" for bad in first]
    return "\n".join(lines + ([f"  ... and {found - len(first)} more"] if found > len(first) else []))
