"""Cutting the input into units and the units into map tasks.

A unit is what one reader reads in one go: a file, a byte range of an uncompressed jsonl file, some row groups of a
parquet file. Units lie in the order source, file name, position; a map task is a run of neighbouring units, so the
order of tasks is the order of documents. The plan depends on names, sizes and the config, on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_prep.config.corpus import SourceType
from data_prep.sources.listing import InputFile, ResolvedSource


@dataclass(frozen=True, slots=True)
class Unit:
    """What one reader reads in one go.

    Args:
        source: the source's label. file: the name within the source. path: where it lies.
        start, end: the bytes of the file that this unit answers for (and hashes); the units of a file cover it.
        first_group, end_group: row groups [first, end) of a parquet file; 0, 0 elsewhere.
        part, parts: this is unit `part` of the `parts` of its file.
        file_bytes, file_version: the state of the file when the job was planned; see `storage.Stat`.
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
    """Neighbouring units, put together until they hold about `task_bytes`: half a unit more or less."""
    tasks: list[list[Unit]] = []
    room = 0.0
    for unit in all_units:
        size = unit.end - unit.start
        if not tasks or room < size / 2:
            tasks.append([])
            room = task_bytes
        tasks[-1].append(unit)
        room -= size
    return tasks


def _units_of(source: ResolvedSource, file: InputFile, task_bytes: int) -> Iterator[Unit]:
    groups = _cut_groups(file, task_bytes) if source.type == "parquet" else []
    if groups:
        parts = len(groups)
    elif source.type == "jsonl" and not file.path.endswith((".gz", ".zst")):
        parts = max(1, -(-file.bytes // task_bytes))
    else:
        parts = 1
    for part in range(parts):
        first, end = groups[part] if groups else (0, 0)
        start, stop = (file.bytes * i // parts for i in (part, part + 1))
        place = (start, stop, first, end, part, parts)
        yield Unit(source.label, source.type, file.name, file.path, *place, file.bytes, file.version)


def _cut_groups(file: InputFile, task_bytes: int) -> list[tuple[int, int]]:
    from data_prep.sources.parquet import row_group_bytes  # noqa: PLC0415 - Arrow takes a while, and others need it not

    cuts: list[tuple[int, int]] = []
    first, held = 0, 0
    sizes = row_group_bytes(file.path)
    for i, size in enumerate(sizes):
        held += size
        if held >= task_bytes or i == len(sizes) - 1:
            cuts.append((first, i + 1))
            first, held = i + 1, 0
    return cuts
