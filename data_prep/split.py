"""Which split a document belongs to: a pure function of (seed, its text)."""

from __future__ import annotations

import hashlib

_RANGE = 1 << 64


def unit_hash(data: bytes, *, seed: int, purpose: bytes) -> float:
    """A number in [0, 1) from BLAKE2b of `data`; different purposes give independent numbers.

    Args:
        purpose: at most 16 bytes.
    """
    digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little"), person=purpose).digest()
    return int.from_bytes(digest, "little") / _RANGE


def split_of(text: bytes, *, seed: int, heldout_fraction: float) -> str:
    """`heldout` or `train`. Hashes the content, so two copies of a text never land on both sides."""
    return "heldout" if unit_hash(text, seed=seed, purpose=b"heldout") < heldout_fraction else "train"
