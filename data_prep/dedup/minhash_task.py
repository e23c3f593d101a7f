"""MinHash band hashes and signatures of a map task's documents, computed from their token ids instead of their text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.dedup import NearSection
from data_prep.dedup import minhash, words
from data_prep.dedup.verify import Signatures, shortened
from data_prep.hashing import U64
from data_prep.tokenizer.engines import Tokens
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON

_CLASSES = "classes.npy"


@dataclass(frozen=True)
class MinHasher:
    """Computes band hashes; `classes`: uint32 [vocabulary], the token classes of `words.token_classes`."""

    classes: np.ndarray[Any, Any]

    def hashes(self, tokens: Tokens, *, section: NearSection | None) -> tuple[U64, Signatures | None]:
        """Band hashes, uint64 [documents, bands]; and the signatures, or None if clusters are not verified."""
        assert section is not None
        comparable = words.comparable_tokens(tokens.ids, tokens.offsets, classes=self.classes, ngram=section.ngram)
        minima = minhash.signatures(*comparable, section=section)
        kept = shortened(minima) if section.clusters == "verified" else None
        return minhash.bands_of(minima, section=section), kept


@cache
def open_minhasher(directory: Path) -> MinHasher:
    """Reads the classes that `write_token_classes` wrote; cached for the next task of the same process."""
    return MinHasher(np.load(directory / _CLASSES))


def write_token_classes(directory: Path, folder: Path) -> None:
    """Writes the token classes of a tokenizer folder."""
    np.save(directory / _CLASSES, words.tokenizer_token_classes(folder / TOKENIZER_JSON))
