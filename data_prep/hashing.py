"""Hash functions for document order and the held-out split: pure functions of names, texts and the seed.

XXH3 gives 128 well-mixed bits at memory bandwidth; SplitMix64's finalizer derives independent numbers from them. These
hashes are not cryptographic: an adversary can construct collisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

U64 = npt.NDArray[np.uint64]

HELDOUT, SAMPLE = 1, 2
"""Values for `purpose` in `select_fraction`."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FULL = 1 << 64


def content_hashes(texts: Sequence[str | bytes]) -> U64:
    """XXH3-128 of each text's UTF-8 bytes.

    Returns:
        uint64 [texts, 2], the high and the low 64 bits.
    """
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(text) for text in texts]), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def utf8_size(text: str) -> int:
    """Size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def unit_key(source: str, file: str, *, seed: int) -> int:
    """64-bit hash of a file and the seed, from which the keys of the file's documents are derived."""
    name = f"{seed}\0{source}\0{file}".encode("utf-8", "surrogateescape")
    return xxhash.xxh3_64_intdigest(name)


def document_keys(unit_keys: U64, at: npt.NDArray[np.int64]) -> U64:
    """The sort keys that shuffle documents.

    Args:
        unit_keys: uint64 [n], the `unit_key` of each document's file.
        at: int64 [n], each document's position in its file.

    Returns:
        uint64 [n], uniformly distributed.
    """
    with np.errstate(over="ignore"):
        return mix(unit_keys + (at.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def id_keys(source: str, ids: Sequence[object], *, seed: int) -> U64:
    """Hashes document ids for their sort keys: the keys do not depend on the file that holds a document.

    Returns:
        uint64 [ids], uniformly distributed over distinct ids.
    """
    digest, prefix = xxhash.xxh3_64_intdigest, f"{seed}\0{source}\0\0"
    names = (f"{prefix}{name}".encode("utf-8", "surrogateescape") for name in ids)
    return np.fromiter(map(digest, names), np.uint64, len(ids))


def select_fraction(hashes: U64, *, fraction: float, seed: int, purpose: int) -> npt.NDArray[np.bool_]:
    """Selects a pseudorandom fraction of hashed items: where the mix of hash, seed and purpose is below it.

    Args:
        hashes: uint64 [n], well mixed.
        fraction: expected fraction of selected items, 0 to 1.
        seed: seed of the job.
        purpose: selections with different purposes are independent.

    Returns:
        bool [n].
    """
    salt = xxhash.xxh3_64_intdigest(f"{purpose}\0{seed}".encode())
    return mix(hashes ^ np.uint64(salt)) < np.uint64(min(_FULL - 1, int(fraction * _FULL)))


def mix(values: U64) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    with np.errstate(over="ignore"):
        z: Any = values ^ (values >> np.uint64(30))
        z = z * np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z = z * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.asarray(z, dtype=np.uint64)
