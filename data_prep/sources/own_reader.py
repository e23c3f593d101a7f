"""Reader that calls a function of the user: `reader(path)` yields the records of a file as dicts, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_prep.sources.jsonl import checked
from data_prep.sources.records import BadRecord, Problem, Record, TextBatch, WantedFields, in_batches
from foundation.errors import DataError
from foundation.user_function import load_function


def read(path: str, *, source: str, file: str, wanted: WantedFields) -> Iterator[TextBatch | BadRecord]:
    """Yields the records that `wanted.reader` yields for a file. A record's position is its number.

    Raises:
        DataError: the function fails.
    """
    return in_batches(_records(path, wanted), source=source, file=file, unit="record", wanted=wanted)


def _records(path: str, wanted: WantedFields) -> Iterator[tuple[int, int, Record | Problem]]:
    reader = wanted.reader or ""
    function = load_function(reader, field="sources.reader")
    try:
        for number, record in enumerate(function.call(path)):
            yield number, number, _checked(record, wanted)
    except Exception as error:  # the user's code runs here
        remedy = f"mend the function; {reader}(path) yields the file's records as dicts"
        raise DataError(f"{reader} failed on {path}: {type(error).__name__}: {error}\n  try: {remedy}") from error


def _checked(record: Any, wanted: WantedFields) -> Record | Problem:
    if not isinstance(record, dict):
        return "not a record", f"the reader yielded {type(record).__name__}, not a dict"
    return checked(record, wanted)
