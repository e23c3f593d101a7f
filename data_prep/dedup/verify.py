"""Clusters of near duplicates in which every dropped document is similar to the document kept in its place.

Connected components can also hold documents that share nothing: the two ends of a chain whose links overlap. So
documents of a component are compared in input order. A document is dropped only if the fraction of equal minima in its
signature and a kept one's estimates a Jaccard similarity of at least the threshold.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.config.dedup import NearSection

Signatures = NDArray[np.uint8]
"""uint8 [documents, slots]: the lowest 8 bits of each minimum (Li and Koenig, "b-Bit Minwise Hashing", 2010)."""
_EQUAL_BY_CHANCE = 1 / 256
_FIRST_KEPT = 64
"""Number of kept documents of a component with which all other documents are compared. In components with more (texts
of one template), the rest is compared only with kept documents that share a band: time does not grow as the square of
the size.
"""
_CHUNK = 1 << 16


def shortened(minima: NDArray[np.uint32]) -> Signatures:
    """Shortens the signatures of `minhash.signatures` to the lowest 8 bits of each minimum."""
    return minima.astype(np.uint8)


def find_kept(
    cluster: NDArray[Any], signatures: Signatures, *, seen: NDArray[np.bool_], section: NearSection
) -> NDArray[Any]:
    """Finds, for each document, the document kept in its place (itself if it is kept).

    Args:
        cluster: int [documents], component of each document, ascending; within a component in the order of the input.
        signatures: uint8 [documents, slots], shortened signatures; may be a memory map.
        seen: bool [documents], whether a document is from an earlier corpus: it is kept even if similar to others.
    """
    share = section.threshold * (1 - _EQUAL_BY_CHANCE) + _EQUAL_BY_CHANCE
    least = math.ceil(share * section.slots - 1e-9)
    kept_for = np.arange(len(cluster), dtype=cluster.dtype)
    undecided = kept_for.copy()
    for _ in range(_FIRST_KEPT):  # each round keeps the first of each component and compares the others with it
        first = np.ones(len(undecided), dtype=bool)
        first[1:] = cluster[undecided[1:]] != cluster[undecided[:-1]]
        kept = undecided[first][np.cumsum(first, dtype=cluster.dtype)[~first] - 1]
        undecided = undecided[~first]
        if not len(undecided):
            return kept_for
        similar = _similar(signatures, undecided, kept, least) & ~seen[undecided]
        kept_for[undecided[similar]] = kept[similar]
        undecided = undecided[~similar]
    _compare_by_bands(kept_for, undecided, cluster, signatures, seen, least, section)
    return kept_for


def _similar(signatures: Signatures, first: NDArray[Any], second: NDArray[Any], least: int) -> NDArray[np.bool_]:
    found = np.empty(len(first), dtype=bool)
    for start in range(0, len(first), _CHUNK):
        part = slice(start, start + _CHUNK)
        found[part] = (signatures[first[part]] == signatures[second[part]]).sum(axis=1) >= least
    return found


def _compare_by_bands(
    kept_for: NDArray[Any],
    undecided: NDArray[Any],
    cluster: NDArray[Any],
    signatures: Signatures,
    seen: NDArray[np.bool_],
    least: int,
    section: NearSection,
) -> None:
    """Decides on the remaining documents, by the first `_FIRST_KEPT` kept documents of each band."""
    buckets: dict[tuple[int, bytes], list[int]] = {}
    last = None
    for document in undecided.tolist():
        if cluster[document] != last:
            buckets, last = {}, cluster[document]
        own = np.array(signatures[document])
        keys = [(band, part.tobytes()) for band, part in enumerate(own.reshape(section.bands, section.rows))]
        near = sorted({other for key in keys for other in buckets.get(key, ())})
        similar = np.flatnonzero((signatures[near] == own).sum(axis=1) >= least)
        if len(similar) and not seen[document]:
            kept_for[document] = near[similar[0]]
            continue
        for key in keys:
            if len(bucket := buckets.setdefault(key, [])) < _FIRST_KEPT:
                bucket.append(document)
