"""Lists the input files of a source: resolves paths, globs and types; sizes and order are the same on every machine."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from data_prep.config.corpus import Source, SourceType
from data_prep.sources import saved, storage
from headrace.base.errors import ConfigError, DataError

_JSONL = ("*.jsonl", "*.ndjson", "*.jsonl.gz", "*.ndjson.gz", "*.jsonl.zst", "*.ndjson.zst", "*.json.gz", "*.json.zst")
_TEXT_SUFFIXES = """
    txt md markdown rst adoc org tex html htm css
    py pyi pyx ipy c h cc cpp cxx hpp hh cu cuh rs go java kt scala swift m cs fs js mjs ts jsx tsx php rb pl pm lua
    r jl sh bash zsh fish ps1 sql hs ml mli ex exs erl clj el lisp scm zig nim dart v vhd cmake mk proto toml ini cfg
    yaml yml
""".split()  # noqa: SIM905 - shorter than a list literal
_TEXT = (*(f"*.{suffix}" for suffix in _TEXT_SUFFIXES), "README*", "LICENSE*", "Makefile", "Dockerfile")
_DEFAULTS: dict[SourceType, tuple[str, ...]] = {"text": _TEXT, "jsonl": _JSONL, "parquet": ("*.parquet",)}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source.

    Attributes:
        name: identifies the file within the source, whatever directory the source is in.
        path: current path or URL.
        bytes: size as stored.
        version: see `storage.Stat`.
    """

    name: str
    path: str
    bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class _Found:
    """A file. named: whether the path or glob matches the file itself, rather than a directory that contains it."""

    file: InputFile
    named: bool


@dataclass(frozen=True)
class ResolvedSource:
    """A source with its type and its files, sorted by name. label: the source's name."""

    label: str
    type: SourceType
    files: list[InputFile]

    @property
    def bytes(self) -> int:
        """Total size of the files, as stored."""
        return sum(file.bytes for file in self.files)


def resolve(source: Source, *, at: str, without: Iterable[Path] = ()) -> ResolvedSource:
    """Lists the files of a source.

    Args:
        source: a source with paths.
        at: its dotted path in the config, for messages.
        without: directories that are never read, e.g. the output.

    Raises:
        ConfigError: a path matches nothing, the type of the files is ambiguous, or record fields are set for text
        files.
    """
    excluded = {str(Path(os.path.abspath(p))) for p in without}  # noqa: PTH100 - must not follow links
    found: dict[str, InputFile] = {}
    kinds: set[SourceType] = set()
    for path in source.paths:
        kind, files = _expand(path, source, at, excluded)
        kinds.add(kind)
        many = len(source.paths) > 1
        for file in files:
            named = replace(file, name=f"{path}/{file.name}") if many else file
            found.setdefault(_key(file.path), named)
    if len(kinds) > 1:
        raise _ambiguous_type(at, ", ".join(sorted(kinds)))
    kind = kinds.pop()
    for key in ("messages_field", "id_field") if kind == "text" else ():
        if (value := getattr(source, key)) is not None:
            why = "its files are plain text, which has no fields"
            raise ConfigError(f"{at}.{key}", value, why=why, remedy="remove it, or give jsonl or parquet files")
    return ResolvedSource(source.label, kind, sorted(found.values(), key=lambda f: f.name))


def listing_fingerprint(sources: Iterable[ResolvedSource]) -> str:
    """SHA-256 of all names and sizes: it changes when a file is added, removed, renamed or resized."""
    digest = hashlib.sha256()
    for source in sources:
        for file in source.files:
            digest.update(json.dumps([source.label, file.name, file.bytes]).encode() + b"\n")
    return digest.hexdigest()


def _key(path: str) -> str:
    """Identity of a file that several paths match."""
    return path if storage.is_remote(path) else os.path.abspath(path)  # noqa: PTH100 - must not follow links


def _expand(path: str, source: Source, at: str, excluded: set[str]) -> tuple[SourceType, list[InputFile]]:
    """The type of one path, and all files that it matches."""
    if _is_saved_dataset(path, source):
        return "datasets", [_local(name, file) for name, file in saved.saved_files(path, source.split, at=at)]
    found = _listed(path, excluded)
    if not found:
        remedy = f"check the path; it is relative to the directory you are in ({Path.cwd()})"
        raise ConfigError(f"{at}.path", path, why="there is no such file, or the directory is empty", remedy=remedy)
    names = [entry.file.name for entry in found]
    kind = source.type or _infer(names, source, at)
    chosen = _chosen(path, found, source, kind, at)
    if not chosen:
        why = f"none of its {len(found)} files has a name of the type {kind}: {_census(names)}"
        remedy = 'list the files to read in "include", e.g. ["*.txt"], or set "type"'
        raise ConfigError(f"{at}.path", path, why=why, remedy=remedy)
    return kind, chosen


def _chosen(path: str, found: list[_Found], source: Source, kind: SourceType, at: str) -> list[InputFile]:
    """The files that `include` and `exclude` select; without `include`, the usual names of the type and named files.

    Raises:
        ConfigError: the type was inferred from the names, and a glob more specific than `*` matches other types, too.
    """
    left = [entry for entry in found if not _matches(entry.file.name, source.exclude)]
    if source.include:
        return [entry.file for entry in left if _matches(entry.file.name, source.include)]
    usual = _DEFAULTS.get(kind, ("*.arrow",))
    if source.type is not None:
        return [entry.file for entry in left if entry.named or _matches(entry.file.name, usual)]
    odd = [entry.file.name for entry in left if entry.named and not _matches(entry.file.name, usual)]
    if odd and path.rsplit("/", 1)[-1].strip("*"):
        why = f"the pattern also matches {len(odd)} files that are not {kind} by their names: {', '.join(odd[:5])}"
        remedy = f'narrow the pattern, use "exclude", or set "type": "{kind}" if they are {kind}'
        raise ConfigError(f"{at}.path", path, why=why, remedy=remedy)
    return [entry.file for entry in left if _matches(entry.file.name, usual)]


def _is_saved_dataset(path: str, source: Source) -> bool:
    local = not storage.is_remote(path) and Path(path).is_dir()
    return local and (source.type == "datasets" or (source.type is None and saved.is_saved(path)))


def _listed(path: str, excluded: set[str]) -> list[_Found]:
    """The files of a path: the file itself, all files in a directory, or those that a glob matches or contains."""
    if storage.is_remote(path):
        listed = storage.listing(path)
        return [_Found(InputFile(e.name, e.url, e.stat.bytes, e.stat.version), e.named) for e in listed]
    if Path(path).is_dir():
        return [_Found(_local(name, file), named=False) for name, file in _walk(path, excluded)]
    if Path(path).is_file():
        return [_Found(_local(Path(path).name, path), named=True)]
    return _globbed(path, excluded)


def _globbed(pattern: str, excluded: set[str]) -> list[_Found]:
    """The files that a glob matches. Leading directories that exist under their literal name are not patterns."""
    root = pattern
    while root and not Path(root).is_dir():
        root = os.path.dirname(root)  # noqa: PTH120 - keeps the path as written
    found: dict[str, _Found] = {}
    hits = glob.glob(glob.escape(root) + pattern[len(root) :], recursive=True)  # noqa: PTH207 - may be absolute
    last = None
    for folder in sorted(f"{hit.rstrip('/')}/" for hit in hits):
        hit = folder[:-1]
        name = os.path.relpath(hit, root or ".")
        if _is_excluded(hit, excluded) or storage.SKIPPED_FOLDERS.intersection(name.split("/")) - set(
            pattern.split("/")
        ):
            continue
        if Path(hit).is_file():
            found[name] = _Found(_local(name, hit), named=True)
        elif Path(hit).is_dir() and not (last and folder.startswith(last)):
            last = folder
            for inner, file in _walk(hit, excluded):
                nested = os.path.normpath(f"{name}/{inner}")
                found.setdefault(nested, _Found(_local(nested, file), named=False))
    return list(found.values())


def _is_excluded(path: str, excluded: set[str]) -> bool:
    """Whether a path is one of the excluded directories, or in one."""
    absolute = f"{os.path.abspath(path)}/"  # noqa: PTH100 - must not follow links
    return any(absolute.startswith(f"{folder}/") for folder in excluded)


def _local(name: str, file: str) -> InputFile:
    stat = storage.stat(file)
    return InputFile(name, file, stat.bytes, stat.version)


def _walk(root: str, excluded: set[str]) -> Iterator[tuple[str, str]]:
    if _is_excluded(root, excluded):
        return
    for here, directories, files in os.walk(root, onerror=_raise):
        directories[:] = [
            d
            for d in directories
            if d[0] != "." and d not in storage.SKIPPED_FOLDERS and os.path.abspath(f"{here}/{d}") not in excluded  # noqa: PTH100
        ]
        for file in files:
            path = f"{here}/{file}"
            if file[0] != "." and os.path.isfile(path):  # noqa: PTH113 - a million calls
                yield os.path.relpath(path, root), path


def _raise(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be listed: {error.strerror}\n  try: make the directory readable, or exclude it"
    )


def _infer(names: list[str], source: Source, at: str) -> SourceType:
    counts = Counter(kind for name in names if (kind := _kind_of(name)) and not _matches(name, source.exclude))
    if len(counts) == 1:
        return next(iter(counts))
    if source.include and not counts:
        return "text"
    raise _ambiguous_type(at, ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or _census(names))


def _ambiguous_type(at: str, found: str) -> ConfigError:
    remedy = 'set it to "text", "jsonl", "parquet" or "datasets", or use one source per type'
    return ConfigError(f"{at}.type", why=f"the files are of several types or of an unknown one: {found}", remedy=remedy)


def _kind_of(name: str) -> SourceType | None:
    return next((kind for kind, patterns in _DEFAULTS.items() if _matches(name, patterns)), None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    base = name.rsplit("/", 1)[-1]
    return any(fnmatchcase(base, p) or fnmatchcase(name, p) for p in patterns)


def _census(names: list[str]) -> str:
    counts = Counter(Path(name).suffix or name for name in names)
    return ", ".join(f"{n} *{suffix}" for suffix, n in counts.most_common(5))
