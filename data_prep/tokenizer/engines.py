"""Engines that turn texts into ids: `tokenizers`, which is the reference, and faster ones that must reproduce it.

An engine gives one flat array for a batch of texts, so that no token is ever a Python object (but in the reference,
which has no such interface). Parallelism is over tasks: each engine is held to one thread.
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

from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from data_prep.tokenizer.load import load

EngineName = Literal["fastokens", "gigatoken", "tokenizers"]
CANDIDATES: tuple[EngineName, ...] = ("fastokens", "gigatoken")
"""In this order; the first that is installed, takes the tokenizer and gives its ids is used."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of a batch of texts.

    Attributes:
        ids: uint32 [n].
        offsets: int64 [texts + 1]; those of text i are at offsets[i]:offsets[i + 1].
    """

    ids: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]


class Engine(Protocol):
    """Turns texts into ids."""

    name: EngineName

    def encode(self, texts: list[str]) -> Tokens:
        """The ids of each text, without any token around it."""


class Reference:
    """The `tokenizers` library."""

    name: EngineName = "tokenizers"

    def __init__(self, folder: Path, *, special: bool) -> None:
        self._tokenizer = load(folder, special=special)

    def encode(self, texts: list[str]) -> Tokens:
        """See `Engine.encode`."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return Tokens(np.concatenate([np.empty(0, np.uint32), *parts]), offsets)


class Fastokens:
    """The `fastokens` library: byte-level and sentencepiece-like BPE."""

    name: EngineName = "fastokens"

    def __init__(self, folder: Path, *, special: bool) -> None:
        os.environ["FASTOKENS_BPE_THREADS"] = "1"  # read when the library starts
        from fastokens import Tokenizer  # noqa: PLC0415

        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_JSON))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = special

    def encode(self, texts: list[str]) -> Tokens:
        """See `Engine.encode`."""
        ids, offsets = self._tokenizer.encode_batch_flat(texts, False, not self._special)
        return Tokens(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<i8"))


class Gigatoken:
    """The `gigatoken` library: byte-level BPE with a pattern that it knows, and sentencepiece-like BPE."""

    name: EngineName = "gigatoken"

    def __init__(self, folder: Path, *, special: bool) -> None:
        from gigatoken import Tokenizer  # noqa: PLC0415

        content = json.loads((folder / TOKENIZER_JSON).read_text(encoding="utf-8"))
        if not special:  # it always takes a literal special token for the token
            content["added_tokens"] = [t for t in content["added_tokens"] if not t["special"]]
        self._backend = Tokenizer.from_json(json.dumps(content)).backend

    def encode(self, texts: list[str]) -> Tokens:
        """See `Engine.encode`."""
        layout = self._backend.encode_batch(texts, parallel=False).layout
        return Tokens(np.asarray(layout.content.data), np.asarray(layout.offsets.data, dtype=np.int64))


_MAKERS: dict[str, Callable[..., Engine]] = {"tokenizers": Reference, "fastokens": Fastokens, "gigatoken": Gigatoken}


def open_engine(name: EngineName, folder: Path, *, special: bool) -> Engine:
    """Loads a tokenizer folder into an engine; kept for the next task of the same process, wherever the folder is then.

    Args:
        special: whether a special token that is spelt out in a text becomes the token.

    Raises:
        Exception: of any kind, when the engine does not take this tokenizer.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    key = name, xxhash.xxh3_128_digest((folder / TOKENIZER_JSON).read_bytes()), special
    if key not in _OPENED:
        _OPENED[key] = _MAKERS[name](folder, special=special)
    return _OPENED[key]


_OPENED: dict[tuple[EngineName, bytes, bool], Engine] = {}


def installed(name: EngineName) -> bool:
    """Whether an engine's library is there."""
    return importlib.util.find_spec(name) is not None


def difference(engine: Engine, reference: Engine, texts: list[str], expected: Tokens) -> str | None:
    """A text of a batch to which two engines give different ids, or None. expected: the reference's of all."""
    found = engine.encode(texts)
    if np.array_equal(found.offsets, expected.offsets) and np.array_equal(found.ids, expected.ids):
        return None
    for text in texts:
        if not np.array_equal(engine.encode([text]).ids, reference.encode([text]).ids):
            return text
    return texts[0]
