"""Lists the input files of a source: resolves paths, globs and types; sizes and order are the same on every machine."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from data_prep.config.corpus import Source, SourceType
from data_prep.sources import saved, storage
from data_prep.sources.bytesource import lz4_frame
from data_prep.sources.local_files import expand_glob, file_stat, is_excluded, walk_files
from foundation.errors import ConfigError
from foundation.storage import is_remote

_JSONL = (
    *("*.jsonl", "*.ndjson"),
    *(f"*.{kind}{suffix}" for suffix in storage.COMPRESSED for kind in ("jsonl", "ndjson", "json")),
)
_JSON = ("*.json",)
"""Patterns read only if there is nothing else: beside other files, a `.json` mostly lists or describes them."""
_TEXT_SUFFIXES = """
    txt md markdown rst adoc org tex html htm css
    py pyi pyx ipy c h cc cpp cxx hpp hh cu cuh rs go java kt scala swift m cs fs js mjs ts jsx tsx php rb pl pm lua
    r jl sh bash zsh fish ps1 sql hs ml mli ex exs erl clj el lisp scm zig nim dart v vhd cmake mk proto toml ini cfg
    yaml yml
""".split()  # noqa: SIM905 - shorter than a list literal
_TEXT = (*(f"*.{suffix}" for suffix in _TEXT_SUFFIXES), "README*", "LICENSE*", "Makefile", "Dockerfile")
_DEFAULTS: dict[SourceType, tuple[str, ...]] = {"text": _TEXT, "jsonl": _JSONL, "parquet": ("*.parquet",)}
_ARCHIVES: dict[SourceType, tuple[str, ...]] = {
    "arrow": ("*.arrow", "*.feather", "*.ipc"),
    "warc": tuple(f"*.{kind}{suffix}" for suffix in ("", *storage.COMPRESSED) for kind in ("warc", "wet")),
    "webdataset": ("*.tgz", *(f"*.tar{suffix}" for suffix in ("", *storage.COMPRESSED))),
}
"""Types inferred only if there is nothing else: beside other files, an archive mostly holds the same data."""

_NOT_IN: dict[SourceType, tuple[str, ...]] = {"text": ("messages_field", "id_field"), "warc": ("messages_field",)}
SAME_FILE = "other names of the same file"
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source.

    Attributes:
        name: name that identifies the file within the source, wherever the source's directory is.
        path: current path or URL.
        bytes: size as stored.
        version: `KEY=VALUE` from the store's metadata (`foundation.storage.Stat`), or empty.
    """

    name: str
    path: str
    bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file found at a path.

    Attributes:
        named: whether the path or glob matches the file itself, rather than a directory that contains it.
        identity: value that is equal for one file under several paths.
    """

    file: InputFile
    named: bool
    identity: object

    @classmethod
    def local(cls, name: str, path: str, stat: os.stat_result, *, named: bool) -> _ListedFile:
        """A local file. Its size and modification time count, too: some file systems reuse or invent inodes."""
        version = storage.local_stat(stat)
        identity = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        return cls(InputFile(name, path, version.bytes, version.version), named, identity)


@dataclass(frozen=True)
class ResolvedSource:
    """A source with its type and its files, sorted by name.

    Attributes:
        label: the source's name.
        left_out: suffix or kind -> number of files and links in its paths that are not read, except hidden and excluded
            ones.
    """

    label: str
    type: SourceType
    files: list[InputFile]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """Total size of the files, as stored."""
        return sum(file.bytes for file in self.files)


def resolve(source: Source, *, at: str, without: Iterable[Path] = ()) -> ResolvedSource:
    """Lists the files of a source.

    Args:
        source: a source with paths.
        at: dotted path of the source in the config, for messages.
        without: directories that are never read, e.g. the output.

    Raises:
        ConfigError: a path matches nothing, the type of the files is ambiguous, or record fields are set for text
        files.
        DataError: the package for a compression is missing.
    """
    excluded = {str(Path(os.path.abspath(p))) for p in without}  # noqa: PTH100 - must not follow links
    found: dict[object, InputFile] = {}
    kinds: set[SourceType] = set()
    left_out: Counter[str] = Counter()
    for path in source.paths:
        kind, files = _expand(path, source, at, excluded, left_out)
        kinds.add(kind)
        many = len(source.paths) > 1
        for entry in sorted(files, key=lambda f: f.file.name):
            file = entry.file
            named = replace(file, name=f"{path}/{file.name}") if many else file
            other = found.setdefault(entry.identity, named)
            if other is not named and _path_key(other.path) != _path_key(file.path):
                left_out[SAME_FILE] += 1
                if _is_real(file.path) and not _is_real(other.path):
                    found[entry.identity] = named
    if len(kinds) > 1:
        raise _ambiguous_type(at, ", ".join(sorted(kinds)))
    kind = kinds.pop()
    if any(file.path.endswith(".lz4") for file in found.values()):
        lz4_frame()
    for key in _NOT_IN.get(kind, ()):
        if (value := getattr(source, key)) is not None:
            why = "its files are plain text, which has no fields" if kind == "text" else "WARC holds no conversations"
            raise ConfigError(f"{at}.{key}", value, why=why, remedy="remove it, or give jsonl or parquet files")
    return ResolvedSource(source.label, kind, sorted(found.values(), key=lambda f: f.name), +left_out)


def left_out_line(source: ResolvedSource) -> str | None:
    """One line on the files of a source that are not read; None if all are read."""
    kinds = [f"{count:,} {kind}" for kind, count in source.left_out.most_common(_SHOWN)]
    more = len(source.left_out) - len(kinds)
    kinds += [f"{more} more kinds"] if more else []
    return f"not read in '{source.label}': {', '.join(kinds)}" if kinds else None


def listing_fingerprint(sources: Iterable[ResolvedSource]) -> str:
    """SHA-256 of all names and sizes: it changes when a file is added, removed, renamed or resized."""
    digest = hashlib.sha256()
    for source in sources:
        for file in source.files:
            digest.update(json.dumps([source.label, file.name, file.bytes]).encode() + b"\n")
    return digest.hexdigest()


def _path_key(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100 - must not follow links


def _is_real(path: str) -> bool:
    """Whether no part of a path is a link."""
    return os.path.realpath(path) == os.path.abspath(path)  # noqa: PTH100


def _expand(
    path: str, source: Source, at: str, excluded: set[str], left_out: Counter[str]
) -> tuple[SourceType, list[_ListedFile]]:
    """The type of one path, and all files that it matches."""
    if _is_saved_dataset(path, source):
        listed = saved.saved_files(path, source.split, at=at)
        return "datasets", [_ListedFile.local(name, file, os.stat(file), named=False) for name, file in listed]  # noqa: PTH116
    found = _listed(path, excluded, left_out)
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
    taken = {entry.file.name for entry in chosen}
    others = (n for n in names if n not in taken and not _matches(n, source.exclude))
    left_out.update(f"*{Path(name).suffix}" if Path(name).suffix else name for name in others)
    return kind, chosen


def _chosen(path: str, found: list[_ListedFile], source: Source, kind: SourceType, at: str) -> list[_ListedFile]:
    """The files that `include` and `exclude` select; without `include`, the type's usual names and named files.

    Raises:
        ConfigError: the type was inferred from names, and a glob more specific than `*` also matches other types.
    """
    left = [entry for entry in found if not _matches(entry.file.name, source.exclude)]
    if source.include:
        return [entry for entry in left if _matches(entry.file.name, source.include)]
    usual = _usual(kind, [entry.file.name for entry in left])
    if source.type is not None:
        return [entry for entry in left if entry.named or _matches(entry.file.name, usual)]
    odd = [entry.file.name for entry in left if entry.named and not _matches(entry.file.name, usual)]
    if odd and path.rsplit("/", 1)[-1].strip("*"):
        why = f"the pattern also matches {len(odd)} files that are not {kind} by their names: {', '.join(odd[:5])}"
        remedy = f'narrow the pattern, use "exclude", or set "type": "{kind}" if they are {kind}'
        raise ConfigError(f"{at}.path", path, why=why, remedy=remedy)
    return [entry for entry in left if _matches(entry.file.name, usual)]


def _is_saved_dataset(path: str, source: Source) -> bool:
    local = not is_remote(path) and Path(path).is_dir()
    return local and (source.type == "datasets" or (source.type is None and saved.is_saved(path)))


def _listed(path: str, excluded: set[str], left_out: Counter[str]) -> list[_ListedFile]:
    """The files of a path: the file itself, all files in a directory, or files that a glob matches or contains."""
    if is_remote(path):
        listed = storage.listing(path)
        return [_ListedFile(InputFile(e.name, e.url, e.stat.bytes, e.stat.version), e.named, e.url) for e in listed]
    if Path(path).is_dir():
        return [_ListedFile.local(*each, named=False) for each in walk_files(path, excluded, left_out)]
    if (stat := file_stat(path)) is not None:
        return [_ListedFile.local(Path(path).name, path, stat, named=True)]
    return _globbed(path, excluded, left_out)


def _globbed(pattern: str, excluded: set[str], left_out: Counter[str]) -> list[_ListedFile]:
    """The files that a glob matches. Leading directories that exist under their literal name are not patterns."""
    root = pattern
    while root and not Path(root).is_dir():
        root = os.path.dirname(root)  # noqa: PTH120 - keeps the path as written
    found: dict[str, _ListedFile] = {}
    hits = expand_glob(glob.escape(root) + pattern[len(root) :], left_out)
    last = None
    for folder in sorted({f"{hit.rstrip('/')}/" for hit in hits}):
        hit = folder[:-1]
        name = os.path.relpath(hit, root or ".")
        if is_excluded(hit, excluded) or storage.SKIPPED_FOLDERS.intersection(name.split("/")) - set(
            pattern.split("/")
        ):
            continue
        if (stat := file_stat(hit)) is not None:
            found[name] = _ListedFile.local(name, hit, stat, named=True)
        elif Path(hit).is_dir() and not (last and folder.startswith(last)):
            last = folder
            for inner, file, stat in walk_files(hit, excluded, left_out):
                nested = os.path.normpath(f"{name}/{inner}")
                found.setdefault(nested, _ListedFile.local(nested, file, stat, named=False))
    return list(found.values())


def _infer(names: list[str], source: Source, at: str) -> SourceType:
    """The type of the files that `include` and `exclude` select."""
    names = [name for name in names if not _matches(name, source.exclude)]
    names = [name for name in names if _matches(name, source.include)] if source.include else names
    counts = Counter(kind for name in names if (kind := _kind_of(name, _DEFAULTS)))
    counts = counts or Counter(kind for name in names if (kind := _kind_of(name, _ARCHIVES)))
    if len(counts) == 1:
        return next(iter(counts))
    if not counts and names and all(_matches(name, _JSON) for name in names):
        return "jsonl"
    if source.include and not counts:
        return "text"
    if names and all(name.endswith((".csv", ".tsv")) for name in names):
        raise _table_type(at, source, tabs=names[0].endswith(".tsv"))
    raise _ambiguous_type(at, ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or _census(names))


def _table_type(at: str, source: Source, *, tabs: bool) -> ConfigError:
    kwargs = {"data_files": source.path, **({"sep": "\t"} if tabs else {})}
    builder = {"type": "datasets", "builder": "csv", "kwargs": kwargs}
    instead = {**builder, "split": "train", "text_field": source.text_field}
    why, remedy = "tables of comma- or tab-separated values are read by the library datasets", json.dumps(instead)
    return ConfigError(at, source.path, why=why, remedy=f"{remedy}, with the column of the text as text_field")


def _ambiguous_type(at: str, found: str) -> ConfigError:
    known = ", ".join(f'"{kind}"' for kind in (*_DEFAULTS, *_ARCHIVES))
    remedy = f'set it to {known} or "datasets", or use one source per type'
    return ConfigError(f"{at}.type", why=f"the files are of several types or of an unknown one: {found}", remedy=remedy)


def _usual(kind: SourceType, names: list[str]) -> tuple[str, ...]:
    """Patterns of the usual file names of a type."""
    usual = ("*",) if kind == "function" else (_DEFAULTS | _ARCHIVES).get(kind, ("*.arrow",))
    return _JSON if kind == "jsonl" and not any(_matches(name, usual) for name in names) else usual


def _kind_of(name: str, names: dict[SourceType, tuple[str, ...]]) -> SourceType | None:
    return next((kind for kind, patterns in names.items() if _matches(name, patterns)), None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    base = name.rsplit("/", 1)[-1]
    return any(fnmatchcase(base, p) or fnmatchcase(name, p) for p in patterns)


def _census(names: list[str]) -> str:
    counts = Counter(Path(name).suffix or name for name in names)
    return ", ".join(f"{n} *{suffix}" for suffix, n in counts.most_common(5))
