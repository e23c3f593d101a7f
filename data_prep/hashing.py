"""Hashes that decide things: where a document lies, and in which split. Pure functions of names, texts and the seed.

XXH3 gives 128 well-mixed bits at the speed of memory; SplitMix64's finaliser makes independent numbers of them. None of
this is meant to withstand somebody who looks for collisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

U64 = npt.NDArray[np.uint64]

HELDOUT, SAMPLE = 1, 2
"""Purposes of `select_fraction`."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FULL = 1 << 64


def content_hashes(texts: Sequence[str | bytes]) -> U64:
    """XXH3-128 of each text, in UTF-8.

    Returns:
        uint64 [texts, 2].
    """
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(text) for text in texts]), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def unit_key(source: str, file: str, *, seed: int) -> int:
    """64 bits that stand for a file in the keys of its documents."""
    name = f"{seed}\0{source}\0{file}".encode("utf-8", "surrogateescape")
    return xxhash.xxh3_64_intdigest(name)


def document_keys(unit_keys: U64, at: npt.NDArray[np.int64]) -> U64:
    """The keys by which documents are ordered.

    Args:
        unit_keys: uint64 [n], from `unit_key`, of each document's file.
        at: int64 [n], its place in the file.

    Returns:
        uint64 [n], evenly spread.
    """
    with np.errstate(over="ignore"):
        return mix(unit_keys + (at.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def id_keys(source: str, ids: Sequence[object], *, seed: int) -> U64:
    """For the keys of documents that have ids of their own: the same whatever file a document is in.

    Returns:
        uint64 [ids], evenly spread as far as ids differ.
    """
    digest, prefix = xxhash.xxh3_64_intdigest, f"{seed}\0{source}\0\0"
    names = (f"{prefix}{name}".encode("utf-8", "surrogateescape") for name in ids)
    return np.fromiter(map(digest, names), np.uint64, len(ids))


def select_fraction(hashes: U64, *, share: float, seed: int, purpose: int) -> npt.NDArray[np.bool_]:
    """Draws a share of what has been hashed: true for those whose number, made of hash, seed and purpose, is below it.

    Args:
        hashes: uint64 [n], well mixed.
        purpose: different ones draw independently.
    """
    salt = xxhash.xxh3_64_intdigest(f"{purpose}\0{seed}".encode())
    return mix(hashes ^ np.uint64(salt)) < np.uint64(min(_FULL - 1, int(share * _FULL)))


def mix(values: U64) -> U64:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    with np.errstate(over="ignore"):
        z: Any = values ^ (values >> np.uint64(30))
        z = z * np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z = z * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.asarray(z, dtype=np.uint64)
