"""Saved Hugging Face `datasets` (`save_to_disk`): lists their files; downloads a builder's data in that form."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from data_prep.config.corpus import Source
from foundation.errors import ConfigError, DataError
from foundation.foreign_folders import file_beside
from foundation.foreign_json import read_json

_STATE, _DICT = "state.json", "dataset_dict.json"


def is_saved(path: str) -> bool:
    """Whether a directory was written by `save_to_disk`."""
    return (Path(path) / _STATE).is_file() or (Path(path) / _DICT).is_file()


def saved_files(path: str, split: str | None, *, at: str) -> list[tuple[str, str]]:
    """Lists (name, path) of the Arrow files of a saved `Dataset`, or of one split of a saved `DatasetDict`.

    Raises:
        ConfigError: the path is not a saved dataset, or a `DatasetDict` without this split.
        DataError: a file is missing.
    """
    root = Path(path)
    if (root / _DICT).is_file():
        known = _listed(root / _DICT, "splits")
        chosen = split or (known[0] if len(known) == 1 else None)
        if chosen is None or chosen not in known:
            why = f"{path} has several splits" if split is None else f"{path} has no such split"
            raise ConfigError(f"{at}.split", split, why=why, remedy=f"one of: {', '.join(known)}")
        root = file_beside(root / _DICT, chosen)
    if not (root / _STATE).is_file():
        why = f"it is not a dataset saved with save_to_disk: there is no {_STATE}"
        raise ConfigError(f"{at}.path", path, why=why, remedy='name the saved directory, or set another "type"')
    names = [entry["filename"] for entry in _listed(root / _STATE, "_data_files")]
    missing = [name for name in names if not file_beside(root / _STATE, name).is_file()]
    if missing:
        raise DataError(f"{root / missing[0]} is missing, and {_STATE} lists it\n  try: save the dataset again")
    return [(name, str(root / name)) for name in names]


def _listed(file: Path, key: str) -> list[Any]:
    found = read_json(file, remedy="save the dataset again").get(key)
    if not isinstance(found, list):
        raise DataError(f"{file} is damaged: {key} is no list\n  try: save the dataset again")
    return found


def materialize(source: Source, target: Path, *, at: str) -> None:
    """Downloads a builder's data and saves it as `target`, atomically: by one rename.

    Raises:
        DataError: `datasets.load_dataset` failed, e.g. without a network.
    """
    if target.is_dir():
        return
    import datasets  # noqa: PLC0415 - takes a second, and only builders need it

    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        datasets.disable_progress_bars()
        dataset = datasets.load_dataset(source.builder, split=source.split, **source.kwargs)
        dataset.save_to_disk(str(partial))
    except Exception as error:  # of any type; the user sees the builder's message
        why = f"{at}: datasets.load_dataset({source.builder!r}) failed: {type(error).__name__}: {error}"
        raise DataError(
            f"{why}\n  try: check builder, split, kwargs and the network, or save it elsewhere and give its path"
        ) from None
    partial.rename(target)
