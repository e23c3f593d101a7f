"""UTF-8 bytes of the text that token ids encode, from the tokenizer alone, for datasets that do not record them.

In a byte-level vocabulary every character of a token is a byte. In a vocabulary with byte fallback, such as
sentencepiece's, `<0x0A>` is a byte and U+2581 a space. Special tokens are not text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from data_prep.formats.indexed import IndexedTokens
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from foundation.errors import DataError
from foundation.foreign_json import read_json

_CHUNK_TOKENS = 1 << 24
_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class IdBytes:
    """Bytes of text by id.

    Attributes:
        sizes: int64 [ids of the tokenizer], bytes of text of each id.
        spaces: number of spaces that the tokenizer adds before each document.
    """

    sizes: npt.NDArray[np.int64]
    spaces: int

    @classmethod
    def of(cls, tokenizer: Path, *, required: bool = True) -> IdBytes | None:
        """Reads the bytes by id of a Hugging Face folder; None if they cannot be counted and `required` is false.

        Raises:
            DataError: the tokenizer's decoder is neither byte-level nor has byte fallback.
        """
        try:
            return cls(*_sizes(tokenizer))
        except DataError:
            if required:
                raise
            return None

    def count(self, ids: npt.NDArray[Any], *, documents: int) -> int:
        """Counts the bytes of some documents' text; the tokenizer must have all of their ids [n]."""
        counted = np.bincount(ids, minlength=self.sizes.size)
        return int(counted @ self.sizes) - self.spaces * documents


def text_bytes(file: IndexedTokens, tokenizer: Path) -> int:
    """UTF-8 bytes of all text of a token file; reads every token.

    Args:
        file: an open token file.
        tokenizer: a Hugging Face folder.

    Raises:
        DataError: the tokenizer's decoder is neither byte-level nor has byte fallback, or the file holds ids that the
            tokenizer does not have.
    """
    by_id, found = IdBytes(*_sizes(tokenizer)), 0
    for start in range(0, file.tokens.size, _CHUNK_TOKENS):
        ids = file.tokens[start : start + _CHUNK_TOKENS]
        _check_ids(file, ids, start=start, known=by_id.sizes.size, tokenizer=tokenizer)
        found += by_id.count(ids, documents=0)
    return found - by_id.spaces * file.documents


def _check_ids(file: IndexedTokens, ids: npt.NDArray[Any], *, start: int, known: int, tokenizer: Path) -> None:
    if ids.min() >= 0 and ids.max() < known:
        return
    at = int(np.argmax((ids < 0) | (ids >= known)))
    found = f"{file.path} holds the id {ids[at]} as token {start + at:,}"
    remedy = "name the tokenizer that made it; if this one did, the file is damaged: make it again"
    raise DataError(f"{found}, the tokenizer in {tokenizer} has {known} ids\n  try: {remedy}")


def _sizes(folder: Path) -> tuple[npt.NDArray[np.int64], int]:
    """Bytes of each id, int64 [ids], and the number of spaces that the tokenizer adds before each document."""
    kinds = _decoders(read_json(folder / TOKENIZER_JSON).get("decoder"))
    if not kinds & {"ByteLevel", "ByteFallback"}:
        found = ", ".join(sorted(kinds)) or "none"
        raise DataError(
            f"{folder}: text bytes can be counted for byte-level tokenizers and those with byte fallback,"
            f" but its decoder is {found}\n  try: a tokens directory made by data_prep as data.sources.N.heldout"
        )
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        sizes[number] = len(token) if "ByteLevel" in kinds else _fallback(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        sizes[number] = 0 if added.special else len(added.content.encode())
    return sizes, int("Strip" in kinds)


def _fallback(token: str) -> int:
    return 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())


def _decoders(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoders(inner) for inner in decoder.get("decoders", ())))
