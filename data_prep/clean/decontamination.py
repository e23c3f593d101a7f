"""Texts that share a run of words with evaluation data are dropped (Brown et al. 2020, arXiv 2005.14165, appendix C).

Both sides are normalised alike: lower case, words are runs of letters and digits, so punctuation and line breaks do not
matter. A text of the evaluation data that is shorter than a run cannot be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from data_prep.clean.lists import texts
from data_prep.clean.ngrams import Keys, KeySet, NGrams
from data_prep.clean.statistics import Statistics
from data_prep.clean.words import PLAIN_WORDS
from data_prep.config.cleaning import DecontaminateSection
from headrace.base.errors import ConfigError


class Decontaminate:
    """See `DecontaminateSection`."""

    def __init__(self, section: DecontaminateSection, *, field: str) -> None:
        self._n = section.ngram
        self._known = KeySet(self._ngrams_of(section, field=field))

    def __call__(self, text: Statistics, _: Mapping[str, Any]) -> Statistics | str:
        """See `chain.Rule`."""
        found = self._known.common(NGrams(text.folded_keys).of(self._n))
        return "in evaluation data" if len(found) else text

    def _ngrams_of(self, section: DecontaminateSection, *, field: str) -> Keys:
        found = [np.empty(0, np.uint64)]
        for path in section.evaluations:
            read = texts(path, fields=section.fields, field=f"{field}.evaluations")
            found += [NGrams(PLAIN_WORDS.keys(text.lower())).of(self._n) for text in read]
        keys = np.concatenate(found)
        if not len(keys):
            why = f"no text in {', '.join(section.evaluations)} has {self._n} words"
            raise ConfigError(f"{field}.ngram", self._n, why=why, remedy="set a shorter ngram, or give other files")
        return keys
