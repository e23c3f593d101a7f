"""Tokenization engines: the references, `tokenizers` and `sentencepiece`, and faster libraries that must reproduce
their ids.

An engine returns one flat array per batch of texts: no token becomes a Python object (except in the reference, whose
API has no such call). Tasks run in parallel: each engine is limited to one thread.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from data_prep.tokenizer.fingerprint import MODEL_FILES, TOKENIZER_JSON
from data_prep.tokenizer.load import load

EngineName = Literal["fastokens", "gigatoken", "tokenizers", "sentencepiece"]
CANDIDATES: tuple[EngineName, ...] = ("fastokens", "gigatoken")
"""Fast engines in order of preference: the first one is used that is installed, supports the tokenizer and reproduces
its ids."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a batch of texts.

    Attributes:
        ids: uint32 [n].
        offsets: int64 [texts + 1]; text i has ids[offsets[i]:offsets[i + 1]].
    """

    ids: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]


class TokenizerEngine(Protocol):
    """Encodes texts as token ids."""

    name: EngineName

    def encode(self, texts: list[str]) -> Tokens:
        """Encodes each text, without BOS and EOS."""


class TokenizersEngine:
    """The `tokenizers` library: the reference."""

    name: EngineName = "tokenizers"

    def __init__(self, folder: Path, *, parse_special_tokens: bool) -> None:
        self._tokenizer = load(folder, parse_special_tokens=parse_special_tokens)

    def encode(self, texts: list[str]) -> Tokens:
        """Implements `TokenizerEngine.encode`."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return Tokens(np.concatenate([np.empty(0, np.uint32), *parts]), offsets)


class FastokensEngine:
    """The `fastokens` library: byte-level and sentencepiece-style BPE."""

    name: EngineName = "fastokens"

    def __init__(self, folder: Path, *, parse_special_tokens: bool) -> None:
        os.environ["FASTOKENS_BPE_THREADS"] = "1"  # read when the library is imported
        from fastokens import Tokenizer  # noqa: PLC0415

        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_JSON))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._parse_special_tokens = parse_special_tokens

    def encode(self, texts: list[str]) -> Tokens:
        """Implements `TokenizerEngine.encode`."""
        ids, offsets = self._tokenizer.encode_batch_flat(texts, False, not self._parse_special_tokens)
        return Tokens(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8"))


class GigatokenEngine:
    """The `gigatoken` library: byte-level BPE with one of its built-in split patterns, and sentencepiece-style BPE."""

    name: EngineName = "gigatoken"

    def __init__(self, folder: Path, *, parse_special_tokens: bool) -> None:
        from gigatoken import Tokenizer  # noqa: PLC0415

        content = json.loads((folder / TOKENIZER_JSON).read_text(encoding="utf-8"))
        if not parse_special_tokens:  # it always parses literal special tokens
            content["added_tokens"] = [t for t in content["added_tokens"] if not t["special"]]
        self._backend = Tokenizer.from_json(json.dumps(content)).backend

    def encode(self, texts: list[str]) -> Tokens:
        """Implements `TokenizerEngine.encode`."""
        layout = self._backend.encode_batch(texts, parallel=False).layout
        return Tokens(np.asarray(layout.content.data), np.asarray(layout.offsets.data, dtype=np.int64))


def _sentencepiece(folder: Path, *, parse_special_tokens: bool) -> TokenizerEngine:
    from data_prep.tokenizer.sentencepiece_engine import SentencepieceEngine  # noqa: PLC0415 - few jobs need it

    return SentencepieceEngine(folder, parse_special_tokens=parse_special_tokens)


_ENGINES: dict[str, Callable[..., TokenizerEngine]] = {
    "tokenizers": TokenizersEngine,
    "fastokens": FastokensEngine,
    "gigatoken": GigatokenEngine,
    "sentencepiece": _sentencepiece,
}


def open_engine(name: EngineName, folder: Path, *, parse_special_tokens: bool) -> TokenizerEngine:
    """Loads a tokenizer folder into an engine.

    Engines are cached by the content of the tokenizer's files, for the process's next tasks, which may see the folder
    under another path.

    Args:
        name: name of the engine.
        folder: folder of the tokenizer.
        parse_special_tokens: whether a literal special token in a text becomes that token.

    Raises:
        Exception: any type of exception, if the engine does not support this tokenizer.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    files = [TOKENIZER_JSON, *(MODEL_FILES if name == "sentencepiece" else ())]
    content = b"".join((folder / file).read_bytes() for file in files if (folder / file).is_file())
    key = name, xxhash.xxh3_128_digest(content), parse_special_tokens
    if key not in _OPENED:
        _OPENED[key] = _ENGINES[name](folder, parse_special_tokens=parse_special_tokens)
    return _OPENED[key]


_OPENED: dict[tuple[EngineName, bytes, bool], TokenizerEngine] = {}


def installed(name: EngineName) -> bool:
    """Whether an engine's library is installed."""
    return importlib.util.find_spec(name) is not None


def find_mismatch(
    engine: TokenizerEngine, reference: TokenizerEngine, texts: list[str], expected: Tokens
) -> str | None:
    """Finds a text for which two engines give different ids.

    Args:
        expected: the reference's ids of `texts`.

    Returns:
        The text, or None if all ids are equal.
    """
    found = engine.encode(texts)
    if np.array_equal(found.offsets, expected.offsets) and np.array_equal(found.ids, expected.ids):
        return None
    for text in texts:
        if not np.array_equal(engine.encode([text]).ids, reference.encode([text]).ids):
            return text
    return texts[0]
