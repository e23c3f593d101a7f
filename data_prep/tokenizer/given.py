"""Taking a given tokenizer: a Hugging Face folder or a sentencepiece .model file, into a folder of our own.

What `AutoTokenizer` makes of a folder is what every later user of the model gets, and in transformers 5 that need not
be its tokenizer.json (some classes rebuild their own from the vocabulary). So the folder is loaded by it and saved
again, and then both must give the same ids.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from data_prep.tokenizer import sentencepiece_model
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from data_prep.tokenizer.load import TOKENIZER_CONFIG, load
from data_prep.tokenizer.probes import PROBES
from data_prep.tokenizer.train import write_folder
from headrace.base.errors import DataError


def take(path: str, folder: Path) -> None:
    """Writes the tokenizer at `path` into `folder`. Imports transformers, and so torch: run it in a process of its own.

    Raises:
        DataError: it cannot be loaded, or two implementations disagree on it.
    """
    if Path(path).is_dir():
        _take_folder(path, folder)
    else:
        model = sentencepiece_model.read_model(Path(path))
        (folder / sentencepiece_model.MODEL_FILE).write_bytes(model)
        tokenizer = sentencepiece_model.convert(model)
        sentencepiece_model.check(tokenizer, model, texts=PROBES)
        eos, bos = sentencepiece_model.end_tokens(model)
        write_folder(tokenizer, folder, eos_token=eos, bos_token=bos)


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that transformers builds from tokenizer.json as it is."""
_PLAIN_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")


def _take_folder(path: str, folder: Path) -> None:
    if _is_plain(Path(path)):  # transformers would add seconds and change nothing
        for name in _PLAIN_FILES:
            if (Path(path) / name).is_file():
                shutil.copyfile(Path(path) / name, folder / name)
        load(folder)
        return
    given = _auto(path)
    _save(given, path, folder)
    if not (folder / TOKENIZER_JSON).is_file():
        why = f"{path}: {type(given).__name__} is not built on the tokenizers library"
        raise DataError(f"{why}\n  try: a folder with a tokenizer.json")
    ours, again = load(folder), _auto(str(folder))
    for text in PROBES:
        first = given(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        second = again(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        third = ours.encode(text, add_special_tokens=False).ids
        if not first == second == third:
            why = f"{path}: AutoTokenizer and its own saved copy give different ids for {text[:60]!r}"
            remedy = '"tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
            raise DataError(f"{why}\n  try: {remedy}")


def _is_plain(folder: Path) -> bool:
    """Whether a folder has a tokenizer.json that `AutoTokenizer` takes as it is."""
    try:
        config = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    named = isinstance(config, dict) and config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
    return named and (folder / TOKENIZER_JSON).is_file()


def _save(given: Any, path: str, folder: Path) -> None:
    try:
        given.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, also when there is no room
        remedy = "make room, or take a folder that save_pretrained writes"
        raise DataError(f"{path}: its copy cannot be written: {error}\n  try: {remedy}") from None


def _auto(path: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds and imports torch

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever a folder can contain, the user sees the library's words
        words = str(error).strip().splitlines()
        remedy = "a folder that AutoTokenizer.from_pretrained loads offline"
        raise DataError(f"{path}: {words[0] if words else type(error).__name__}\n  try: {remedy}") from None
