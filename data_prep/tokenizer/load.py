"""A tokenizer folder as the map tasks use it: text in, arrays of ids out, special tokens never from text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data_prep.tokenizer.fingerprint import TOKENIZER_JSON, tokenizer_fingerprint
from headrace.errors import DataError

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Encoder:
    """Turns texts into ids. vocab_size: highest id + 1. eos_id: appended to each text, or None to append nothing."""

    tokenizer: Any
    vocab_size: int
    eos_id: int | None

    def encode(self, texts: list[str]) -> Iterator[np.ndarray[Any, Any]]:
        """Yields int32[tokens] per text. A text without any token yields an empty array, without eos."""
        ends = [] if self.eos_id is None else [self.eos_id]
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            count = len(ids)
            tokens = np.empty(count + len(ends) if count else 0, dtype=np.int32)
            tokens[:count] = ids
            if count:
                tokens[count:] = ends
            yield tokens


@cache
def load_encoder(folder: Path, *, append_eos: bool) -> Encoder:
    """Loads a folder for tokenising; kept for the next task of the same process."""
    # parallelism is over tasks: threads inside each would fight over the cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load(folder)
    eos = special_ids(folder, tokenizer)["eos_id"] if append_eos else None
    return Encoder(tokenizer, vocab_size(tokenizer), eos)


def load(folder: Path) -> Any:
    """The folder's `tokenizers.Tokenizer`, which takes a literal special token in a text for text, and cuts nothing."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocab_size(tokenizer: Any) -> int:
    """Highest id + 1, added tokens included."""
    return 1 + int(max(tokenizer.get_vocab(with_added_tokens=True).values()))


def special_ids(folder: Path, tokenizer: Any) -> dict[str, int | None]:
    """{"eos_id", "bos_id", "pad_id"}: what tokenizer_config.json names, as ids; None where it names none."""
    path = folder / TOKENIZER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    ids: dict[str, int | None] = {}
    for kind in ("eos", "bos", "pad"):
        token = config.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        ids[f"{kind}_id"] = None if content is None else tokenizer.token_to_id(content)
    return ids


def describe(folder: Path, *, kind: str) -> dict[str, Any]:
    """The tokenizer's entry in the manifest: fingerprint, vocab_size, eos_id, bos_id, pad_id, kind."""
    tokenizer = load(folder)
    entry = {"fingerprint": tokenizer_fingerprint(folder), "vocab_size": vocab_size(tokenizer), "kind": kind}
    return entry | special_ids(folder, tokenizer)


def check_usable(folder: Path, *, append_eos: bool) -> None:
    """Refuses a tokenizer with which shards would not mean what they say.

    Raises:
        DataError: no end-of-document token though one is to be appended, or a special token that can be typed.
    """
    tokenizer = load(folder)
    if append_eos and special_ids(folder, tokenizer)["eos_id"] is None:
        remedy = 'name an "eos_token" in its tokenizer_config.json, or set append_eos to false'
        raise DataError(f"the tokenizer names no end-of-document token, and append_eos is true\n  try: {remedy}")
    for number, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and number in tokenizer.encode(token.content, add_special_tokens=False).ids:
            why = f"the tokenizer turns the text {token.content!r} into its special id {number} even when told not to"
            raise DataError(f"{why}\n  try: a tokenizer whose model does not hold its special tokens as pieces")
