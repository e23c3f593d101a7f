"""Division of the input into units, and of the units into map tasks.

A unit is the input of one reader call: a file, a byte range of an uncompressed jsonl file, or some row groups of a
parquet file. Units are ordered by source (`seen` sources first), file name and position. A map task has consecutive
units: the order of tasks is the order of documents. The plan depends only on names, sizes and the config, and for
`.json` on whether the file holds an array, which is read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_prep.config.corpus import SourceType
from data_prep.sources import json_array, storage
from data_prep.sources.listing import InputFile, ResolvedSource


@dataclass(frozen=True, slots=True)
class Unit:
    """The input of one reader call.

    Attributes:
        source: name of the source.
        type: type of the source.
        file: name of the file within the source.
        path: path or URL of the file.
        start, end: byte range of the file that this unit hashes (and, for jsonl, reads); a file's units cover it.
        first_group, end_group: row groups [first, end) of a parquet file; 0, 0 for other types.
        part, parts: number of this unit among its file's units, and the number of these units.
        file_bytes, file_version: size and version of the file when the job was planned (`foundation.storage.Stat`).
    """

    source: str
    type: SourceType
    file: str
    path: str
    start: int
    end: int
    first_group: int
    end_group: int
    part: int
    parts: int
    file_bytes: int
    file_version: str


Plan = list[list[Unit]]
"""The units of each map task."""


def units(sources: Iterable[ResolvedSource], *, task_bytes: int) -> Iterator[Unit]:
    """All units of the corpus, in order."""
    for source in sources:
        for file in source.files:
            yield from _units_of(source, file, task_bytes)


def group(all_units: Iterable[Unit], *, task_bytes: int) -> list[list[Unit]]:
    """Groups consecutive units into map tasks of about `task_bytes` each, give or take half a unit."""
    tasks: list[list[Unit]] = []
    remaining = 0.0
    for unit in all_units:
        size = unit.end - unit.start
        if not tasks or remaining < size / 2:
            tasks.append([])
            remaining = task_bytes
        tasks[-1].append(unit)
        remaining -= size
    return tasks


def is_divisible(kind: SourceType, path: str) -> bool:
    """Whether a file can be read by byte ranges: uncompressed lines."""
    return kind == "jsonl" and not storage.is_compressed(path) and not json_array.is_array(path)


def _units_of(source: ResolvedSource, file: InputFile, task_bytes: int) -> Iterator[Unit]:
    groups = _split_row_groups(file, task_bytes) if source.type == "parquet" else []
    if groups:
        parts = len(groups)
    elif is_divisible(source.type, file.path):
        parts = max(1, -(-file.bytes // task_bytes))
    else:
        parts = 1
    for part in range(parts):
        first, end = groups[part] if groups else (0, 0)
        start, stop = (file.bytes * i // parts for i in (part, part + 1))
        place = (start, stop, first, end, part, parts)
        yield Unit(source.label, source.type, file.name, file.path, *place, file.bytes, file.version)


def _split_row_groups(file: InputFile, task_bytes: int) -> list[tuple[int, int]]:
    from data_prep.sources.parquet import row_group_bytes  # noqa: PLC0415 - importing Arrow is slow, and only parquet needs it

    parts: list[tuple[int, int]] = []
    first, size_so_far = 0, 0
    sizes = row_group_bytes(file.path)
    for i, size in enumerate(sizes):
        size_so_far += size
        if size_so_far >= task_bytes or i == len(sizes) - 1:
            parts.append((first, i + 1))
            first, size_so_far = i + 1, 0
    return parts
