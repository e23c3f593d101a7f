"""Decontamination: drops texts that share an n-gram with evaluation data (Brown et al. 2020, arXiv 2005.14165, app. C).

Both sides are normalized alike: lower case, and words are runs of letters and digits. Punctuation and line breaks do
not matter. Evaluation texts of less than n words cannot be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from data_prep.clean.document import Document
from data_prep.clean.lists import evaluation_texts
from data_prep.clean.ngrams import Keys, KeySet, NGrams
from data_prep.clean.words import PLAIN_WORDS
from data_prep.config.cleaning import DecontaminateSection
from foundation.errors import ConfigError


class Decontaminate:
    """The cleaning step of `DecontaminateSection`."""

    def __init__(self, section: DecontaminateSection, *, field: str) -> None:
        self._n = section.ngram
        self._evaluation_ngrams = KeySet(self._ngrams_of(section, field=field))

    def __call__(self, document: Document, _: Mapping[str, Any]) -> Document | str:
        """Implements `chain.Rule`."""
        found = self._evaluation_ngrams.intersection(NGrams(document.folded_keys).of(self._n))
        return "in evaluation data" if len(found) else document

    def _ngrams_of(self, section: DecontaminateSection, *, field: str) -> Keys:
        found = [np.empty(0, np.uint64)]
        for path in section.evaluations:
            read = evaluation_texts(path, fields=section.fields, field=f"{field}.evaluations")
            found += [NGrams(PLAIN_WORDS.keys(text.lower())).of(self._n) for text in read]
        keys = np.concatenate(found)
        if not len(keys):
            why = f"no text in {', '.join(section.evaluations)} has {self._n} words"
            raise ConfigError(f"{field}.ngram", self._n, why=why, remedy="set a smaller ngram, or give other files")
        return keys
