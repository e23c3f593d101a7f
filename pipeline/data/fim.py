"""Fill in the middle: of some documents the middle is moved behind the end, so that it is learnt from both sides.

Bavarian et al. 2022 (arXiv:2207.14255), section 3, at the level of the context: what of a document lies in a sample is
cut at two places, drawn evenly, into prefix, middle and suffix, and becomes

    PSM  <prefix> prefix <suffix> suffix <middle> middle
    SPM  <prefix> <suffix> suffix <middle> prefix middle

behind the token that begins it and in front of the one that ends it, where it has them. It grows by three tokens; what
no longer fits at the end of the sample is cut off.
What is done to a document is a pure function of (seed, number of the sample, number of the document in it): law 1.
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
from headrace.base.errors import ConfigError
from pipeline.config.schema import FimSection
from pipeline.data.documents import I64, Borders
from pipeline.data.permutation import derive_key, permute

_ADDED = 3
_SHORTEST = 3
"""Tokens: what is shorter has no two places to cut it."""
_RANGE = 1 << 62


@dataclass(frozen=True)
class _Parts:
    """Documents in some samples: int64 [n] each, in order; `number` is the document's in its sample."""

    sample: I64
    number: I64
    start: I64
    length: I64


@dataclass(frozen=True)
class Fim:
    """The transformation of a run.

    Attributes:
        section: the config's.
        seed: the run's.
        length: S, tokens per sample.
        prefix, middle, suffix: ids of the three tokens.
        eos: the id that ends a document, which stays at its end; None where there is none.
        bos: the id that begins a document, which stays in front of the three; None where there is none.
    """

    section: FimSection
    seed: int
    length: int
    prefix: int
    middle: int
    suffix: int
    eos: int | None
    bos: int | None = None

    def borders(self, borders: Borders, samples: I64) -> Borders:
        """Where documents begin afterwards. No token is read.

        Args:
            borders: before.
            samples: int64 [n], their global numbers.
        """
        parts = self._parts(borders, samples.size)
        grown = self._chosen(parts, samples) * _ADDED
        # what the parts of a sample before each have grown by
        before = np.cumsum(grown) - grown
        first = np.searchsorted(parts.sample, np.arange(samples.size))
        before -= before[first][parts.sample]
        at = parts.start + before
        kept = (parts.number > 0) & (at <= self.length)
        if borders.used is None:
            return Borders(parts.sample[kept], at[kept])
        whole = np.bincount(parts.sample, weights=grown, minlength=samples.size).astype(np.int64)
        return Borders(parts.sample[kept], at[kept], np.minimum(borders.used + whole, self.length + 1))

    def rows(self, rows: npt.NDArray[Any], borders: Borders, samples: I64) -> npt.NDArray[Any]:
        """The samples afterwards.

        Args:
            rows: [n, S + 1].
            borders: before.
            samples: int64 [n], their global numbers.
        """
        parts = self._parts(borders, samples.size)
        chosen = self._chosen(parts, samples)
        spm = self._draw("spm", parts, samples) < self.section.spm_rate * _RANGE
        cuts = [self._draw(name, parts, samples) for name in ("one", "two")]
        made = rows.copy()
        for sample in np.unique(parts.sample[chosen]).tolist():
            pieces = []
            for i in range(*np.searchsorted(parts.sample, [sample, sample + 1]).tolist()):
                piece = rows[sample, parts.start[i] : parts.start[i] + parts.length[i]]
                drawn = (int(cuts[0][i]), int(cuts[1][i]))
                pieces.append(self._moved(piece, drawn, spm=bool(spm[i])) if chosen[i] else piece)
            row = np.concatenate(pieces)[: self.length + 1]
            made[sample, : row.size] = row
        return made

    def _moved(self, piece: npt.NDArray[Any], drawn: tuple[int, int], *, spm: bool) -> npt.NDArray[Any]:
        first, body = int(piece[0] == self.bos), piece.size - int(piece[-1] == self.eos)
        low, high = sorted(first + value * (body - first + 1) // _RANGE for value in drawn)
        prefix, middle, suffix = piece[first:low], piece[low:high], piece[high:body]
        marks = ([self.prefix], [self.suffix], [self.middle])
        psm_order = (marks[0], prefix, marks[1], suffix, marks[2], middle)
        spm_order = (marks[0], marks[1], suffix, marks[2], prefix, middle)
        parts = (piece[:first], *(spm_order if spm else psm_order), piece[body:])
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def _parts(self, borders: Borders, samples: int) -> _Parts:
        ends = np.full(samples, self.length + 1) if borders.used is None else borders.used
        sample = np.concatenate([np.arange(samples), borders.sample])
        start = np.concatenate([np.zeros(samples, dtype=np.int64), borders.at])
        order = np.lexsort((start, sample))
        sample, start = sample[order], start[order]
        last = np.append(sample[1:] != sample[:-1], True)
        end = np.where(last, ends[sample], np.append(start[1:], 0))
        number = np.arange(sample.size) - np.searchsorted(sample, sample)
        return _Parts(sample, number, start, end - start)

    def _chosen(self, parts: _Parts, samples: I64) -> npt.NDArray[np.bool_]:
        drawn = self._draw("rate", parts, samples) < self.section.rate * _RANGE
        return np.asarray(drawn & (parts.length >= _SHORTEST), dtype=np.bool_)

    def _draw(self, what: str, parts: _Parts, samples: I64) -> I64:
        """A number in 0.._RANGE-1 for each part, from nothing but its place."""
        place = samples[parts.sample] * (self.length + 1) + parts.number
        return permute(place, size=_RANGE, key=derive_key(self.seed, "fim", what))


def make_fim(section: FimSection, *, seed: int, length: int, tokenizer: Path, eos: int | None) -> Fim:
    """The transformation that a config asks for.

    Raises:
        ConfigError: the tokenizer lacks one of the tokens.
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
