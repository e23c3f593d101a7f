"""Copies and checks the files of a Hugging Face tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from data_prep.tokenizer.fingerprint import TOKENIZER_FILES
from headrace.base.errors import DataError

# the license is copied too: it must accompany the weights
_COPIED = (*TOKENIZER_FILES, "*.jinja", "LICENSE*")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files, and no other files of the folder, such as weights."""
    for pattern in _COPIED:
        for file in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(file, target / file.name)


def check_tokenizer_folder(folder: Path) -> None:
    """Raises DataError unless the folder contains a tokenizer that `AutoTokenizer` can load."""
    if not (folder / "tokenizer_config.json").is_file():
        what = "no such directory" if not folder.is_dir() else "it has no tokenizer_config.json"
        raise DataError(f"{folder}: {what}\n  try: the tokenizer/ of the tokens directory the run was trained on")
