"""Imports an existing tokenizer, a Hugging Face folder or a sentencepiece .model file, into the job's own folder.

Later users of the model get the tokenizer that `AutoTokenizer` makes from a folder. In transformers 5 that is not
always its tokenizer.json (some classes rebuild their own from the vocabulary). So `AutoTokenizer` loads and saves the
folder, and the original and the saved copy must give the same ids.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from data_prep.tokenizer import sentencepiece_model
from data_prep.tokenizer.adversarial_texts import ADVERSARIAL_TEXTS, normal_forms, random_texts
from data_prep.tokenizer.engines import find_mismatch, open_engine
from data_prep.tokenizer.fingerprint import MODEL_FILE, MODEL_FILES, NAMED_TEMPLATES, TOKENIZER_JSON
from data_prep.tokenizer.load import REFERENCE, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, load, reference_of
from data_prep.tokenizer.train import write_folder
from foundation.directory import write_json
from foundation.errors import DataError
from foundation.foreign_json import read_json


def import_tokenizer(path: str, folder: Path) -> list[str]:
    """Writes the tokenizer at `path` into `folder`.

    It may import transformers, and thereby torch: run it in a separate process.

    Returns:
        Lines for the user.

    Raises:
        DataError: the tokenizer cannot be loaded, or two implementations of it give different ids.
    """
    if Path(path).is_dir():
        _import_folder(path, folder)
        return _name_difference(path, folder)
    model = sentencepiece_model.read_model(Path(path))
    (folder / MODEL_FILE).write_bytes(model)
    eos, bos = sentencepiece_model.eos_and_bos(model)
    converted = sentencepiece_model.convert(model)
    write_folder(converted, folder, eos_token=eos, bos_token=bos, reference="sentencepiece")
    return []


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that transformers builds from tokenizer.json without changes."""
_PLAIN_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "chat_template.jinja", *MODEL_FILES)


def _import_folder(path: str, folder: Path) -> None:
    if _is_plain(Path(path)):  # loading it with transformers takes seconds and changes nothing
        for name in _PLAIN_FILES:
            if (Path(path) / name).is_file():
                shutil.copyfile(Path(path) / name, folder / name)
        if (Path(path) / NAMED_TEMPLATES).is_dir():
            shutil.copytree(Path(path) / NAMED_TEMPLATES, folder / NAMED_TEMPLATES)
        load(folder)
        return
    original = _load_with_transformers(path)
    _save(original, path, folder)
    if not (folder / TOKENIZER_JSON).is_file():
        why = (
            f"{path}: its class {type(original).__name__} has no tokenizer.json: it does not use the tokenizers library"
        )
        raise DataError(f"{why}\n  try: name a folder with a tokenizer.json")
    _keep_model(Path(path), folder)
    ours, saved = load(folder), _load_with_transformers(str(folder))
    for text in ADVERSARIAL_TEXTS:
        first = original(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        second = saved(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        third = ours.encode(text, add_special_tokens=False).ids
        if not first == second == third:
            why = f"{path}: AutoTokenizer and its own saved copy give different ids for {text[:60]!r}"
            remedy = 'set "tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
            raise DataError(f"{why}\n  try: {remedy}")


def _keep_model(original: Path, folder: Path) -> None:
    """Keeps a folder's sentencepiece model, which `save_pretrained` leaves out and llama.cpp reads.

    If the folder had no tokenizer.json, the ids are the model's, provided the saved copy has all its pieces.
    """
    for name in MODEL_FILES:
        if (original / name).is_file():
            shutil.copyfile(original / name, folder / name)
    model, tokenizer = sentencepiece_model.read_beside(folder), load(folder)
    if model is None or (original / TOKENIZER_JSON).is_file():
        return
    if None not in map(tokenizer.token_to_id, sentencepiece_model.pieces_of(model)):
        config = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        write_json(folder / TOKENIZER_CONFIG, config | {REFERENCE: "sentencepiece"})


def _name_difference(path: str, folder: Path) -> list[str]:
    """A line if a folder's tokenizer.json and sentencepiece model give different ids for a text."""
    model = sentencepiece_model.read_beside(folder)
    if model is None or reference_of(folder) == "sentencepiece":
        return []
    if None in map(load(folder).token_to_id, sentencepiece_model.pieces_of(model)):
        return []
    ours, theirs = (open_engine(name, folder, parse_special_tokens=False) for name in ("tokenizers", "sentencepiece"))
    texts = [*ADVERSARIAL_TEXTS, *normal_forms(), *random_texts(), *sentencepiece_model.texts_of_pieces(model)]
    text = find_mismatch(ours, theirs, texts, theirs.encode(texts))
    if text is None:
        return []
    return [
        f"the tokenizer.json and the sentencepiece model of {path} give different ids, e.g. for {text[:40]!r}; "
        "documents get tokenizer.json's ids, as AutoTokenizer gives them (name the .model file to get the model's)"
    ]


def _is_plain(folder: Path) -> bool:
    """Whether a folder has a tokenizer.json that `AutoTokenizer` loads without changes."""
    try:
        config = read_json(folder / TOKENIZER_CONFIG)
    except (OSError, DataError):
        return False
    named = config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
    return named and (folder / TOKENIZER_JSON).is_file()


def _save(tokenizer: Any, path: str, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, even for a full disk
        remedy = "free disk space, or name a folder that save_pretrained wrote"
        raise DataError(f"{path}: a copy of it cannot be written: {error}\n  try: {remedy}") from None


def _load_with_transformers(path: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds and imports torch

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type; the user sees the library's message
        message = str(error).strip().splitlines()
        remedy = "name a folder that AutoTokenizer.from_pretrained loads offline"
        raise DataError(f"{path}: {message[0] if message else type(error).__name__}\n  try: {remedy}") from None
