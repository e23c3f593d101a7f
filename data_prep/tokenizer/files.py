"""Files of an existing tokenizer: checks and a fingerprint that need no tokenizer library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from data_prep.tokenizer.fingerprint import NAMED_TEMPLATES, TOKENIZER_FILES
from headrace.base.directory import sha256_of_file
from headrace.base.errors import ConfigError
from headrace.base.remote_folder import local_folder

_TEMPLATES = ("chat_template*", f"{NAMED_TEMPLATES}/*")
_FILES = ("config.json", *TOKENIZER_FILES, *_TEMPLATES)


def check_path(path: str) -> None:
    """Refuses a path that is neither a tokenizer folder nor a .model file.

    Raises:
        ConfigError: the path does not exist or is something else.
    """
    root = local_folder(path)
    remedy = "name a local folder with a tokenizer.json, or a sentencepiece .model file"
    if not root.exists():
        raise ConfigError("tokenizer.path", path, why="there is no such file or folder", remedy=remedy)
    if root.is_dir() and not _files(root) - _matching(root, ("config.json", *_TEMPLATES)):
        raise ConfigError("tokenizer.path", path, why="the folder contains no tokenizer", remedy=remedy)
    if root.is_file() and root.suffix != ".model":
        raise ConfigError("tokenizer.path", path, why="the file is not a .model file", remedy=remedy)


def content_fingerprint(path: str) -> str:
    """SHA-256 of the tokenizer's files and chat templates; model weights in the same folder are ignored."""
    root = local_folder(path)
    digest = hashlib.sha256()
    for file in sorted(_files(root)) if root.is_dir() else [root]:
        name = file.relative_to(root).as_posix() if file != root else file.name
        digest.update(f"{name}\0{sha256_of_file(file)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> set[Path]:
    return _matching(folder, _FILES)


def _matching(folder: Path, patterns: Sequence[str]) -> set[Path]:
    return {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
