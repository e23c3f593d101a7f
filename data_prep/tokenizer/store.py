"""Store of trained tokenizers beside the outputs: a tokenizer is trained once for equal texts and settings.

    .headrace-tokenizers/KEY/files/       the files that `train.train` wrote
    .headrace-tokenizers/KEY/done.json    the SHA-256 of each of the files, and a checksum

KEY hashes all inputs that determine the files, see `training_key`. An entry appears by a rename: several jobs may use a
store at the same time. When an entry is used, its files are compared with their checksums. The last few entries are
kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from data_prep.config.corpus import TokenizerSection
from data_prep.task import MARKER, SCRATCH, atomic_directory, read_marker, scratch_path, with_checksum
from data_prep.tokenizer import long_words, sentencepiece_model, train
from foundation.directory import fingerprint_of, write_json
from foundation.errors import DataError
from foundation.version import __version__

_KEPT = 4
_ABANDONED_S = 24 * 3600.0
"""Age above which the scratch directory of a killed process is removed."""
_FILES = "files"
_NOT_TRAINED_ON = {"path", "engine", "chat_template", "date", "sample_bytes"}
"""Keys of the section that do not affect training, except through the texts, which are hashed."""
_MEMORY_BYTES = 128 << 20
"""Largest size in memory; a larger sample goes to a file. Twice the default sample, which sentencepiece also copies."""
_LENGTH_BYTES = 8


def training_key(section: TokenizerSection, texts: SpooledTexts) -> str:
    """Hash of everything that determines a trained tokenizer: texts, settings, libraries, and training code."""
    code = [_sha256(Path(str(module.__file__)).read_bytes()) for module in (train, sentencepiece_model, long_words)]
    libraries = {name: version(name) for name in ("tokenizers", "sentencepiece")}
    settings = section.model_dump(exclude=_NOT_TRAINED_ON)
    made_by = {"headrace": __version__, "code": code, **libraries}
    return fingerprint_of({"texts": texts.sha256, "settings": settings, "made by": made_by})[:32]


def train_or_reuse(texts: SpooledTexts, folder: Path, section: TokenizerSection, store: TokenizerStore) -> list[str]:
    """Copies the stored tokenizer into `folder`, or trains and stores one; the files are the same.

    Returns:
        Lines for the user: which stored tokenizer was reused, or why none was.

    Raises:
        ConfigError: there are too few texts for a vocabulary of that size.
    """
    key = training_key(section, texts)
    entry, lines = store.root / key, list[str]()
    try:
        if store.take(key, folder):
            return [f"taken from {entry}, trained before on the same texts with the same settings"]
    except DataError as error:
        lines.append(f"trained anew: {error}")
        store.remove(key)
    train.train(texts, folder, section)
    try:
        store.keep(key, folder)
    except OSError as error:
        lines.append(f"not stored for later jobs: {error}")
    return lines


@dataclass(frozen=True)
class TokenizerStore:
    """A directory of trained tokenizers."""

    root: Path

    def take(self, key: str, folder: Path) -> bool:
        """Copies the files of an entry into `folder`; returns whether there is such an entry.

        Raises:
            DataError: the entry is damaged, or has been removed meanwhile; nothing is copied.
        """
        entry = self.root / key
        if not entry.is_dir():
            return False
        for name, content in self._read(entry):
            (folder / name).write_bytes(content)
        with suppress(OSError):  # this user may only have read access to the store
            os.utime(entry)
        return True

    def keep(self, key: str, folder: Path) -> None:
        """Stores the files of `folder` and removes all but the last few entries.

        Raises:
            OSError: the store cannot be written to.
        """
        self.root.mkdir(exist_ok=True)
        with atomic_directory(self.root / key) as scratch:
            shutil.copytree(folder, scratch / _FILES, copy_function=shutil.copyfile)
            sums = {path.name: _sha256(path.read_bytes()) for path in (scratch / _FILES).iterdir()}
            write_json(scratch / MARKER, with_checksum({"sha256": sums}))
        with suppress(OSError):  # another process may be removing the same entry
            self._prune(self.root / key)

    def remove(self, key: str) -> None:
        """Removes an entry, in one step."""
        aside = scratch_path(self.root / key)
        with suppress(OSError):
            (self.root / key).rename(aside)
            shutil.rmtree(aside)

    @staticmethod
    def _read(entry: Path) -> list[tuple[str, bytes]]:
        """Reads the files of an entry; returns names and contents."""
        try:
            marker = read_marker(entry) or {}
            files = [(Path(name).name, (entry / _FILES / name).read_bytes()) for name in sorted(marker["sha256"])]
            wrong = [name for name, content in files if _sha256(content) != marker["sha256"][name]]
        except (OSError, KeyError, TypeError, AttributeError, DataError) as error:
            reason = str(error).split("\n", maxsplit=1)[0]
            raise DataError(f"the stored {entry} cannot be read ({type(error).__name__}: {reason})") from None
        if wrong or not files:
            raise DataError(f"the stored {entry} is damaged ({', '.join(wrong) or 'no files'})")
        return files

    def _prune(self, newest: Path) -> None:
        now = newest.stat().st_mtime  # by the clock of the file system
        for path in list(_oldest_after(self.root, _KEPT, first=newest)):
            self.remove(path.name)
        for path in self.root.glob(SCRATCH):
            if now - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _oldest_after(root: Path, count: int, *, first: Path) -> Iterator[Path]:
    """Yields the entries of a store except `count` of them: `first` and the most recently used."""
    used = [(path.stat().st_mtime, path) for path in root.iterdir() if path != first and path.name[0] != "."]
    yield from (path for _, path in sorted(used, reverse=True)[count - 1 :])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class SpooledTexts:
    """Texts in order; they can be iterated any number of times, but not concurrently.

    Attributes:
        file: file with each text as its length in bytes (8 bytes, little-endian) and its UTF-8.
        sha256: SHA-256 of the file, in hexadecimal.
        text_bytes: UTF-8 bytes of all texts.
    """

    file: IO[bytes]
    sha256: str
    text_bytes: int

    def __iter__(self) -> Iterator[str]:
        self.file.seek(0)
        while length := self.file.read(_LENGTH_BYTES):
            yield self.file.read(int.from_bytes(length, "little")).decode()


@contextmanager
def spool(texts: Iterable[str], directory: Path) -> Iterator[SpooledTexts]:
    """Reads all texts; they are kept until the block ends.

    Args:
        directory: directory for the unnamed file of a large sample.

    Raises:
        OSError: the disk is full.
    """
    digest, total = hashlib.sha256(), 0
    with SpooledTemporaryFile(_MEMORY_BYTES, dir=str(directory)) as file:
        for text in texts:
            raw = text.encode()
            framed = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
            digest.update(framed)
            file.write(framed)
            total += len(raw)
        yield SpooledTexts(file, digest.hexdigest(), total)
