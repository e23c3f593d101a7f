"""Local files of a path: walks directories and expands globs without loops through links; counts unlisted entries."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterator

from data_prep.sources.storage import SKIPPED_FOLDERS
from foundation.errors import DataError

RECURSIVE = "**"
LINKED, LOOPED = "links to directories (not followed)", "links to directories that are read already"
DANGLING, SPECIAL = "links to nothing", "pipes, sockets and devices"


def walk_files(root: str, excluded: set[str], left_out: Counter[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yields (name relative to `root`, path, `os.stat`) of the files in a directory and below.

    Links to directories are skipped.

    Args:
        excluded: absolute paths of directories that are not entered.
        left_out: counter to update with the entries that are not files, by kind.

    Raises:
        DataError: a directory cannot be listed.
    """
    if is_excluded(root, excluded):
        return
    for here, directories, files in os.walk(root, onerror=_raise):
        directories[:] = [
            d
            for d in directories
            if d[0] != "." and d not in SKIPPED_FOLDERS and os.path.abspath(f"{here}/{d}") not in excluded  # noqa: PTH100 - must not follow links
        ]
        left_out[LINKED] += sum(os.path.islink(f"{here}/{d}") for d in directories)  # noqa: PTH114 - many calls
        for file in files:
            path = f"{here}/{file}"
            if file[0] == ".":
                continue
            found = file_stat(path)
            if found is not None:
                yield os.path.relpath(path, root), path, found
            else:
                left_out[DANGLING if os.path.islink(path) else SPECIAL] += 1  # noqa: PTH114


def file_stat(path: str) -> os.stat_result | None:
    """Calls `os.stat` on a file; None if there is none. It is called once for each of a million files."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):  # as `os.path.isfile`
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def is_excluded(path: str, excluded: set[str]) -> bool:
    """Whether a path is one of the excluded directories, or in one."""
    absolute = f"{os.path.abspath(path)}/"  # noqa: PTH100 - must not follow links
    return any(absolute.startswith(f"{folder}/") for folder in excluded)


def expand_glob(pattern: str, left_out: Counter[str]) -> Iterator[str]:
    """The paths that a glob matches; some may come twice.

    `**` matches any directories, also through links, but enters each directory once, by device and inode. With
    `glob.glob`, a link to a parent directory repeats every file 40 times, and two of these links take forever.
    """
    parts = pattern.split("/")
    if RECURSIVE not in parts:
        yield from glob.glob(pattern)  # noqa: PTH207 - may be absolute
        return
    cut = parts.index(RECURSIVE)
    head, rest = "/".join(parts[:cut]), "/".join(parts[cut + 1 :])
    if pattern.startswith("/") and not head:
        head = "/"
    for start in glob.glob(head) if head else [""]:  # noqa: PTH207
        for directory in _directories(start, left_out):
            inner = os.path.join(glob.escape(directory), rest or "*") if directory else rest or "*"  # noqa: PTH118
            if not rest and directory:
                yield directory
            if rest or parts[-1] == RECURSIVE:
                yield from expand_glob(inner, left_out)


def _directories(start: str, left_out: Counter[str]) -> Iterator[str]:
    """Yields a directory and all below it, also through links, each once and under its own name if it has one there."""
    seen: set[tuple[int, int]] = set()
    links = [start]
    while links:
        waiting = [links.pop(0)]
        if _is_known(waiting[0], seen):
            left_out[LOOPED] += 1
            continue
        while waiting:
            here = waiting.pop()
            yield here
            inside, linked = _entries(here)
            links += linked
            waiting += [path for path in inside if not _is_known(path, seen)]


def _is_known(path: str, seen: set[tuple[int, int]]) -> bool:
    """Whether to skip a directory because it was read before or is gone; records it as read."""
    try:
        found = os.stat(path or ".")  # noqa: PTH116
    except OSError:
        return True
    known = (found.st_dev, found.st_ino) in seen
    seen.add((found.st_dev, found.st_ino))
    return known


def _entries(directory: str) -> tuple[list[str], list[str]]:
    """A directory's subdirectories that are not hidden, and the links to directories in it, sorted."""
    inside: list[str] = []
    linked: list[str] = []
    try:
        with os.scandir(directory or ".") as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name[0] != "." and entry.is_dir():
                    path = f"{directory.rstrip('/')}/{entry.name}" if directory else entry.name
                    (linked if entry.is_symlink() else inside).append(path)
    except OSError as error:
        _raise(error)
    return inside, linked


def _raise(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be listed: {error.strerror}\n  try: make the directory readable, or exclude it"
    )
