"""A pseudo-random permutation of 0..n-1 that is computed, not stored: O(1) memory for any n.

A balanced Feistel network over the smallest even number of bits that holds n permutes a power of four. Values outside
0..n-1 are sent through again until they land inside (cycle walking); the result is still a permutation.
Sources: Luby and Rackoff 1988 (Feistel networks as permutations); Black and Rogaway 2002, "Ciphers with arbitrary
finite domains", section 3 (cycle walking). The round function is the 64-bit finalizer of SplitMix64 (Steele, Lea
and Flood 2014); it is written out here because a library generator may change its stream between releases, and the
order of a run must not change.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
ROUNDS = 6
"""Four rounds are provably indistinguishable from random for large halves; small domains get two more."""


def derive_key(*parts: object) -> int:
    """Derives a 64-bit key from printable parts, e.g. `derive_key(seed, "order", epoch)`. Stable across machines."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def permute(index: npt.ArrayLike, *, size: int, key: int | U64) -> npt.NDArray[np.int64]:
    """Applies the permutation of 0..size-1 under `key` to `index`.

    Args:
        index: int64 [n], each in 0..size-1.
        size: length of the permuted range, at least 1.
        key: one key, or uint64 [n] with a key for each index.

    Returns:
        int64 [n]; for a fixed key a bijection of 0..size-1.
    """
    values = np.asarray(index, dtype=np.uint64)
    assert size >= 1
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), values.shape)
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    result = _feistel(values, half_bits, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        walked = _feistel(result[outside], half_bits, keys[outside])
        result[outside] = walked
        outside = outside[walked >= size]
    return result.astype(np.int64)


def _feistel(values: U64, half_bits: np.uint64, keys: U64) -> U64:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_number in range(ROUNDS):
        tweak = np.uint64(round_number + 1)
        left, right = right, left ^ (_splitmix(right ^ keys, tweak) & mask)
    combined: U64 = (left << half_bits) | right
    return combined


def _splitmix(values: U64, tweak: np.uint64) -> U64:
    with np.errstate(over="ignore"):
        z = values + tweak * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: U64 = z ^ (z >> np.uint64(31))
    return mixed
