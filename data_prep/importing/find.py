"""Finds out what a folder of another tool contains: its format, its files in order, and each file's split."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.formats.dsfile import DS, INDEX, tokenizer_name
from data_prep.formats.tokenfile import SPLITS
from data_prep.importing import arrow_rows, chunk_files
from data_prep.importing.documents import TokenSource
from data_prep.importing.flat_arrays import FlatFile, open_flat
from data_prep.importing.indexed_files import open_file
from foundation.directory import MANIFEST
from foundation.errors import ConfigError, DataError
from foundation.foreign_folders import what_it_is

_TRAIN, _HELDOUT = SPLITS
_HELDOUT_WORDS = {"val", "valid", "validation", "heldout", "eval", "dev"}
_TEST = "test"
_WITH_DTYPE = ("litdata", "datasets", "Parquet", "Megatron-LM", "datatrove")
_KNOWN = (
    "tokens of datatrove, nanotron, Megatron-LM, OLMo, llm.c, nanoGPT, litdata or MosaicML streaming, Parquet files or"
    " a folder of save_to_disk with input_ids"
)


@dataclass
class FoundTokens:
    """The tokens in a folder.

    Attributes:
        kind: name of the format, for people.
        sources: split -> files, in order.
        borders: whether the format records where documents end; rows count as documents.
        rows: whether samples are rows, which may be windows instead of documents.
        eos_first: whether the tool puts end-of-text before each document.
        made_with: tokenizer that the format names, or None.
        left_out: names of columns and files that are not read.
    """

    kind: str
    sources: dict[str, list[TokenSource]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    borders: bool = True
    rows: bool = False
    eos_first: bool = False
    made_with: str | None = None
    left_out: list[str] = field(default_factory=list)

    def add(self, source: TokenSource, name: str) -> None:
        """Adds a file to the split that its name indicates."""
        words = set(re.split("[^a-z]+", name.lower()))
        if words & _HELDOUT_WORDS:
            self.sources[_HELDOUT].append(source)
        elif _TEST in words and "train" not in words:
            self.left_out.append(f"{name} (a test split)")
        else:
            self.sources[_TRAIN].append(source)


def find(path: Path, *, dtype: str | None, vocab_size: int) -> FoundTokens:
    """Recognises a folder or a file, and checks all headers and sizes.

    A folder may have files of one format, or folders of one format, such as train/ and validation/.

    Args:
        path: path of the tokens.
        dtype: dtype for formats that do not record it (uint16, uint32, ...), or None.
        vocab_size: number of ids of the tokenizer.

    Raises:
        DataError: the format is not known, or a file is damaged.
        ConfigError: `dtype` is given although the format records it.
    """
    if not path.exists() and not Path(f"{path}.idx").is_file():
        raise DataError(f"{path}: there is no such file or folder\n  try: a folder with {_KNOWN}")
    if path.is_dir() and (path / MANIFEST).is_file():
        raise DataError(f"{path} has a {MANIFEST}: it is a directory of headrace\n  try: name it in data.sources")
    folders = [("", path)]
    if path.is_dir() and not _has_tokens(path):
        folders = [(each.name, each) for each in sorted(path.iterdir()) if each.is_dir() and _has_tokens(each)]
    found = [_found(folder, name, dtype, vocab_size) for name, folder in folders]
    kinds = sorted({each.kind for each in found})
    if len(kinds) != 1:
        what = f"holds {' and '.join(kinds)}" if kinds else "holds no tokens in a known format"
        raise DataError(f"{path} {what}{'' if kinds else what_it_is(path, f'a folder with {_KNOWN}')}")
    if dtype is not None and kinds[0] in _WITH_DTYPE:
        why = f"{path} has the format {kinds[0]}, which records the dtype"
        raise ConfigError("--dtype", dtype, why=why, remedy="leave it out")
    return _merged(found)


def _has_tokens(folder: Path) -> bool:
    return bool(chunk_files.read_index(folder)) or (folder / arrow_rows.STATE).is_file() or bool(_suffix(folder))


def _suffix(path: Path) -> str:
    """Suffix of a folder's token files, or of the file itself; an index counts before its tokens; "" for none."""
    for suffix in (".parquet", DS, ".idx", ".npy", ".bin"):
        if next(_files(path, suffix), None) is not None:
            return suffix
    return ""


def _files(path: Path, suffix: str) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(each for each in path.glob(f"*{suffix}") if each.is_file())
    elif path.name.endswith(suffix):
        yield path
    elif suffix == ".idx" and Path(f"{path}.idx").is_file():
        yield Path(f"{path}.idx")


def _found(folder: Path, name: str, dtype: str | None, vocab_size: int) -> FoundTokens:
    index = chunk_files.read_index(folder)
    if "shards" in index:
        shards, others = chunk_files.open_mds(folder, index, dtype=dtype)
        return _of("MosaicML streaming", shards, [name] * len(shards), rows=True, left_out=_columns(others))
    if "chunks" in index:
        chunks = chunk_files.open_litdata(folder, index)
        return _of("litdata", chunks, [name] * len(chunks), rows=True)
    if (folder / arrow_rows.STATE).is_file():
        saved, others = arrow_rows.open_saved(folder)
        return _of("datasets", saved, [name] * len(saved), rows=True, left_out=_columns(others))
    suffix = _suffix(folder)
    paths = list(_files(folder, suffix))
    names = [f"{name}/{path.stem}" if folder.is_dir() else "" for path in paths]
    if suffix == ".parquet":
        opened = [arrow_rows.open_parquet(path) for path in paths]
        left_out = _columns(sorted({other for _, others in opened for other in others}))
        return _of("Parquet", [rows for rows, _ in opened], names, rows=True, left_out=left_out)
    return _arrays(suffix, paths, names, dtype, vocab_size)


def _arrays(suffix: str, paths: list[Path], names: list[str], dtype: str | None, vocab_size: int) -> FoundTokens:
    made_with = tokenizer_name(paths[0]) if suffix == DS else None
    if suffix == ".idx":
        return _of("Megatron-LM", [open_file(path.with_suffix("")) for path in paths], names)
    if suffix == DS and any(Path(f"{path}{INDEX}").is_file() for path in paths):
        return _of("datatrove", list(map(open_file, paths)), names, made_with=made_with)
    flat = [open_flat(path, dtype=dtype, vocab_size=vocab_size) for path in paths]
    _check_alike(flat)
    first, borders = flat[0].eos_first, flat[0].ends is not None
    return _of(flat[0].kind, flat, names, borders=borders, eos_first=first, made_with=made_with)


def _of(
    kind: str,
    sources: Sequence[TokenSource],
    names: Sequence[str],
    *,
    borders: bool = True,
    rows: bool = False,
    eos_first: bool = False,
    made_with: str | None = None,
    left_out: list[str] | None = None,
) -> FoundTokens:
    found = FoundTokens(
        kind, borders=borders, rows=rows, eos_first=eos_first, made_with=made_with, left_out=left_out or []
    )
    for source, name in zip(sources, names, strict=True):
        found.add(source, name)
    return found


def _columns(names: Sequence[str]) -> list[str]:
    return [f"column {name}" for name in names]


def _check_alike(files: list[FlatFile]) -> None:
    """Raises DataError if a folder's files are of several tools or dtypes, or some lack their documents' ends."""
    for what, key in (
        ("dtype", lambda file: file.dtype),
        ("format", lambda file: file.kind),
        ("documents' ends (.csv.gz)", lambda file: "some" if file.ends else "none"),
    ):
        found = {key(file): file.path for file in files}
        if len(found) > 1:
            shown = " and ".join(f"{value} in {path.name}" for value, path in found.items())
            raise DataError(
                f"{files[0].path.parent} has files of more than one {what}: {shown}\n  try: a folder for each"
            )


def _merged(found: list[FoundTokens]) -> FoundTokens:
    whole = found[0]
    for other in found[1:]:
        for split in SPLITS:
            whole.sources[split] += other.sources[split]
        whole.borders &= other.borders
        whole.left_out += [name for name in other.left_out if name not in whole.left_out]
    return whole
