"""Copies, checks and loads the files of a Hugging Face tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from data_prep.tokenizer.fingerprint import NAMED_TEMPLATES, TOKENIZER_FILES
from foundation.errors import DataError

# the license is copied too: it must accompany the weights
_COPIED = (*TOKENIZER_FILES, "*.jinja", f"{NAMED_TEMPLATES}/*.jinja", "LICENSE*")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files, and no other files of the folder, such as weights."""
    for pattern in _COPIED:
        for file in filter(Path.is_file, source.glob(pattern)):
            place = target / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)


def check_tokenizer_folder(folder: Path) -> None:
    """Raises DataError unless the folder contains a tokenizer that `AutoTokenizer` can load."""
    if not (folder / "tokenizer_config.json").is_file():
        what = "no such directory" if not folder.is_dir() else "it has no tokenizer_config.json"
        raise DataError(f"{folder}: {what}\n  try: the tokenizer/ of the tokens directory the run was trained on")


def load_tokenizer(folder: Path) -> Any:
    """Loads a folder's tokenizer with `AutoTokenizer`, without executing code in the folder or asking whether to.

    Raises:
        DataError: there is no tokenizer that transformers loads without code in the folder.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415  takes seconds, and a refusal should not wait for it

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        why = " ".join(str(error).split())[:300] or repr(error)
        remedy = "a folder with a tokenizer.json that transformers loads without code of the folder"
        raise DataError(f"{folder}: its tokenizer cannot be loaded: {why}\n  try: {remedy}") from error
