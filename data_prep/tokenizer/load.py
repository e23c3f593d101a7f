"""Loading of a tokenizer folder with the `tokenizers` library, its vocabulary size and its special token ids."""

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


def load(folder: Path, *, parse_special_tokens: bool = False) -> Any:
    """The folder's `tokenizers.Tokenizer`, without truncation and padding. It is cached: do not modify it.

    Args:
        folder: with a tokenizer.json.
        parse_special_tokens: whether a literal special token in a text becomes that token.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = folder / TOKENIZER_JSON
    try:
        return _loaded(path.read_bytes(), parse_special_tokens)
    except FileNotFoundError:
        raise DataError(f"{path} is missing\n  try: name a folder with a {TOKENIZER_JSON}") from None
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise DataError(f"{path} is damaged: {error}\n  try: download or copy the tokenizer again") from None


@lru_cache(maxsize=4)
def _loaded(content: bytes, parse_special_tokens: bool) -> Any:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.encode_special_tokens = not parse_special_tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocab_size(tokenizer: Any) -> int:
    """Vocabulary size: highest id + 1, added tokens included."""
    return 1 + int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1))


def special_ids(folder: Path, tokenizer: Any) -> dict[str, int | None]:
    """Ids of the special tokens in tokenizer_config.json: {"eos_id", "bos_id", "pad_id"}; None for one it lacks."""
    path = folder / TOKENIZER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}\n  try: download or copy the tokenizer again") from None
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
    """Refuses a tokenizer that cannot fulfil the policy.

    Raises:
        DataError: EOS or BOS is to be added and the tokenizer has none, or the model encodes the literal text of a
            special token as that token although the policy forbids it.
    """
    tokenizer = load(folder)
    ids = special_ids(folder, tokenizer)
    added = (
        (policy.append_eos, "eos", "end", "append_eos"),
        (policy.prepend_bos, "bos", "beginning", "prepend_bos"),
    )
    for wanted, kind, word, key in added:
        if wanted and ids[f"{kind}_id"] is None:
            remedy = f'set "{kind}_token" in its tokenizer_config.json, or set {key} to false'
            raise DataError(f"the tokenizer has no {word}-of-document token, and {key} is true\n  try: {remedy}")
    if policy.parse_special_tokens:
        return
    for number, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and number in tokenizer.encode(token.content, add_special_tokens=False).ids:
            why = (
                f"the tokenizer encodes the text {token.content!r} as its special id {number}, though it must stay text"
            )
            raise DataError(f"{why}\n  try: a tokenizer whose model does not contain its special tokens as pieces")
