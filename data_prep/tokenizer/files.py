"""The files of a given tokenizer: what is looked at before any library is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from data_prep.tokenizer.fingerprint import TOKENIZER_FILES
from headrace.base.directory import sha256_of_file
from headrace.base.errors import ConfigError

_TEMPLATES = ("chat_template*", "additional_chat_templates/*")
_FILES = ("config.json", *TOKENIZER_FILES, *_TEMPLATES)


def check_path(path: str) -> None:
    """Refuses a path that is neither a tokenizer folder nor a .model file.

    Raises:
        ConfigError: with what was looked for.
    """
    here = Path(path)
    remedy = "a folder with tokenizer.json, or a sentencepiece .model file, on this machine"
    if not here.exists():
        raise ConfigError("tokenizer.path", path, why="there is no such file or folder", remedy=remedy)
    if here.is_dir() and not _files(here) - _matching(here, ("config.json", *_TEMPLATES)):
        raise ConfigError("tokenizer.path", path, why="the folder holds no tokenizer", remedy=remedy)
    if here.is_file() and here.suffix != ".model":
        raise ConfigError("tokenizer.path", path, why="a file, but no .model file", remedy=remedy)


def content_fingerprint(path: str) -> str:
    """SHA-256 of the tokenizer's files and chat templates; model weights beside them do not enter."""
    here = Path(path)
    digest = hashlib.sha256()
    for file in sorted(_files(here)) if here.is_dir() else [here]:
        name = file.relative_to(here).as_posix() if file != here else file.name
        digest.update(f"{name}\0{sha256_of_file(file)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> set[Path]:
    return _matching(folder, _FILES)


def _matching(folder: Path, patterns: Sequence[str]) -> set[Path]:
    return {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
