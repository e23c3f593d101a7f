"""The text a tokenizer learns from: train documents, chosen by a hash, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from data_prep.chat.conversation import plain
from data_prep.config import CorpusConfig
from data_prep.hashing import HELDOUT, SAMPLE, U64, below, content_hashes, document_keys, unit_key
from data_prep.plan import Unit
from data_prep.readers.records import Batch
from data_prep.readers.unit import read_unit, wanted_of

_SPREAD = 8
"""Of a large corpus, units of this many times the sample are read: the sample then holds text from many places at the
cost of reading 8 bytes for each that is kept."""
_PROOF_CHARACTERS = 1 << 17
_LONGEST_IN_PROOF = 1 << 14


def sample_texts(units: Sequence[Unit], config: CorpusConfig) -> Iterator[str]:
    """Yields about `tokenizer.sample_bytes` of train texts: a pure function of the corpus and the config.

    Units are drawn by the hash of their name, documents by the hash of their place, until the sample is full.
    Unreadable records are passed over; the map tasks report them.
    """
    wanted = config.tokenizer.sample_bytes
    drawn = _draw(units, wanted * _SPREAD, config.seed)
    share = min(1.0, wanted / max(1, sum(unit.end - unit.start for unit in drawn)))
    for unit in drawn:
        for batch in _batches(unit, config):
            for text, size in _chosen(batch, unit, share, config):
                if wanted <= 0:
                    return
                wanted -= size
                yield text


def first_texts(units: Sequence[Unit], config: CorpusConfig) -> list[str]:
    """The beginnings of some texts of a few units, to prove an engine on: about 130,000 characters."""
    texts, left = list[str](), _PROOF_CHARACTERS
    for unit in _draw(units, 1 << 62, config.seed):
        for batch in _batches(unit, config):
            texts += [text[:_LONGEST_IN_PROOF] for text in batch.texts]
            left -= sum(min(len(text), _LONGEST_IN_PROOF) for text in batch.texts)
            if left <= _PROOF_CHARACTERS // 2:  # the rest from the next unit
                break
        if left <= 0:
            break
    return texts


def _batches(unit: Unit, config: CorpusConfig) -> Iterator[Batch]:
    source = next(source for source in config.sources if source.label == unit.source)
    for record in read_unit(unit, wanted_of(source)):
        if isinstance(record, Batch):
            if source.messages_field is not None:
                record.texts = [plain(line) for line in record.texts]
            yield record


def _draw(units: Sequence[Unit], wanted_bytes: int, seed: int) -> list[Unit]:
    drawn: list[Unit] = []
    for unit in sorted(units, key=lambda u: unit_key(u.source, f"{u.file}#{u.part}", seed=seed)):
        if wanted_bytes <= 0:
            break
        drawn.append(unit)
        wanted_bytes -= unit.end - unit.start
    return drawn


def _chosen(batch: Batch, unit: Unit, share: float, config: CorpusConfig) -> list[tuple[str, int]]:
    """The texts of a batch that are in the sample, with their sizes in bytes."""
    raw = [text.encode() for text in batch.texts]
    keys = document_keys(_keys(unit, len(raw), config), np.array(batch.at, np.int64))
    in_sample = below(keys, share=share, seed=config.seed, purpose=SAMPLE) | (share >= 1)
    heldout = below(content_hashes(raw)[:, 0], share=config.heldout_fraction, seed=config.seed, purpose=HELDOUT)
    return [(batch.texts[i], len(raw[i])) for i in np.flatnonzero(in_sample & ~heldout) if raw[i]]


def _keys(unit: Unit, count: int, config: CorpusConfig) -> U64:
    return np.full(count, unit_key(unit.source, unit.file, seed=config.seed), np.uint64)
