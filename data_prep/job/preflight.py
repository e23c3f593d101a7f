"""Pre-flight checks of the inputs: missing files, unreadable files and columns, and splits without documents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.clean.chain import build_chain, dependency_versions
from data_prep.config.corpus import CorpusConfig, Source
from data_prep.formats.tokenfile import SPLITS
from data_prep.hashing import HELDOUT, content_hashes, select_fraction
from data_prep.sources.bad_records import BadRecordCount
from data_prep.sources.bytesource import DamagedFileError
from data_prep.sources.listing import ResolvedSource, resolve
from data_prep.sources.read_unit import read_unit, wanted_fields
from data_prep.sources.records import DAMAGED_FILE, BadRecord, TextBatch
from data_prep.sources.units import Unit
from data_prep.tokenizer.fingerprint import check_path, content_fingerprint
from foundation.directory import sha256_of_file
from foundation.errors import ConfigError, DataError
from foundation.user_function import load_function

_SHOWN = 5  # damaged files shown in a message


def resolve_sources(config: CorpusConfig, *, without: Iterable[Path]) -> list[ResolvedSource | None]:
    """Lists the files of every source; None for a builder, whose files do not exist yet.

    Args:
        without: directories to leave out.

    Raises:
        ConfigError: a path matches no file.
        DataError: all files are empty.
    """
    hidden = list(without)
    found = [
        None if source.builder else resolve(source, at=f"sources.{i}", without=hidden)
        for i, source in enumerate(config.sources)
    ]
    if not any(source is None or source.bytes for source in found):
        raise DataError("the corpus is empty: all its files have 0 bytes\n  try: check the paths of the sources")
    return found


def check_output(output: Path) -> None:
    """Checks that the output and its job directory can get their names.

    Raises:
        ConfigError: the name is too long, a dangling link stands in its place, or its parent is not a directory.
    """
    longest = _NAME_BYTES - len(os.fsencode(_LONGEST_NAME.format("")))
    if len(os.fsencode(output.name)) > longest:
        why = f"its last part has {len(os.fsencode(output.name))} bytes, and names beside it are longer"
        raise ConfigError("output", str(output), why=why, remedy=f"a name of at most {longest} bytes")
    if output.is_symlink() and not output.exists():
        why = f"it is a symbolic link to {os.readlink(output)}, which does not exist"  # noqa: PTH115 - as it is written
        raise ConfigError("output", str(output), why=why, remedy="remove the link, or name the directory it points to")
    for parent in output.parents:
        if parent.is_dir():
            return
        if parent.exists() or parent.is_symlink():
            remedy = "a path whose parents are directories, or do not exist yet"
            raise ConfigError("output", str(output), why=f"{parent} is not a directory", remedy=remedy)


_NAME_BYTES, _LONGEST_NAME = 255, ".{}.replaced"
"""Longest file name of usual file systems in bytes, and the longest name that a commit makes beside an output."""


def check_schemas(config: CorpusConfig, resolved: Iterable[ResolvedSource]) -> list[str]:
    """Checks the schema of every parquet and Arrow file.

    Returns:
        A line for the user for each source whose rows are read differently from how they are written.

    Raises:
        ConfigError: a column is missing.
        DataError: there are more damaged files than the config allows.
    """
    by_label = {source.label: (i, source) for i, source in enumerate(config.sources)}
    damaged: list[BadRecord] = []
    lines: list[str] = []
    for source in resolved:
        i, given = by_label[source.label]
        if source.type in ("parquet", "datasets", "arrow"):
            damaged += _check_files(source, given, lines, at=f"sources.{i}")
    BadRecordCount(config).add_all(damaged)
    return lines


def cleaning_identity(config: CorpusConfig) -> dict[str, Any] | None:
    """Dependencies of cleaning steps and own readers besides the config: checksums of files, versions of libraries.

    Raises:
        ConfigError: a file or a package is missing.
    """
    steps = config.all_steps
    readers = {i: source.reader for i, source in enumerate(config.sources) if source.reader is not None}
    if not steps and not readers:
        return None
    build_chain(config.clean)  # raises here instead of in every task
    for i, source in enumerate(config.sources):
        build_chain(source.clean or (), at=f"sources.{i}.clean")
    files = {file for section in steps for file in section.files()}
    files |= {str(load_function(name, field=f"sources.{i}.reader").path) for i, name in readers.items()}
    return {
        "files": {file: sha256_of_file(Path(file)) for file in sorted(files)},
        "versions": dependency_versions(steps),
    }


def tokenizer_identity(config: CorpusConfig) -> str | None:
    """Fingerprint of the given tokenizer's files and chat template, or None if neither is given.

    Raises:
        ConfigError: the path is not a tokenizer, or the template does not exist.
    """
    section, fingerprints = config.tokenizer, list[str]()
    if section.path is not None:
        check_path(section.path)
        fingerprints.append(content_fingerprint(section.path))
    if section.chat_template is not None:
        if not Path(section.chat_template).is_file():
            remedy = "a Jinja file; the path is relative to the directory you are in"
            raise ConfigError("tokenizer.chat_template", section.chat_template, why="no such file", remedy=remedy)
        fingerprints.append(sha256_of_file(Path(section.chat_template)))
    return "-".join(fingerprints) or None


def check_documents(units: Iterable[Unit], config: CorpusConfig) -> None:
    """Reads documents until every split has one: about 1 / heldout_fraction of them, or all if a split stays empty.

    Documents of an earlier corpus (`seen`) are not read, because they are not written.

    Raises:
        DataError: there are no documents at all, none in a split, or more unreadable records than the config allows.
    """
    sources = {source.label: source for source in config.sources}
    found: Counter[str] = Counter()
    bad = BadRecordCount(config)
    damaged: list[str] = []
    for unit in (unit for unit in units if not sources[unit.source].seen):
        for record in read_unit(unit, wanted_fields(sources[unit.source], max_bytes=config.max_record_bytes)):
            if isinstance(record, BadRecord):
                bad.add(record)
                bad.check()
                if record.reason == DAMAGED_FILE:
                    damaged.append(f"  {record.source}: {record.place()}: {record.detail}")
            elif _count_splits(record, found, config):
                return
    if not found:
        raise _no_documents(bad.records, damaged)
    check_splits_not_empty(found, config)


def check_splits_not_empty(
    documents: dict[str, int],
    config: CorpusConfig,
    *,
    dropped: dict[str, int] | None = None,
    bad: BadRecordCount | None = None,
) -> None:
    """Checks that every split has documents.

    Args:
        documents: number of documents in each split.
        dropped: number of documents dropped by cleaning and deduplication, by reason.
        bad: count of the unreadable records.

    Raises:
        DataError: a split is empty; the message names it, and a large enough fraction, or why no document is left.
    """
    if bad is not None and not dropped and not any(documents.values()):
        bad.check_any_used()
    for split in _splits(config):
        if not documents.get(split):
            total = sum(documents.values())
            fraction = config.heldout_fraction
            remedy = "more documents, or another seed"
            if split == "heldout" and total > 1:
                remedy = f"heldout_fraction {min(0.5, 5 / total):.2g}, another seed, or more documents"
            if dropped:
                most = sorted(dropped.items(), key=lambda item: -item[1])[:3]
                remedy = f"milder cleaning ({', '.join(f'{n:,} {reason}' for reason, n in most)}), or {remedy}"
            why = f"of {total} documents, heldout_fraction {fraction} and seed {config.seed} leave none for '{split}'"
            raise DataError(f"{why}\n  try: {remedy}")


def _count_splits(batch: TextBatch, found: Counter[str], config: CorpusConfig) -> bool:
    """Adds the documents of a batch to `found`; returns whether every split has one."""
    texts = [text for text in batch.texts if text]
    if texts:
        hashes = content_hashes(texts)[:, 0]
        heldout = select_fraction(hashes, fraction=config.heldout_fraction, seed=config.seed, purpose=HELDOUT)
        found += Counter({"heldout": int(heldout.sum()), "train": int((~heldout).sum())})
    return all(found[split] for split in _splits(config))


def _splits(config: CorpusConfig) -> tuple[str, ...]:
    """The splits that must have documents."""
    return SPLITS if config.has_heldout else SPLITS[:1]


def _no_documents(unreadable: int, damaged: list[str]) -> DataError:
    why = f"the corpus has no documents with text in them ({unreadable} unreadable records)"
    if not damaged:
        return DataError(f"{why}\n  try: check the paths and the text_field of the sources")
    shown = damaged[:_SHOWN] + ([f"  ... and {len(damaged) - _SHOWN} more"] if len(damaged) > _SHOWN else [])
    return DataError("\n".join([f"{why}, and some of its files are damaged:", *shown, "  try: repair or replace them"]))


def _check_files(source: ResolvedSource, given: Source, lines: list[str], *, at: str) -> list[BadRecord]:
    """Checks the files of a source; returns the damaged ones, and adds to the lines for the user."""
    from data_prep.sources import hf, parquet  # noqa: PLC0415

    check = parquet.check if source.type == "parquet" else hf.check
    damaged, lacks_keys = [], False
    for file in source.files:
        try:
            lacks_keys |= check(file.path, at=at, wanted=wanted_fields(given))
        except DamagedFileError as error:
            damaged.append(BadRecord(source.label, file.name, "file", None, DAMAGED_FILE, str(error)))
    if lacks_keys:
        lines.append(f"{source.label}: a null in its messages or tools counts as a key that the row does not have")
    return damaged
