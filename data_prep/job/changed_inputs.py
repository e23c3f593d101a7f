"""Finds inputs that differ from a planned job's or an output's, and tells whether restored files are the same.

A job knows the sizes and versions (times of modification) of its files, and the hash of every part that a finished task
has read. A file that was copied again has another version, but may have the same bytes. It is accepted if all parts
that were read have the same hashes: the output is then the same as if the file had never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from data_prep.job.directory import Job
from data_prep.sources.bytesource import Digest
from data_prep.sources.listing import ResolvedSource
from data_prep.sources.units import Plan, Unit, units
from data_prep.task import read_marker
from data_prep.tasks.make_tokenizer import read_pieces
from foundation.errors import DataError

_SHOWN = 3

File = tuple[str, str]
"""Names of a source and of a file in it."""


def files_of(sources: Iterable[ResolvedSource | None]) -> dict[File, int]:
    """The size in bytes of every file that was listed."""
    return {(s.label, file.name): file.bytes for s in sources if s is not None for file in s.files}


def planned_files(plan: Plan) -> dict[File, int]:
    """The size in bytes of every file of a plan."""
    return {(unit.source, unit.file): unit.file_bytes for task in plan for unit in task}


def describe_changes(before: Mapping[File, int], now: Mapping[File, int]) -> str:
    """Names the first few files that were added, removed and resized; starts with a line break, or is empty."""
    resized = [key for key in now if key in before and now[key] != before[key]]
    kinds = {
        "added": [f"{s}: {f}" for s, f in now.keys() - before.keys()],
        "removed": [f"{s}: {f}" for s, f in before.keys() - now.keys()],
        "of another size": [f"{s}: {f} (had {before[s, f]:,} bytes, has {now[s, f]:,})" for s, f in resized],
    }
    return "".join(f"\n  {len(files):,} {kind}: {_first(files)}" for kind, files in kinds.items() if files)


def accept_restored(job: Job, plan: Plan, sources: Iterable[ResolvedSource | None]) -> Plan:
    """Updates the plan to the present versions of its files, and writes it if they differ. Needs the exclusive lock.

    Args:
        sources: present files, with the planned names and sizes.

    Raises:
        DataError: in a file with another version, bytes that a task has read differ, or it is not known which bytes
            were read.
    """
    found = {(s.label, file.name): (s, file) for s in sources if s is not None for file in s.files}
    stale = {
        (unit.source, unit.file)
        for task in plan
        for unit in task
        if (key := (unit.source, unit.file)) in found and found[key][1].version != unit.file_version
    }
    if not stale:
        return plan
    for unit, digest in _parts_read(job, plan, stale):
        _, file = found[unit.source, unit.file]
        if digest is None or Digest(file.path, start=unit.start, end=unit.end).finish() != digest:
            why = (
                "other bytes than before"
                if digest
                else "another modification time, and the content that was read is not known"
            )
            remedy = f"restore it and run again, or rm -r {job.root} to start over"
            raise DataError(f"{file.path} has changed since the job was planned: it has {why}\n  try: {remedy}")
    version = {key: found[key][1].version for key in stale}
    renewed = [
        [replace(unit, file_version=version.get((unit.source, unit.file), unit.file_version)) for unit in task]
        for task in plan
    ]
    _check_division(job, renewed, stale, found)
    job.write_plan(renewed)
    return renewed


def _parts_read(job: Job, plan: Plan, files: set[File]) -> Iterator[tuple[Unit, str | None]]:
    """Yields the parts of the files that finished tasks have read, each with its hash or None if not known."""
    by_file = {(unit.source, unit.file): unit for task in plan for unit in task}
    pieces = read_pieces(job.tokenizer)
    if pieces is None and job.config.tokenizer.train is not None and read_marker(job.tokenizer) is not None:
        yield from ((by_file[key], None) for key in files)
    for source, file, start, end, digest in pieces or []:
        if (source, file) in files:
            yield replace(by_file[source, file], start=start, end=end), digest
    for index, task in enumerate(plan):
        for directory in (job.map_directory(index), job.lines_directory(index)):
            done = read_marker(directory)
            if done is None:
                continue
            digests: list[Any] = [entry[-1] for entry in done["files"]] if "files" in done else [None] * len(task)
            pairs = zip(task, digests, strict=True)
            yield from ((unit, digest) for unit, digest in pairs if (unit.source, unit.file) in files)


def _check_division(job: Job, plan: Plan, files: set[File], found: Mapping[File, Any]) -> None:
    """Checks that a plan made now would divide the files in the same way: otherwise row groups would be elsewhere."""
    planned = [unit for task in plan for unit in task if (unit.source, unit.file) in files]
    for key in sorted(files):
        source, file = found[key]
        now = list(units([replace(source, files=[file])], task_bytes=job.config.task_bytes))
        if now != [unit for unit in planned if (unit.source, unit.file) == key]:
            remedy = f"restore it and run again, or rm -r {job.root} to start over"
            raise DataError(f"{file.path} has changed since the job was planned: other row groups\n  try: {remedy}")


def _first(files: list[str]) -> str:
    more = f", ... and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
    return ", ".join(json.dumps(name, ensure_ascii=False)[1:-1] for name in sorted(files)[:_SHOWN]) + more
