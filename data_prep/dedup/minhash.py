"""MinHash of token n-grams: a document becomes `bands` numbers, and similar documents share some of them.

The journey of a batch: token ids -> a 64-bit hash of every window of `ngram` tokens -> `slots` minima per document,
each of which two documents share with the probability of their Jaccard similarity -> minima hashed in groups of `rows`.

The minima are those of Dahlgaard, Knudsen and Thorup, "Fast Similarity Sketching" (FOCS 2017): a window is thrown into
one slot instead of all, and slots that stay empty (in short documents) are thrown at again. So a window costs a few
nanoseconds for any number of slots. Everything is arithmetic modulo 2^64: the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_prep.config.dedup import NearSection
from data_prep.dedup.table import distinct
from data_prep.hashing import mix

Hashes = NDArray[np.uint64]
Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]

EMPTY = np.uint32(0xFFFFFFFF)
"""What an empty slot holds. A minimum that happens to be this counts as empty, as rare as 1 in 2^32."""
_ROUNDS = 6
"""Throws before what is still empty gets a hash of its own. With 1 or 16, 100 tokens take 2.5 or 1.4 times as long."""
_BLOCK = 1 << 15  # windows at a time: their hashes fit a core's cache; 2^18 of them take four times as long each
_LONG = 1 << 12  # a document of more windows with an empty slot repeats itself: each different window once will do
BASE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_WORD = (1 << 64) - 1
_HALF = np.uint64(32)


def bands(ids: Ids, offsets: Offsets, *, section: NearSection) -> Hashes:
    """The band hashes of a batch of documents.

    A pair of similarity s shares a band's hash with probability s^rows, and any with 1 - (1 - s^rows)^bands (Leskovec,
    Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4.2). A document of fewer than `ngram` tokens is one
    window, all of it: it shares bands with documents of the same tokens only.

    Args:
        ids: uint32[n], the token ids of all documents, one after the other.
        offsets: int64[docs + 1], where each starts; the last is n.
        section: the size of n-grams, and the numbers of bands and rows.

    Returns:
        uint64[docs, bands].
    """
    minima = signatures(ids, offsets, section=section).reshape(-1, section.bands, section.rows)
    found = np.zeros(minima.shape[:2], dtype=np.uint64)
    for row in range(section.rows):
        found *= np.uint64(BASE)
        found += minima[:, :, row]
    return mix(found)


def signatures(ids: Ids, offsets: Offsets, *, section: NearSection) -> NDArray[np.uint32]:
    """The minima themselves, uint32[docs, slots]: the share of equal ones estimates the Jaccard similarity of the sets
    of n-grams, with a standard deviation of at most sqrt(s (1 - s) / slots). Arguments as for `bands`."""
    minima = np.full((len(offsets) - 1, section.slots), EMPTY, dtype=np.uint32)
    for start in range(0, len(ids) - section.ngram + 1, _BLOCK):
        values = ids[start : start + _BLOCK + section.ngram - 1] + np.uint64(1)
        _throw_block(window_hashes(values, ngram=section.ngram), start, offsets, minima, ngram=section.ngram)
    short = np.flatnonzero((minima == EMPTY).any(axis=1))
    for documents in _groups(short, offsets):
        minima[documents] = _fill(minima[documents], *_windows_of(ids, offsets, documents, section.ngram))
    return minima


def window_hashes(values: Hashes, *, ngram: int) -> Hashes:
    """uint64[n - ngram + 1]: mix(B + sum of value_j B^(ngram - 1 - j)), modulo 2^64, of each window of `ngram` values.

    The polynomial of a window of a + b tokens is that of its first a, times B^b, plus that of its last b: so it takes
    log2(ngram) steps for all windows at once (Karp and Rabin 1987 for the polynomial).
    """
    power = values  # of windows of 1, 2, 4 ... values
    whole, length, width, left = power, 0, 1, ngram
    while left:
        if left & 1:
            whole = power if length == 0 else _join(whole, length, power, width)
            length += width
        left >>= 1
        if left:
            power = _join(power, width, power, width)
            width *= 2
    return mix(whole + np.uint64(BASE))


def _join(first: Hashes, first_width: int, second: Hashes, second_width: int) -> Hashes:
    windows = len(second) - first_width
    joined = first[:windows] * np.uint64(pow(BASE, second_width, _WORD + 1))
    joined += second[first_width:]
    return joined


def _throw_block(hashes: Hashes, start: int, offsets: Offsets, minima: NDArray[np.uint32], *, ngram: int) -> None:
    """Throws the windows that start at tokens `start`, `start + 1`, ... once, but for those across two documents."""
    end = start + len(hashes)
    first, last = np.searchsorted(offsets, [start, end - 1], side="right") - 1
    bounds = np.clip(offsets[first : last + 2], start, end) - start
    values = hashes.astype(np.uint32)
    for back in range(1, ngram):
        crossing = offsets[first + 1 : last + 2] - back - start
        crossing = crossing[(crossing >= 0) & (crossing < len(values))]
        values[crossing] = EMPTY
    slots = minima.shape[1]
    rows = np.repeat(np.arange(last - first + 1) * slots, np.diff(bounds))
    np.minimum.at(minima[first : last + 1].reshape(-1), _slot_of(hashes, slots) + rows, values)


def _slot_of(hashes: Hashes, slots: int) -> NDArray[np.intp]:
    """The upper half of a hash, scaled to [0, slots); the lower half is the value."""
    return (((hashes >> _HALF) * np.uint64(slots)) >> _HALF).astype(np.intp)


def _groups(documents: NDArray[np.intp], offsets: Offsets) -> Iterator[NDArray[np.intp]]:
    """Cuts a list of documents where their tokens come to a block."""
    held = np.cumsum(offsets[documents + 1] - offsets[documents]) // _BLOCK
    yield from (group for group in np.split(documents, np.flatnonzero(np.diff(held)) + 1) if len(group))


def _windows_of(
    ids: Ids, offsets: Offsets, documents: NDArray[np.intp], ngram: int
) -> tuple[Hashes, NDArray[np.int64]]:
    """The hashes of the windows of these documents, one after the other, and how many each has (at least one)."""
    starts, lengths = offsets[documents], offsets[documents + 1] - offsets[documents]
    room = np.maximum(lengths, ngram)
    ends = np.cumsum(room)
    values = np.zeros(ends[-1], dtype=np.uint64)  # 0 is no token: a shorter document has a window of its own
    values[_spans(ends - room, lengths)] = ids[_spans(starts, lengths)] + np.uint64(1)
    within = np.ones(len(values), dtype=bool)
    within[(ends[:, None] - np.arange(1, ngram)).ravel()] = False
    hashes, counts = window_hashes(values, ngram=ngram)[within[: len(values) - ngram + 1]], room - ngram + 1
    if counts.max() <= _LONG:
        return hashes, counts
    each = [distinct(h) if len(h) > _LONG else h for h in np.split(hashes, np.cumsum(counts)[:-1])]
    return np.concatenate(each), np.array([len(h) for h in each], dtype=np.int64)


def _spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... of each span, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - ends + lengths, lengths)


def _fill(minima: NDArray[np.uint32], hashes: Hashes, counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Throws again where a slot is empty, a round at a time; what the last leaves gets a permutation of its own."""
    slots = minima.shape[1]
    for number in range(1, _ROUNDS):
        open_rows = (minima == EMPTY).any(axis=1)
        thrown = mix(hashes[np.repeat(open_rows, counts)] ^ np.uint64(BASE * number & _WORD))
        rows = np.repeat(np.flatnonzero(open_rows) * slots, counts[open_rows])
        fresh = np.full(minima.size, EMPTY, dtype=np.uint32)
        np.minimum.at(fresh, _slot_of(thrown, slots) + rows, thrown.astype(np.uint32))
        minima = np.where(minima == EMPTY, fresh.reshape(minima.shape), minima)
    return _permute(minima, hashes, counts)


def _permute(minima: NDArray[np.uint32], hashes: Hashes, counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Gives each empty slot the minimum over all windows of (a h mod 2^64) / 2^32, with an odd `a` of the slot's own:
    multiply-shift (Dietzfelbinger et al. 1997)."""
    rows, slots = np.nonzero(minima == EMPTY)
    multipliers = mix(np.arange(1, minima.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    starts = np.cumsum(counts) - counts
    for chosen in np.array_split(np.arange(len(rows)), 1 + int(counts[rows].sum()) // (8 * _BLOCK)):
        if len(chosen):
            lengths = counts[rows[chosen]]
            ends = np.cumsum(lengths)
            windows = _spans(starts[rows[chosen]], lengths)
            values = (hashes[windows] * np.repeat(multipliers[slots[chosen]], lengths)) >> _HALF
            minima[rows[chosen], slots[chosen]] = np.minimum.reduceat(values, ends - lengths).astype(np.uint32)
    return minima
