"""A tokenizer folder, opened by the `tokenizers` library, and what its files say of its special tokens."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.config.text_policy import TextPolicy
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON, fingerprint_of_loaded
from headrace.base.errors import DataError

TOKENIZER_CONFIG = "tokenizer_config.json"


def load(folder: Path, *, special: bool = False) -> Any:
    """The folder's `tokenizers.Tokenizer`, which cuts nothing. Kept for whoever asks next: it must not be changed.

    Args:
        special: whether a literal special token in a text becomes the token.
    """
    return _loaded((folder / TOKENIZER_JSON).read_bytes(), special)


@lru_cache(maxsize=4)
def _loaded(content: bytes, special: bool) -> Any:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.encode_special_tokens = not special
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
    entry = {"fingerprint": fingerprint_of_loaded(tokenizer), "vocab_size": vocab_size(tokenizer), "kind": kind}
    return entry | special_ids(folder, tokenizer)


def check_usable(folder: Path, policy: TextPolicy) -> None:
    """Refuses a tokenizer with which shards would not mean what they say.

    Raises:
        DataError: no token for the end or the beginning of a document though one is to be added, or a special token
            that can be typed though it must not be.
    """
    tokenizer = load(folder)
    ids = special_ids(folder, tokenizer)
    framing = ((policy.eos, "eos", "end", "append_eos"), (policy.bos, "bos", "beginning", "prepend_bos"))
    for asked, kind, word, key in framing:
        if asked and ids[f"{kind}_id"] is None:
            remedy = f'name an "{kind}_token" in its tokenizer_config.json, or set {key} to false'
            raise DataError(f"the tokenizer names no {word}-of-document token, and {key} is true\n  try: {remedy}")
    if policy.special:
        return
    for number, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and number in tokenizer.encode(token.content, add_special_tokens=False).ids:
            why = f"the tokenizer turns the text {token.content!r} into its special id {number} even when told not to"
            raise DataError(f"{why}\n  try: a tokenizer whose model does not hold its special tokens as pieces")
