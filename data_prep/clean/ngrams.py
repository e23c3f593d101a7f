"""Runs of n words, as 64-bit keys: equal runs have equal keys, and two others collide once in 2^64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

_BASE = 0xD6E8FEB86659FD93  # any odd number: keys of words are stirred already


class NGrams:
    """The n-grams of one text, for any n, each from shorter ones.

    The key of words w_1 .. w_n is the polynomial sum of w_i * base^(n - i), modulo 2^64.

    Args:
        words: uint64[words], the key of each word.
    """

    def __init__(self, words: Keys) -> None:
        self._of = {1: words}

    def of(self, n: int) -> Keys:
        """Returns: uint64[words - n + 1], empty if the text has fewer than n words."""
        if n not in self._of:
            start = n - n // 2
            size = max(0, len(self._of[1]) - n + 1)
            power = np.uint64(pow(_BASE, n // 2, 1 << 64))
            self._of[n] = self.of(start)[:size] * power + self.of(n // 2)[start : start + size]
        return self._of[n]

    def longer(self, keys: Keys, starts: npt.NDArray[np.int64], *, n: int) -> Keys:
        """The keys of the n-grams that start at `starts`, from `keys`, those of their first n - 1 words."""
        return keys * np.uint64(_BASE) + self._of[1][starts + (n - 1)]


class KeySet:
    """A set of keys, asked for many at a time.

    Args:
        keys: uint64[keys], in any order.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = np.unique(keys)
        # a table by the upper bits of a key answers for 15 of 16 that are not here; 64 MiB at most
        bits = min(26, max(16, (16 * len(keys)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.bool_)
        self._table[self._buckets(keys)] = True

    def common(self, keys: Keys) -> Keys:
        """Those of `keys` that are in the set."""
        near = keys[self._table[self._buckets(keys)]]
        if not len(near):
            return near
        at = np.minimum(np.searchsorted(self._keys, near), len(self._keys) - 1)
        found: Keys = near[self._keys[at] == near]
        return found

    def _buckets(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys >> self._shift).astype(np.int64)


def repeated(keys: Keys) -> npt.NDArray[np.bool_]:
    """Which keys occur more than once: bool[keys]."""
    ordered = np.sort(keys)
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return np.zeros(len(keys), np.bool_)
    again = ordered[1:][same]
    at = again.searchsorted(keys)
    at[at == len(again)] = 0
    found: npt.NDArray[np.bool_] = again[at] == keys
    return found


def heaviest(keys: Keys, weights: npt.NDArray[np.int64]) -> float:
    """No key's weights, summed over its occurrences, exceed this: keys are thrown into 4 to 8 times as many buckets.

    Much cheaper than to count each key, and nearly always enough to see that none is too heavy.
    """
    bits = max(4, (4 * len(keys)).bit_length())
    buckets = (keys >> np.uint64(64 - bits)).astype(np.int64)
    return float(np.bincount(buckets, weights).max(initial=0))
