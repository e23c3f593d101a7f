"""Files of an existing tokenizer, and its fingerprint: equal if two folders encode text as the same ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from foundation.directory import fingerprint_of, sha256_of_file
from foundation.errors import ConfigError, DataError
from foundation.remote_folder import local_folder

TOKENIZER_JSON = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
MODEL_FILES = (MODEL_FILE, "spiece.model", "sentencepiece.bpe.model")
"""Names that transformers gives the sentencepiece model in a folder."""
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates within the tokenizer's folder."""
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")
"""Globs of the files that make up a tokenizer of transformers, without chat templates."""
_IRRELEVANT = ("version", "truncation", "padding", "post_processor")
"""Keys of tokenizer.json that do not affect a document's ids: they truncate, pad or wrap a prompt, and transformers
rewrites them at every `save_pretrained`."""
_TEMPLATES = ("chat_template*", f"{NAMED_TEMPLATES}/*")
_FILES = ("config.json", *TOKENIZER_FILES, *_TEMPLATES)


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 of the canonical JSON of the parts that encode text: normalizer, pre-tokenizer, model, added tokens.

    `tokenizers` first loads and re-serializes the file: older serializations of the same tokenizer (merges as "a b",
    missing defaults) have the same hash, and a folder keeps its fingerprint through `AutoTokenizer...save_pretrained`.

    Raises:
        DataError: tokenizer.json is missing or damaged.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - modules that only read manifests import this one, and need no library

    path = Path(folder) / TOKENIZER_JSON
    if not path.is_file():
        raise DataError(f"{path} is missing\n  try: name a folder with a {TOKENIZER_JSON}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise DataError(f"{path} is damaged: {error}\n  try: download or copy the tokenizer again") from None
    return fingerprint_of_loaded(tokenizer)


def fingerprint_of_loaded(tokenizer: Any) -> str:
    """`tokenizer_fingerprint` for a loaded `tokenizers.Tokenizer`."""
    content = orjson.loads(tokenizer.to_str())
    kept = {key: value for key, value in content.items() if key not in _IRRELEVANT}
    kept["added_tokens"] = sorted(kept["added_tokens"], key=lambda token: token["id"])
    return fingerprint_of(kept)


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
