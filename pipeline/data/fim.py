"""Fill-in-the-middle (FIM): the middle of some documents is moved behind their end, and predicted from both sides.

Bavarian et al. 2022 (arXiv:2207.14255), section 3, at context level: the part of a document in a sample is split at
two uniformly random positions into prefix, middle and suffix, and becomes

    PSM  <prefix> prefix <suffix> suffix <middle> middle
    SPM  <prefix> <suffix> suffix <middle> prefix middle

between the document's begin and end tokens, if it has them. The part grows by three tokens; tokens that no longer fit
into the sample are cut off. The result is a pure function of (seed, sample index, document index in the sample): law 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from data_prep.tokenizer.fingerprint import TOKENIZER_JSON
from data_prep.tokenizer.load import special_ids
from foundation.errors import ConfigError
from pipeline.config.sections.data import FimSection
from pipeline.data.documents import I64, DocumentBoundaries
from pipeline.data.permutation import derive_key, permute

_ADDED = 3
_SHORTEST = 3
"""Fewest tokens of a document's part that is rearranged; a shorter part stays unchanged."""
_RANGE = 1 << 62


@dataclass(frozen=True)
class _SampleDocuments:
    """Documents in samples, int64 [n] each, in order; `number` is the index of the document in its sample."""

    sample: I64
    number: I64
    start: I64
    length: I64


@dataclass(frozen=True)
class Fim:
    """The FIM transformation of a run.

    Attributes:
        section: `data.fim` of the config.
        seed: seed of the run.
        length: S, tokens per sample.
        prefix, middle, suffix: ids of the three special tokens.
        eos: id that ends a document and stays at its end; None without one.
        bos: id that begins a document and stays in front; None without one.
    """

    section: FimSection
    seed: int
    length: int
    prefix: int
    middle: int
    suffix: int
    eos: int | None
    bos: int | None = None

    def boundaries(self, boundaries: DocumentBoundaries, samples: I64) -> DocumentBoundaries:
        """Returns the document boundaries after the transformation. No token is read.

        Args:
            boundaries: document boundaries before the transformation.
            samples: int64 [n], global sample numbers.
        """
        parts = self._parts(boundaries, samples.size)
        grown = self._selected(parts, samples) * _ADDED
        # tokens by which the documents before each one in its sample have grown
        before = np.cumsum(grown) - grown
        first = np.searchsorted(parts.sample, np.arange(samples.size))
        before -= before[first][parts.sample]
        at = parts.start + before
        kept = (parts.number > 0) & (at <= self.length)
        if boundaries.used is None:
            return DocumentBoundaries(parts.sample[kept], at[kept])
        whole = np.bincount(parts.sample, weights=grown, minlength=samples.size).astype(np.int64)
        return DocumentBoundaries(parts.sample[kept], at[kept], np.minimum(boundaries.used + whole, self.length + 1))

    def rows(self, rows: npt.NDArray[Any], boundaries: DocumentBoundaries, samples: I64) -> npt.NDArray[Any]:
        """Returns the samples after the transformation.

        Args:
            rows: [n, S + 1], tokens before the transformation.
            boundaries: document boundaries before the transformation.
            samples: int64 [n], global sample numbers.
        """
        parts = self._parts(boundaries, samples.size)
        selected = self._selected(parts, samples)
        spm = self._random("spm", parts, samples) < self.section.spm_rate * _RANGE
        cuts = [self._random(name, parts, samples) for name in ("one", "two")]
        made = rows.copy()
        for sample in np.unique(parts.sample[selected]).tolist():
            pieces = []
            for i in range(*np.searchsorted(parts.sample, [sample, sample + 1]).tolist()):
                piece = rows[sample, parts.start[i] : parts.start[i] + parts.length[i]]
                drawn = (int(cuts[0][i]), int(cuts[1][i]))
                pieces.append(self._rearranged(piece, drawn, spm=bool(spm[i])) if selected[i] else piece)
            row = np.concatenate(pieces)[: self.length + 1]
            made[sample, : row.size] = row
        return made

    def _rearranged(self, piece: npt.NDArray[Any], drawn: tuple[int, int], *, spm: bool) -> npt.NDArray[Any]:
        first, body = int(piece[0] == self.bos), piece.size - int(piece[-1] == self.eos)
        low, high = sorted(first + value * (body - first + 1) // _RANGE for value in drawn)
        prefix, middle, suffix = piece[first:low], piece[low:high], piece[high:body]
        markers = ([self.prefix], [self.suffix], [self.middle])
        psm_order = (markers[0], prefix, markers[1], suffix, markers[2], middle)
        spm_order = (markers[0], markers[1], suffix, markers[2], prefix, middle)
        parts = (piece[:first], *(spm_order if spm else psm_order), piece[body:])
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def _parts(self, boundaries: DocumentBoundaries, samples: int) -> _SampleDocuments:
        ends = np.full(samples, self.length + 1) if boundaries.used is None else boundaries.used
        sample = np.concatenate([np.arange(samples), boundaries.sample])
        start = np.concatenate([np.zeros(samples, dtype=np.int64), boundaries.at])
        order = np.lexsort((start, sample))
        sample, start = sample[order], start[order]
        last = np.append(sample[1:] != sample[:-1], True)
        end = np.where(last, ends[sample], np.append(start[1:], 0))
        number = np.arange(sample.size) - np.searchsorted(sample, sample)
        return _SampleDocuments(sample, number, start, end - start)

    def _selected(self, parts: _SampleDocuments, samples: I64) -> npt.NDArray[np.bool_]:
        drawn = self._random("rate", parts, samples) < self.section.rate * _RANGE
        return np.asarray(drawn & (parts.length >= _SHORTEST), dtype=np.bool_)

    def _random(self, what: str, parts: _SampleDocuments, samples: I64) -> I64:
        """Returns a pseudo-random number in 0.._RANGE-1 per document, a function of seed, sample and document index."""
        location = samples[parts.sample] * (self.length + 1) + parts.number
        return permute(location, size=_RANGE, key=derive_key(self.seed, "fim", what))


def make_fim(section: FimSection, *, seed: int, length: int, tokenizer: Path, eos: int | None) -> Fim:
    """Makes the FIM transformation of a config.

    Raises:
        ConfigError: the tokenizer lacks one of the special tokens.
    """
    known = Tokenizer.from_file(str(tokenizer / TOKENIZER_JSON))
    ids: dict[str, int] = {}
    for name in ("prefix", "middle", "suffix"):
        token = getattr(section, name)
        number = known.token_to_id(token)
        if number is None:
            why = f"the tokenizer in {tokenizer} has no such token"
            remedy = 'name one it has, or list it in "tokenizer": {"special_tokens": [...]} of data prep'
            raise ConfigError(f"data.fim.{name}", token, why=why, remedy=remedy)
        ids[name] = number
    return Fim(section, seed, length, eos=eos, bos=special_ids(tokenizer, known)["bos_id"], **ids)
