"""Loads a tokenizer folder with the `tokenizers` library; gives its vocabulary size and special token ids."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from data_prep.config.text_policy import TextPolicy
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON, fingerprint_of_loaded
from foundation.errors import DataError
from foundation.foreign_json import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
REFERENCE = "reference_ids"
"""Key of tokenizer_config.json with the name of the reference (`reference_of`); transformers keeps it."""


def load(folder: Path, *, parse_special_tokens: bool = False) -> Any:
    """Loads a folder's `tokenizers.Tokenizer`, without truncation and padding. It is cached: do not modify it.

    Args:
        folder: folder with a tokenizer.json.
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


def read_config(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json with the names of the special tokens, as `AutoTokenizer` finds them.

    Folders from older versions of transformers name them in special_tokens_map.json, which is used if
    tokenizer_config.json does not list its added tokens.

    Raises:
        DataError: one of the files is damaged.
    """
    config = _json_object(folder / TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:
        return config
    return config | _json_object(folder / SPECIAL_TOKENS_MAP)


def token_text(token: Any) -> str | None:
    """The text of a special token in these files: a string, or the `content` of an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def reference_of(folder: Path) -> Literal["tokenizers", "sentencepiece"]:
    """The reference library of a tokenizer: `sentencepiece` for a sentencepiece model, else `tokenizers`."""
    return "sentencepiece" if read_config(folder).get(REFERENCE) == "sentencepiece" else "tokenizers"


def special_ids(folder: Path, tokenizer: Any) -> dict[str, int | None]:
    """Ids of a folder's special tokens: {"eos_id", "bos_id", "pad_id"}; None for a token that it lacks."""
    config = read_config(folder)
    texts = {kind: token_text(config.get(f"{kind}_token")) for kind in ("eos", "bos", "pad")}
    return {f"{kind}_id": None if text is None else tokenizer.token_to_id(text) for kind, text in texts.items()}


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} without the file."""
    return read_json(path, remedy="download or copy the tokenizer again") if path.is_file() else {}


def describe(folder: Path, *, kind: str) -> dict[str, Any]:
    """Makes the tokenizer's entry in the manifest: fingerprint, vocab_size, eos_id, bos_id, pad_id, kind."""
    tokenizer = load(folder)
    entry = {"fingerprint": fingerprint_of_loaded(tokenizer), "vocab_size": vocab_size(tokenizer), "kind": kind}
    return entry | special_ids(folder, tokenizer)


def missing_bos(folder: Path, policy: TextPolicy) -> list[str]:
    """A line for the user if the tokenizer itself puts BOS before a text, but documents get no BOS."""
    tokenizer = load(folder)
    bos = special_ids(folder, tokenizer)["bos_id"]
    if policy.prepend_bos or bos is None:
        return []
    if read_config(folder).get("add_bos_token") is not True and tokenizer.encode("a").ids[:1] != [bos]:
        return []
    token = tokenizer.id_to_token(bos)
    return [
        f"it begins every text with {token!r}, as inference programs do, and documents begin without it: "
        'a model that was trained with it (Gemma, Llama) needs "prepend_bos": true'
    ]


def check_usable(folder: Path, policy: TextPolicy) -> None:
    """Refuses a tokenizer that cannot fulfil the policy.

    Raises:
        DataError: EOS or BOS is to be added but the tokenizer has none; or the model encodes the literal text of a
            special token as that token, although the policy forbids it.
    """
    tokenizer = load(folder)
    ids = special_ids(folder, tokenizer)
    added = ((policy.append_eos, "eos", "end", "append_eos"), (policy.prepend_bos, "bos", "beginning", "prepend_bos"))
    for wanted, kind, word, key in added:
        if wanted and ids[f"{kind}_id"] is None:
            remedy = f'set "{kind}_token" in its tokenizer_config.json, or set {key} to false'
            raise DataError(f"the tokenizer has no {word}-of-document token, and {key} is true\n  try: {remedy}")
    if policy.parse_special_tokens or reference_of(folder) == "sentencepiece":  # sentencepiece never gives such an id
        return
    for number, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and number in tokenizer.encode(token.content, add_special_tokens=False).ids:
            why = (
                f"the tokenizer encodes the text {token.content!r} as its special id {number}, though it must stay text"
            )
            raise DataError(f"{why}\n  try: a tokenizer whose model does not contain its special tokens as pieces")
