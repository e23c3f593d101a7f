"""Word n-grams as 64-bit keys: equal n-grams have equal keys; different ones collide with probability 2^-64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

_BASE = 0xD6E8FEB86659FD93  # any odd number is enough: keys of words are already well mixed


class NGrams:
    """The n-grams of one text for any n, computed from shorter ones.

    The key of words w_1 .. w_n is the polynomial sum of w_i * base^(n - i), modulo 2^64.

    Args:
        words: uint64[words], the key of each word.
    """

    def __init__(self, words: Keys) -> None:
        self._of = {1: words}

    def of(self, n: int) -> Keys:
        """Keys of all n-grams: uint64[words - n + 1], empty if the text has fewer than n words."""
        if n not in self._of:
            start = n - n // 2
            size = max(0, len(self._of[1]) - n + 1)
            power = np.uint64(pow(_BASE, n // 2, 1 << 64))
            self._of[n] = self.of(start)[:size] * power + self.of(n // 2)[start : start + size]
        return self._of[n]

    def longer(self, keys: Keys, starts: npt.NDArray[np.int64], *, n: int) -> Keys:
        """Keys of the n-grams that start at `starts`; `keys` are the keys of their first n - 1 words."""
        return keys * np.uint64(_BASE) + self._of[1][starts + (n - 1)]


class KeySet:
    """A set of keys with vectorized lookup.

    Args:
        keys: uint64[keys], in any order.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = np.unique(keys)
        # a table indexed by the upper bits rejects 15 of 16 absent keys; at most 64 MiB
        bits = min(26, max(16, (16 * len(keys)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.bool_)
        self._table[self._buckets(keys)] = True

    def intersection(self, keys: Keys) -> Keys:
        """The `keys` that are in the set, in order."""
        candidates = keys[self._table[self._buckets(keys)]]
        if not len(candidates):
            return candidates
        at = np.minimum(np.searchsorted(self._keys, candidates), len(self._keys) - 1)
        found: Keys = candidates[self._keys[at] == candidates]
        return found

    def _buckets(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys >> self._shift).astype(np.int64)


def repeated(keys: Keys) -> npt.NDArray[np.bool_]:
    """bool[keys]: whether each key occurs more than once."""
    ordered = np.sort(keys)
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return np.zeros(len(keys), np.bool_)
    again = ordered[1:][same]
    at = again.searchsorted(keys)
    at[at == len(again)] = 0
    found: npt.NDArray[np.bool_] = again[at] == keys
    return found


def max_weight_bound(keys: Keys, weights: npt.NDArray[np.int64]) -> float:
    """Upper bound of any key's total weight: keys are hashed into 4 to 8 times as many buckets as keys.

    It is much cheaper than the exact sums, and nearly always enough to show that no key exceeds a limit.

    Args:
        keys: uint64[keys], well mixed.
        weights: int64[keys], weight of each occurrence.
    """
    bits = max(4, (4 * len(keys)).bit_length())
    buckets = (keys >> np.uint64(64 - bits)).astype(np.int64)
    return float(np.bincount(buckets, weights).max(initial=0))
