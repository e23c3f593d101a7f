"""MinHash signatures of a map task's documents, from their token ids: the text is not looked at again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.dedup import NearSection
from data_prep.dedup import minhash, words
from data_prep.hashing import U64
from data_prep.tokenizer.engines import Tokens
from data_prep.tokenizer.fingerprint import TOKENIZER_JSON

_CLASSES = "classes.npy"


@dataclass(frozen=True)
class MinHasher:
    """classes: uint32 [vocabulary], which tokens count as the same word."""

    classes: np.ndarray[Any, Any]

    def bands(self, tokens: Tokens, *, section: NearSection | None) -> U64:
        """uint64 [documents, bands]; see `dedup.minhash.bands`."""
        assert section is not None
        compared = words.compared(tokens.ids, tokens.offsets, classes=self.classes, ngram=section.ngram)
        return minhash.bands(*compared, section=section)


@cache
def open_minhasher(directory: Path) -> MinHasher:
    """What `write_classes` has left; kept for the next task of the same process."""
    return MinHasher(np.load(directory / _CLASSES))


def write_classes(directory: Path, folder: Path) -> None:
    """Writes the classes of a tokenizer folder's tokens."""
    np.save(directory / _CLASSES, words.tokenizer_classes(folder / TOKENIZER_JSON))
