"""One hash that says whether two tokenizer folders turn text into the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from headrace.base.directory import fingerprint_of
from headrace.base.errors import DataError

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
"""What transformers' tokenizers are made of, as patterns; chat templates aside."""

_IRRELEVANT = ("version", "truncation", "padding", "post_processor")
"""Parts of tokenizer.json that do not enter the ids of a document: they cut, pad or frame a prompt, and transformers
rewrites them with every `save_pretrained`."""


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 of the canonical JSON of what turns text into ids: normaliser, pre-tokeniser, model, added tokens.

    The file is read and written by `tokenizers` first, so that older spellings of the same tokenizer (merges as "a b",
    missing defaults) hash alike, and a folder keeps its fingerprint through `AutoTokenizer...save_pretrained`.

    Raises:
        DataError: there is no readable tokenizer.json.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - the readers of a manifest need the name above, not the library

    path = Path(folder) / TOKENIZER_JSON
    if not path.is_file():
        raise DataError(f"{path} is missing\n  try: name a folder with a {TOKENIZER_JSON}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise DataError(f"{path} is damaged: {error}\n  try: get the tokenizer again") from None
    return fingerprint_of_loaded(tokenizer)


def fingerprint_of_loaded(tokenizer: Any) -> str:
    """`tokenizer_fingerprint` of a `tokenizers.Tokenizer`."""
    content = orjson.loads(tokenizer.to_str())
    kept = {key: value for key, value in content.items() if key not in _IRRELEVANT}
    kept["added_tokens"] = sorted(kept["added_tokens"], key=lambda token: token["id"])
    return fingerprint_of(kept)
