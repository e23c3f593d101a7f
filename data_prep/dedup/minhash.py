"""MinHash signatures of token n-grams and their LSH band hashes: similar documents share some of the band hashes.

A batch of token ids -> a 64-bit hash of every window (n-gram) of `ngram` tokens -> the MinHash signature, `slots`
minima per document, each equal in two documents with the probability of their Jaccard similarity -> bands: minima
hashed in groups of `rows`.

The minima follow Dahlgaard, Knudsen and Thorup, "Fast Similarity Sketching" (FOCS 2017): a window is hashed into one
slot instead of all, and slots that stay empty (in short documents) are filled in further rounds (densification). So a
window costs a few nanoseconds for any number of slots. All arithmetic is modulo 2^64: results are the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_prep.config.dedup import NearSection
from data_prep.dedup.table import sorted_unique
from data_prep.hashing import mix

Hashes = NDArray[np.uint64]
Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]

EMPTY = np.uint32(0xFFFFFFFF)
"""Value of an empty slot. A minimum of this value (probability 2^-32) also counts as empty."""
_ROUNDS = 6
"""Number of hashing rounds before a slot that is still empty gets a hash of its own. A document of 100 tokens takes 2.5
times as long with 1 round, and 1.4 times with 16."""
_BLOCK = 1 << 15  # windows at a time: their hashes fit a core's cache; with 2^18 each takes four times as long
_LONG = 1 << 12  # a document of more windows and still an empty slot is repetitive: each distinct window is used once
BASE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_WORD = (1 << 64) - 1
_HALF = np.uint64(32)


def band_hashes(ids: Ids, offsets: Offsets, *, section: NearSection) -> Hashes:
    """The LSH band hashes of a batch of documents.

    Two documents of similarity s share the hash of a given band with probability s^rows, and the hash of at least one
    band with 1 - (1 - s^rows)^bands (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4.2). A
    document of fewer than `ngram` tokens is a single window: it shares bands only with documents of the same tokens.

    Args:
        ids: uint32[n], the token ids of all documents, concatenated.
        offsets: int64[docs + 1], start of each document; the last is n.
        section: the size of n-grams, and the numbers of bands and rows.

    Returns:
        uint64[docs, bands].
    """
    return bands_of(signatures(ids, offsets, section=section), section=section)


def bands_of(minima: NDArray[np.uint32], *, section: NearSection) -> Hashes:
    """The LSH band hashes, uint64[docs, bands], of `signatures`."""
    minima = minima.reshape(-1, section.bands, section.rows)
    found = np.zeros(minima.shape[:2], dtype=np.uint64)
    for row in range(section.rows):
        found *= np.uint64(BASE)
        found += minima[:, :, row]
    return mix(found)


def signatures(ids: Ids, offsets: Offsets, *, section: NearSection) -> NDArray[np.uint32]:
    """The MinHash signatures, uint32[docs, slots].

    The fraction of equal minima estimates the Jaccard similarity s of the sets of n-grams, with a standard deviation of
    at most sqrt(s (1 - s) / slots). Arguments as for `band_hashes`.
    """
    minima = np.full((len(offsets) - 1, section.slots), EMPTY, dtype=np.uint32)
    for start in range(0, len(ids) - section.ngram + 1, _BLOCK):
        values = ids[start : start + _BLOCK + section.ngram - 1] + np.uint64(1)
        _hash_block(window_hashes(values, ngram=section.ngram), start, offsets, minima, ngram=section.ngram)
    short = np.flatnonzero((minima == EMPTY).any(axis=1))
    for documents in _batches(short, offsets):
        minima[documents] = _densify(minima[documents], *_window_hashes_of(ids, offsets, documents, section.ngram))
    return minima


def window_hashes(values: Hashes, *, ngram: int) -> Hashes:
    """uint64[n - ngram + 1]: mix(B + sum of value_j B^(ngram - 1 - j)), modulo 2^64, of each window of `ngram` values.

    The polynomial of a window of a + b tokens is that of its first a tokens, times B^b, plus that of its last b tokens.
    So it takes log2(ngram) steps for all windows at once (Karp and Rabin 1987 for the polynomial).
    """
    power = values  # for windows of 1, 2, 4 ... values
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


def _hash_block(hashes: Hashes, start: int, offsets: Offsets, minima: NDArray[np.uint32], *, ngram: int) -> None:
    """Puts windows that start at tokens `start`, `start + 1`, ... into slots, unless they cross documents."""
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


def _batches(documents: NDArray[np.intp], offsets: Offsets) -> Iterator[NDArray[np.intp]]:
    """Splits a list of documents into batches of about a block of tokens."""
    block = np.cumsum(offsets[documents + 1] - offsets[documents]) // _BLOCK
    yield from (batch for batch in np.split(documents, np.flatnonzero(np.diff(block)) + 1) if len(batch))


def _window_hashes_of(
    ids: Ids, offsets: Offsets, documents: NDArray[np.intp], ngram: int
) -> tuple[Hashes, NDArray[np.int64]]:
    """Concatenated window hashes of these documents, and the number of windows of each document (at least one)."""
    starts, lengths = offsets[documents], offsets[documents + 1] - offsets[documents]
    room = np.maximum(lengths, ngram)
    ends = np.cumsum(room)
    values = np.zeros(ends[-1], dtype=np.uint64)  # token values are id + 1, so 0 pads a shorter document to one window
    values[_spans(ends - room, lengths)] = ids[_spans(starts, lengths)] + np.uint64(1)
    within = np.ones(len(values), dtype=bool)
    within[(ends[:, None] - np.arange(1, ngram)).ravel()] = False
    hashes, counts = window_hashes(values, ngram=ngram)[within[: len(values) - ngram + 1]], room - ngram + 1
    if counts.max() <= _LONG:
        return hashes, counts
    each = [sorted_unique(h) if len(h) > _LONG else h for h in np.split(hashes, np.cumsum(counts)[:-1])]
    return np.concatenate(each), np.array([len(h) for h in each], dtype=np.int64)


def _spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices start, start + 1, ... of each span, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - ends + lengths, lengths)


def _densify(minima: NDArray[np.uint32], hashes: Hashes, counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Densification: rehashes all windows of documents with empty slots, up to `_ROUNDS`, to fill those slots."""
    slots = minima.shape[1]
    for number in range(1, _ROUNDS):
        open_rows = (minima == EMPTY).any(axis=1)
        rehashed = mix(hashes[np.repeat(open_rows, counts)] ^ np.uint64(BASE * number & _WORD))
        rows = np.repeat(np.flatnonzero(open_rows) * slots, counts[open_rows])
        fresh = np.full(minima.size, EMPTY, dtype=np.uint32)
        np.minimum.at(fresh, _slot_of(rehashed, slots) + rows, rehashed.astype(np.uint32))
        minima = np.where(minima == EMPTY, fresh.reshape(minima.shape), minima)
    return _fill_remaining(minima, hashes, counts)


def _fill_remaining(minima: NDArray[np.uint32], hashes: Hashes, counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Gives each empty slot the minimum over all windows of (a h mod 2^64) / 2^32, with an odd `a` for each slot:
    multiply-shift hashing (Dietzfelbinger et al. 1997)."""
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
